"""The command ``incofl run``."""

from pathlib import Path
from typing import Annotated

import typer

import incofl
import incofl.cli.arguments as arg
from incofl.errors import ConfigError, RunError


def run(
    config: arg.Config = None,
    method: arg.Method = None,
    model: arg.Model = None,
    rounds: arg.Rounds = None,
    seed: arg.Seed = None,
    root: arg.Root = None,
    set_: arg.Set = None,
    out: Annotated[Path | None, arg.out("DIR", "Run folder [runs/NAME-TIME].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out; CONFIG is optional.")] = False,
    devices: arg.Devices = None,
    ignore_limits: arg.IgnoreLimits = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be run, and end.")] = False,
    show: Annotated[bool, typer.Option("--print-config", help="Print the complete config as TOML, and end.")] = False,
    quiet: arg.Quiet = False,
) -> None:
    """Train a federation and print the accuracy of each level.

    Without CONFIG it trains five sizes of a small ResNet on the embedded digits by FedFloor.
    """
    from incofl.cli.display import RunDisplay
    from incofl.costs import human
    from incofl.engine.build import build, plan_fleet
    from incofl.engine.run_folder import RunFolder, new_folder
    from incofl.engine.trackers import make_trackers

    if resume and out is None:
        raise ConfigError("--resume: got no --out, expected the folder of the run to continue")
    if resume and config is None and out is not None:
        config = str(out / "config.toml")
        if not Path(config).exists():
            raise RunError(f"{out}: holds no run to resume; check --out, or name the CONFIG to start it with")
    overrides = arg.overrides(set_, method=method, model=model, rounds=rounds, seed=seed, root=root)
    if devices is None:
        resolved = incofl.load_config(config, overrides)
    else:
        resolved, *_ = plan_fleet(config, overrides, devices, ignore_limits)
    if show:
        typer.echo(resolved.to_toml(), nl=False)
        return
    folder = RunFolder(out.expanduser() if out is not None else new_folder(resolved))

    def advice() -> str:
        done = len(folder.rows())  # rows without a checkpoint were dropped on the way out
        saved = f"{done} finished round(s) are saved, continue with: incofl run --resume --out {folder.path}"
        return saved if done else "no round was finished"

    if dry:
        federation = build(resolved)
        folder.check(resolved, resume)
        make_trackers(resolved, folder.path)
        RunDisplay(quiet).started(resolved, federation, [])
        typer.echo(f"nothing was run; the records would be in {folder.path}")
        return
    with RunDisplay(quiet, advice=advice) as display:
        result = incofl.run(resolved, folder.path, resume=resume, progress=display)
    display.print_result(result)
    traffic = f"{human(result['bytes_down'], 'B')} down, {human(result['bytes_up'], 'B')} up"
    typer.echo(f"{traffic}, {result['seconds']:.0f} s; records in {folder.path}")
