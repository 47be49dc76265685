"""The command ``incofl list``."""

from enum import StrEnum
from typing import Annotated

import typer

Listing = StrEnum("Listing", ["METHODS", "MODELS", "DATASETS", "PRESETS"])


def list_(what: Annotated[Listing, typer.Argument(help="What to list.")]) -> None:
    """List the methods, models, data sets or presets that can be named."""
    print_columns(_entries(what))


def _entries(what: str) -> dict[str, str]:
    if what == "methods":
        from incofl.methods import SUMMARIES

        return SUMMARIES
    if what == "models":
        from incofl.models import MODELS

        return {name: family.summary for name, family in MODELS.items()}
    if what == "datasets":
        from incofl.data import DATASETS

        return {name: source.summary for name, source in DATASETS.items()}
    from incofl.config import presets

    return {name: text.partition("\n")[0].lstrip("# ") for name, text in sorted(presets().items())}


def print_columns(entries: dict[str, str]) -> None:
    """Prints names with their summaries."""
    width = max(map(len, entries))
    for name, summary in entries.items():
        typer.echo(f"{name:<{width}}  {summary}")
