"""The command ``incofl report``."""

from pathlib import Path
from typing import Annotated

import typer

import incofl.cli.arguments as arg


def report(
    runs: arg.Runs,
    out: Annotated[Path, arg.out("FILE", "The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Page title [methods and data].")] = None,
) -> None:
    """Write one self-contained page about runs: results, curves, layers, costs, config.

    It works offline and needs the extra report (pip install 'incofl[report]'). Unfinished runs are shown as far as they
    are. What incofl analyze found about a run is on the page.
    """
    from incofl.costs import human
    from incofl.report.page import write_report

    groups = write_report(runs, out, title)
    count = sum(len(group.runs) for group in groups)
    typer.echo(f"{out}: {count} run(s), {human(out.expanduser().stat().st_size, 'B')}")
