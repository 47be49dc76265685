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
    from incofl.analysis.analyze import Options, analyze, default_out
    from incofl.analysis.runs import RecordedRun, find_runs
    from incofl.cli.display import make_console, print_table

    wanted = arg.words(only) if only is not None else None
    found = find_runs([run.expanduser() for run in runs], RecordedRun)
    place = out.expanduser() if out is not None else default_out(found)
    console = make_console()
    with console.status("reading the runs") as status:
        options = Options(clients, examples, round, history, watch=status.update)
        for findings in analyze(found, place, options, wanted):
            if findings.table:
                print_table(findings.table, findings.title, console)
            said = [f"not analysed: {line}" for line in findings.missing] + [f"wrote {path}" for path in findings.files]
            for line in said:
                console.print(line, soft_wrap=True)
