"""Arguments that several commands share, and how they are read."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from incofl.errors import ConfigError

Config = Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file, or a preset (incofl list presets).")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")]
OWN_METHOD = "Method (incofl list methods), or package.module:attribute."
Method = Annotated[str | None, typer.Option("--method", "-m", metavar="M", help=OWN_METHOD)]
Model = Annotated[str | None, typer.Option(metavar="M", help="Model (incofl list models), or package.module:factory.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override one config key, e.g. data.alpha=0.1; repeatable."),
]
Rounds = Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of rounds.")]
Seed = Annotated[int | None, typer.Option(min=0, metavar="S", help="Seed of all random streams.")]
Root = Annotated[Path | None, typer.Option(metavar="DIR", help="The folder that holds the data sets (data.root).")]
Devices = Annotated[Path | None, typer.Option(metavar="FILE", help="Device classes; each gets the level that fits.")]
IgnoreLimits = Annotated[bool, typer.Option("--ignore-limits", help="Let a method exceed the limits of devices.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time, each with one worker.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the final table.")]


def out(metavar: str, help: str) -> Any:
    """Returns the option ``--out``."""
    return typer.Option("--out", "-o", metavar=metavar, help=help)


def overrides(set_: list[str] | None, **options: str | int | Path | None) -> list[str]:
    """Returns the overrides of ``--set``, and those of options of their own, such as ``--method`` and ``--rounds``."""
    keys = {"model": "model.name", "data": "data.name", "root": "data.root"}
    given = {keys.get(name, name): value for name, value in options.items() if value is not None}
    return [
        *(set_ or []),
        *(f"{key}={json.dumps(value if isinstance(value, int) else str(value))}" for key, value in given.items()),
    ]


def words(text: str) -> list[str]:
    """Splits A,B,... into different words."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def seeds(text: str) -> list[int]:
    """Reads the option --seeds."""
    if not words(text) or not all(word.isdecimal() for word in map(str.strip, text.split(","))):
        raise ConfigError(f"--seeds: got {text!r}, expected whole numbers >= 0 such as 0,1,2")
    return list(map(int, words(text)))


def show_help(context: typer.Context) -> None:
    """Prints the help of a group that is called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
