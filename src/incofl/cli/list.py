"""The command ``incofl list``."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

Listing = StrEnum("Listing", ["METHODS", "MODELS", "DATASETS", "PRESETS"])


def list_(what: Annotated[Listing, typer.Argument(help="What to list.")]) -> None:
    """List the methods, models, data sets or presets that can be named."""
    if what == "methods":
        from incofl.methods import SUMMARIES

        print_columns(SUMMARIES)
    elif what == "presets":
        from incofl.config import presets

        print_columns({name: text.partition("\n")[0].lstrip("# ") for name, text in sorted(presets().items())})
    else:
        from incofl.data import DATASETS
        from incofl.models import MODELS

        table = MODELS if what == "models" else DATASETS
        print_columns({name: entry.summary for name, entry in table.items()})


def print_columns(entries: Mapping[str, str]) -> None:
    """Prints names with their summaries."""
    width = max(map(len, entries))
    for name, summary in entries.items():
        typer.echo(f"{name:<{width}}  {summary}")
