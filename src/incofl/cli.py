"""The command line. Exit codes: 0 done, 2 bad input (one line on stderr), 130 interrupted with all rounds saved."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from click import ClickException
from rich.table import Table

import incofl
from incofl.cli_analysis import analyze
from incofl.cli_data import data_app
from incofl.cli_flower import flower_app
from incofl.cli_report import report
from incofl.cli_reproduce import reproduce_command
from incofl.config import Config, load_config, presets
from incofl.data import DATASETS
from incofl.devices import load_devices
from incofl.display import CompareDisplay, RunDisplay, comparison_table, make_console, plan_table, result_table
from incofl.engine.build import build_method, build_model, build_splitter, client_levels, split_kind
from incofl.engine.compare import compare as run_comparison
from incofl.engine.compare import table as comparison_lines
from incofl.engine.federation import clients_by_level
from incofl.engine.records import RunFolder
from incofl.engine.run import run as run_federation
from incofl.errors import ConfigError, IncoflError, RunError
from incofl.methods import METHODS, find_method
from incofl.models import MODELS, Model
from incofl.resources import Cost, DeviceClass, assign, costs, human

typer.core.HAS_RICH = False  # else brackets in help texts are escaped for rich even where its markup is off
app = typer.Typer(
    help="Federated learning with clients of unequal size. Start with: incofl run demo",
    add_completion=False,
    suggest_commands=False,  # click does it
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")

ConfigArgument = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a preset (incofl list presets).")
]
MethodOption = Annotated[str | None, typer.Option("--method", "-m", metavar="M", help="Method (incofl list methods).")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="M", help="Model (incofl list models), or your own as package.module:factory."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override one config key, e.g. data.alpha=0.1; repeatable."),
]
DevicesOption = Annotated[
    Path | None,
    typer.Option(
        "--devices", metavar="FILE", help="Device classes with limits: each gets the largest level that fits."
    ),
]


@app.command()
def run(
    config: ConfigArgument = None,
    method: MethodOption = None,
    model: ModelOption = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Run folder [runs/NAME-TIME].")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out (its own config if none is given).")
    ] = False,
    devices: DevicesOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the closing table only.")] = False,
) -> None:
    """Train a federation and print the accuracy of each level.

    Without CONFIG it trains five sizes of a small ResNet on the embedded digits with InCo Aggregation.
    """
    if resume and out is None:
        raise ConfigError("--resume: got no --out, expected the folder of the run to continue")
    if resume and config is None and out is not None:
        config = str(RunFolder(out).config)
        if not RunFolder(out).config.exists():
            raise RunError(f"{out}: holds no run to resume; check --out, or name the CONFIG to start it with")
    fleet = load_devices(devices) if devices is not None else []
    resolved = _config(config, method, model, set_, fleet)
    if fleet:
        levels = _costs(resolved, build_model(resolved))
        resolved = _with_fleet(resolved, fleet, assign(fleet, levels), len(levels))
    folder = RunFolder(out.expanduser() if out is not None else _new_folder(resolved))
    console = make_console()
    # A polite kill is an interruption like Ctrl-C: the same clean end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with RunDisplay(console, quiet=quiet) as display:
            summary = run_federation(resolved, folder.path, resume=resume, progress=display)
    except KeyboardInterrupt:
        done = len(folder.rows())  # rows without a checkpoint were dropped on the way out
        advice = f"{done} finished round(s) are saved, continue with: incofl run --resume --out {folder.path}"
        typer.echo(f"incofl: interrupted; {advice if done else 'no round was finished'}", err=True)
        raise typer.Exit(130) from None
    assert display.federation is not None
    ascii_only = console.options.ascii_only
    console.print(result_table(display.federation, folder.rows(), summary, ascii_only=ascii_only))
    console.print(
        f"{human(summary['bytes_down'], 'B')} down, {human(summary['bytes_up'], 'B')} up, {summary['seconds']:.0f} s; "
        f"records in {folder.path}",
        soft_wrap=True,
    )


@app.command()
def compare(
    config: ConfigArgument = None,
    methods: Annotated[
        str, typer.Option("--methods", "-m", metavar="A,B,...", help="Methods; the others are compared to the first.")
    ] = "heteroavg,incoavg",
    seeds: Annotated[str, typer.Option("--seeds", metavar="S,T,...", help="Seeds; every method runs each.")] = "0,1,2",
    model: ModelOption = None,
    set_: SetOption = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Holds a run folder per method and seed, and the tables.")
    ] = Path("runs/comparison"),
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time, each with one worker.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the closing table only.")] = False,
) -> None:
    """Run several methods under the same seeds and compare them.

    Runs of a seed share partition, cohorts and initial weights. Started again, it continues where it was interrupted.
    The table is also written to DIR as Markdown, CSV and JSON.
    """
    overrides = [*(set_ or []), *_named("model.name", model)]
    arms = {
        (find_method(name).name, seed): load_config(config, [*overrides, f"method={name}", f"seed={seed}"])
        for seed in _whole_numbers(seeds, "--seeds")
        for name in dict.fromkeys(name.strip() for name in methods.split(",") if name.strip())
    }
    if not arms:
        raise ConfigError(f"--methods: got {methods!r}, expected names such as heteroavg,incoavg")
    console = make_console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with CompareDisplay(console, len(arms), quiet=quiet) as display:
            results = run_comparison(arms, out.expanduser(), jobs=jobs, watch=lambda arm: display.watch(*arm))
    except KeyboardInterrupt:
        typer.echo("incofl: interrupted; finished rounds are saved, the same command continues", err=True)
        raise typer.Exit(130) from None
    count = len({seed for _, seed in arms})
    title = f"test accuracy in percent, {count} seed(s), mean ± standard deviation; by level: last ten rounds"
    console.print(comparison_table(comparison_lines(results), title))
    console.print(f"tables and run folders in {out}", soft_wrap=True)


def _whole_numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0:
        raise ConfigError(f"{option}: got {text!r}, expected whole numbers >= 0 such as 0,1,2")
    return list(dict.fromkeys(numbers))


@app.command()
def plan(
    config: ConfigArgument = None,
    method: MethodOption = None,
    model: ModelOption = None,
    set_: SetOption = None,
    devices: DevicesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print exact numbers as JSON.")] = False,
) -> None:
    """Show what each level costs, and which level fits which device. Needs no data files.

    MACs are the multiply-accumulates of convolutions and matrix products in one forward pass of one example.
    """
    fleet = load_devices(devices) if devices is not None else []
    resolved = _config(config, method, model, set_, fleet)
    server_model = build_model(resolved)
    levels = _costs(resolved, server_model)
    chosen = assign(fleet, levels) if fleet else []
    if fleet:
        resolved = _with_fleet(resolved, fleet, chosen, len(levels))
    clients = clients_by_level(find_method(resolved.method), client_levels(resolved, len(levels)))
    kind, wanted = split_kind(resolved, server_model.layout), resolved.model
    whole = server_model.layout.kept_whole if kind == "hetero" else {}
    title = f"{wanted.name} at width {wanted.width:g}, {kind} splitting, {resolved.data.name}"
    if as_json:
        numbers = _plan_json(resolved, kind, levels, clients, fleet, chosen)
        typer.echo(json.dumps(numbers | ({"kept_whole": dict(whole)} if whole else {}), indent=2))
        return
    console = make_console()
    console.print(plan_table(title, levels, clients))
    console.print("MACs of a forward pass of one example; bytes a round; memory of training, estimated", soft_wrap=True)
    console.print(f"mean over the {sum(clients)} clients: {human(_mean_parameters(levels, clients))} parameters")
    for axis, reason in whole.items():
        console.print(f"{axis} is held whole: {reason}", soft_wrap=True, highlight=False, markup=False)
    if fleet:
        console.print(_fleet_table(fleet, chosen, levels))
        console.print(f"to run it: incofl run ... --devices {devices}", soft_wrap=True)


app.command()(analyze)
app.command()(report)
app.command("reproduce")(reproduce_command)


class Listing(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    MODELS = "models"
    DATASETS = "datasets"
    PRESETS = "presets"


@app.command("list")
def list_(what: Annotated[Listing, typer.Argument(help="What to list.")]) -> None:
    """List the methods, models, data sets or presets that can be named."""
    match what:
        case Listing.METHODS:
            entries = {name: method.summary for name, method in METHODS.items()}
        case Listing.MODELS:
            entries = {name: family.summary for name, family in MODELS.items()}
        case Listing.DATASETS:
            entries = {name: source.summary for name, source in DATASETS.items()}
        case Listing.PRESETS:
            entries = {name: text.partition("\n")[0].lstrip("# ") for name, text in sorted(presets().items())}
    width = max(map(len, entries))
    for name, summary in entries.items():
        typer.echo(f"{name:<{width}}  {summary}")


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"incofl {incofl.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _new_folder(config: Config) -> Path:
    """A folder of its own for a run without --out, also when a sweep starts several in one second."""
    name = f"{config.method}-{config.data.name}-s{config.seed}"
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"


def _config(
    config: str | None, method: str | None, model: str | None, set_: list[str] | None, fleet: list[DeviceClass]
) -> Config:
    overrides = [*(set_ or []), *_named("method", method), *_named("model.name", model)]
    overrides += [f"data.clients={sum(device.count for device in fleet)}"] if fleet else []
    return load_config(config, overrides)


def _named(key: str, option: str | None) -> list[str]:
    return [] if option is None else [f"{key}={json.dumps(option)}"]


def _costs(config: Config, model: Model) -> list[Cost]:
    return costs(model, build_splitter(config, model), config.local, build_method(config))


def _with_fleet(config: Config, fleet: list[DeviceClass], chosen: list[int], num_levels: int) -> Config:
    counts = [0] * num_levels
    for device, level in zip(fleet, chosen, strict=True):
        counts[level] += device.count
    return dataclasses.replace(config, split=dataclasses.replace(config.split, counts=tuple(counts)))


def _plan_json(
    config: Config, kind: str, levels: list[Cost], clients: Sequence[int], fleet: list[DeviceClass], chosen: list[int]
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": config.model.name,
        "width": config.model.width,
        "stem": config.model.stem,
        "data": config.data.name,
        "split": kind,
        "levels": [dataclasses.asdict(cost) | {"clients": clients[cost.level]} for cost in levels],
        "mean_parameters": _mean_parameters(levels, clients),
    }
    if fleet:
        result["devices"] = [
            dataclasses.asdict(device) | {"level": level} for device, level in zip(fleet, chosen, strict=True)
        ]
    return result


def _mean_parameters(levels: list[Cost], clients: Sequence[int]) -> float:
    return sum(cost.parameters * count for cost, count in zip(levels, clients, strict=True)) / sum(clients)


def _fleet_table(fleet: list[DeviceClass], chosen: list[int], levels: list[Cost]) -> Table:
    table = Table(title="the largest level that fits each device class", title_justify="left")
    for heading in ("device", "count", "memory", "compute", "bandwidth", "level", "parameters"):
        table.add_column(heading, justify="left" if heading == "device" else "right")
    for device, level in zip(fleet, chosen, strict=True):
        limits = ((device.memory, "B"), (device.compute, "MAC"), (device.bandwidth, "B"))
        cells = ["-" if limit is None else human(limit, unit) for limit, unit in limits]
        table.add_row(device.name, str(device.count), *cells, str(level), human(levels[level].parameters))
    return table


def main() -> None:
    """Runs the command line with one clear line, and no traceback, for whatever the user can mend."""
    try:
        code = app(standalone_mode=False)
    except IncoflError as problem:
        code = _complain(str(problem))
    except ClickException as problem:
        code = _complain(problem.format_message())
    except OSError as problem:  # an unreadable file, a full disk
        code = _complain(f"{problem.filename or 'input or output'}: {problem.strerror or problem}")
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _complain(message: str) -> int:
    """One line, even where a library's words come in several."""
    typer.echo(f"incofl: {' '.join(message.split())}", err=True)
    return 2
