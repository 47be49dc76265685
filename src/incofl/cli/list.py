"""The command ``incofl list``."""

from enum import StrEnum
from importlib import import_module
from typing import Annotated

import typer

TABLES = {"methods": "incofl.methods:METHODS", "models": "incofl.models:MODELS", "datasets": "incofl.data:DATASETS"}
Listing = StrEnum("Listing", [*map(str.upper, TABLES), "PRESETS"])


def list_(what: Annotated[Listing, typer.Argument(help="What to list.")]) -> None:
    """List the methods, models, data sets or presets that can be named."""
    if what == "presets":
        from incofl.config import presets

        print_columns({name: text.partition("\n")[0].lstrip("# ") for name, text in sorted(presets().items())})
    else:
        module, _, table = TABLES[what].partition(":")
        print_columns({name: entry.summary for name, entry in getattr(import_module(module), table).items()})


def print_columns(entries: dict[str, str]) -> None:
    """Prints names with their summaries."""
    width = max(map(len, entries))
    for name, summary in entries.items():
        typer.echo(f"{name:<{width}}  {summary}")
