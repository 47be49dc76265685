"""The server: Flower's ``ServerApp`` around the loop that every engine runs."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from incofl.cli.display import RunDisplay, make_console
from incofl.config import Config, load_config, make_config
from incofl.costs import human
from incofl.engine.run import Progress, run
from incofl.errors import ConfigError, IncoflError
from incofl.flower.settings import Settings, read_run_config
from incofl.flower.site import FlowerSite
from incofl.flower.task import Task


def make_server_app(
    config: Config | Mapping[str, Any] | str | Path | None = None, task: Task | None = None, **settings: Any
) -> ServerApp:
    """A server app that trains the federation of a config on Flower's nodes, into a run folder like any other.

    Args:
        config: a TOML file, a preset's name, or values; Flower's run config may name another (``config``) and override
            its keys (``rounds``, ``data.alpha``).
        task: a model and examples of the user's own.
        settings: of the fleet, see ``Settings``; Flower's run config may override them.
    """
    chosen = Settings(**settings)
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        try:
            ours, named, overrides = read_run_config(context.run_config, chosen)
            serve(grid, _config(named or config, overrides, task), ours, task)
        except IncoflError as problem:
            raise problem.with_traceback(None) from None  # what Flower shows of it ends with one clear line

    app.main()(main)
    return app


def serve(grid: Grid, config: Config, settings: Settings, task: Task | None = None) -> dict[str, Any]:
    """Runs a federation on the nodes of a grid and returns its summary."""
    console = make_console()
    with contextlib.ExitStack() as stack:
        progress: Progress = stack.enter_context(RunDisplay(console))
        if settings.metrics_port:
            from incofl.flower.monitor import Monitor  # prometheus-client is not needed otherwise

            progress = stack.enter_context(Monitor(progress, settings.metrics_port))
        site = FlowerSite(grid, settings, task)
        summary = run(config, settings.out, resume=settings.resume, progress=progress, site=site)
    accuracy = "" if summary["accuracy"] is None else f", accuracy {summary['accuracy']:.3f}"
    console.print(
        f"{summary['rounds']} rounds{accuracy}; {human(summary['bytes_down'], 'B')} down, "
        f"{human(summary['bytes_up'], 'B')} up, {summary['seconds']:.0f} s; records in {settings.out}",
        soft_wrap=True,
    )
    return summary


def _config(given: Config | Mapping[str, Any] | str | Path | None, overrides: list[str], task: Task | None) -> Config:
    if task is not None:
        task.introduce()
        overrides = [*overrides, *task.overrides]
    if isinstance(given, Config):
        given = given.to_dict()
    config = make_config(given, overrides) if isinstance(given, Mapping) else load_config(given, overrides)
    if config.engine.compile:
        raise ConfigError("engine.compile: got true, expected false: nodes are new processes in every turn")
    return config
