"""The command ``incofl export-adapter``."""

from pathlib import Path
from typing import Annotated

import typer

import incofl.cli.arguments as arg


def export_adapter(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of a LoRA method.")],
    out: Annotated[Path, arg.out("DIR", "Folder for the adapter.")] = Path("adapter"),
    level: Annotated[int, typer.Option(help="The level; -1 is the largest.")] = -1,
) -> None:
    """Write the adapters of a trained level as a folder that peft loads: PeftModel.from_pretrained(model, DIR)."""
    from incofl.costs import human
    from incofl.engine.export import export_adapter

    ranks = export_adapter(run, out, level)
    size = human(sum(file.stat().st_size for file in out.expanduser().iterdir()), "B")
    typer.echo(f"{out}: adapters of rank {max(ranks.values())} on {len(ranks)} layers, {size}")
