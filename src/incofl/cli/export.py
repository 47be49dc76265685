"""The commands ``incofl export`` and ``incofl export-adapter``."""

from pathlib import Path
from typing import Annotated

import typer

import incofl.cli.arguments as arg
from incofl.errors import ConfigError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    level: Annotated[str, typer.Option(metavar="L,M,...|all", help="Levels; -1 is the largest.")] = "-1",
    exit: Annotated[
        int | None, typer.Option(metavar="E", help="The early exit at which a model ends; 0 is the first.")
    ] = None,
    format: Annotated[
        str, typer.Option("--format", "-f", metavar="A,B,...", help="safetensors, torch (.pt2), onnx, executorch.")
    ] = "safetensors",
    out: Annotated[Path, arg.out("DIR", "Folder for the files and their README.md.")] = Path("export"),
) -> None:
    """Write trained models as files that other programs run, and check that they compute what ours do.

    Batch norms are folded into weights, except in safetensors. The table has sizes and latencies on this machine; the
    README.md in DIR says how to load each file. Onnx and executorch need the extra of that name.
    """
    from incofl.cli.display import print_table
    from incofl.export.model import CAPTION, export_model, table

    words = arg.words(level)
    if not words or not (words == ["all"] or all(word.removeprefix("-").isdecimal() for word in words)):
        raise ConfigError(f"--level: got {level!r}, expected whole numbers such as 0,2, or all")
    made = export_model(run, out, [] if words == ["all"] else list(map(int, words)), arg.words(format), exit)
    print_table(table(made))
    typer.echo(f"{CAPTION} inputs that README.md names; files in {out}")


def export_adapter(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of a LoRA method.")],
    out: Annotated[Path, arg.out("DIR", "Folder for the adapter.")] = Path("adapter"),
    level: Annotated[int, typer.Option(help="The level; -1 is the largest.")] = -1,
) -> None:
    """Write the adapters of a trained level as a folder that peft loads: PeftModel.from_pretrained(model, DIR)."""
    from incofl.costs import human
    from incofl.export.adapter import export_adapter

    ranks = export_adapter(run, out, level)
    size = human(sum(file.stat().st_size for file in out.expanduser().iterdir()), "B")
    typer.echo(f"{out}: adapters of rank {max(ranks.values())} on {len(ranks)} layers, {size}")
