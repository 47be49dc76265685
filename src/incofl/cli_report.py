"""The command ``incofl report``."""

from pathlib import Path
from typing import Annotated

import typer

from incofl.report.page import write_report
from incofl.resources import human


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some (incofl compare).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="Page title [methods and data].")] = None,
) -> None:
    """Write one self-contained page about runs: results, curves, layers, costs, config.

    It works offline and needs the extra report (pip install 'incofl[report]'). Runs that are going on can be looked at,
    too. What incofl analyze found of a run is on the page.
    """
    groups = write_report([path.expanduser() for path in runs], out.expanduser(), title)
    count = sum(len(group.runs) for group in groups)
    typer.echo(f"{out}: {count} run(s), {human(out.expanduser().stat().st_size, 'B')}")
