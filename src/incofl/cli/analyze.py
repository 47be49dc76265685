"""The command ``incofl analyze``: figures and numbers of finished runs."""

from pathlib import Path
from typing import Annotated

import typer

import incofl.cli.arguments as arg


def analyze(
    runs: arg.Runs,
    out: Annotated[Path | None, arg.out("DIR", "Folder for comparisons of several runs [analysis/].")] = None,
    clients: Annotated[int, typer.Option(min=2, help="Clients that are compared.")] = 10,
    examples: Annotated[int, typer.Option(help="Test examples on which they are compared.")] = 500,
    round: Annotated[int | None, typer.Option(metavar="R", min=0, help="A recorded round [the last].")] = None,
    history: Annotated[int, typer.Option(min=1, help="Recorded rounds that curves show.")] = 10,
    only: Annotated[str | None, typer.Option(metavar="A,B,...", help="Only these analyses.")] = None,
) -> None:
    """Analyse finished runs: figures and numbers into RUN/analysis.

    Similarity of clients' models at every depth (CKA), updates, InCo's coefficients, features of one class. The models
    of clients are computed again from the recorded states of the run (record.every), so its data files are needed.
    """
    from incofl.analysis.analyze import Findings, analyze
    from incofl.cli.display import make_console, print_table

    wanted, console = arg.words(only) if only is not None else None, make_console()

    def tell(what: str | Findings) -> None:
        if isinstance(what, str):
            status.update(what)
            return
        if what.table:
            print_table(what.table, what.title, console)
        for line in [f"not analysed: {line}" for line in what.missing] + [f"wrote {path}" for path in what.files]:
            console.print(line, soft_wrap=True)

    with console.status("reading the runs") as status:
        analyze(runs, out, only=wanted, clients=clients, examples=examples, round=round, history=history, watch=tell)
