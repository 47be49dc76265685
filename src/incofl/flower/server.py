"""The server: Flower's ``ServerApp`` around the loop that every engine runs."""

import contextlib
from collections.abc import Mapping
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from incofl.config import Config, make_config, read_values
from incofl.costs import human
from incofl.data import Data
from incofl.engine.progress import Lines, Progress
from incofl.engine.run import AnyConfig, AnyModel, Result, run
from incofl.errors import ConfigError, IncoflError
from incofl.flower.backend import FlowerBackend
from incofl.flower.settings import Settings, read_run_config
from incofl.method import Method
from incofl.options import from_table
from incofl.task import Task


def make_server_app(
    config: AnyConfig = None,
    *,
    model: AnyModel = None,
    data: Data | str | None = None,
    method: Method | str | None = None,
    task: Task | str | None = None,
    **settings: Any,
) -> ServerApp:
    """A server app that trains a federation on Flower's nodes, into a run folder like any other.

    Args:
        config: as for ``incofl.run``; Flower's run config may name another (``config``) and override its keys
            (``rounds``, ``data.alpha``).
        model: as for ``incofl.run``. ``make_client_app`` needs the same objects.
        data: the server's ``Data``. If only the nodes have training examples, its train part has 0 examples, which tell
            their shape and type, and its test part is what the server evaluates on.
        method: as for ``incofl.run``.
        task: as for ``incofl.run``.
        settings: the fields of ``Settings``; Flower's run config may override them.
    """
    chosen, objects = (
        from_table(Settings(), settings, "settings"),
        {"model": model, "data": data, "method": method, "task": task},
    )
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        try:
            ours, named, overrides = read_run_config(context.run_config, chosen)
            serve(grid, _config(named or config, overrides, objects), ours)
        except IncoflError as problem:
            raise problem.with_traceback(None) from None  # what Flower shows of it ends with one clear line

    app.main()(main)
    return app


def serve(grid: Grid, config: Config, settings: Settings) -> Result:
    """Runs a federation on the nodes of a grid and returns its result."""
    with contextlib.ExitStack() as stack:
        progress: Progress = Lines()
        if settings.metrics_port:
            from incofl.flower.monitor import Monitor  # prometheus-client is not needed otherwise

            progress = stack.enter_context(Monitor(progress, settings.metrics_port))
        backend = FlowerBackend(grid, settings)
        result = run(config, settings.out, resume=settings.resume, progress=progress, backend=backend)
    metric = "" if result["accuracy"] is None else f", {result['metric']} {result['accuracy']:.4g}"
    down, up = (human(result[f"bytes_{direction}"], "B") for direction in ("down", "up"))
    print(
        f"{result['rounds']} rounds{metric}; {down} down, {up} up, {result['seconds']:.0f} s; records in {settings.out}"
    )
    return result


def _config(given: AnyConfig, overrides: list[str], objects: Mapping[str, Any]) -> Config:
    if isinstance(given, Config):
        objects = given.objects | {kind: value for kind, value in objects.items() if value is not None}
        given = given.to_dict()
    values = given if isinstance(given, Mapping) else read_values(given)
    config = make_config(values, overrides, **objects)
    if config.engine.compile:
        raise ConfigError("engine.compile: got true, expected false: nodes are new processes in every turn")
    return config
