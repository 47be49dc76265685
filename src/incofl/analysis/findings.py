"""What an analysis is, so that ``incofl analyze`` can run them all alike.

An analysis is a function ``figures(runs, out) -> Findings``. Of each run it writes JSON and pictures into
``own_folder(run)``, that is RUN/analysis; of several runs together it writes comparisons into ``out``. What it cannot
do for a run it says in ``Findings.missing``, or, if it can do nothing at all, by a ``RunError``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from incofl.analysis.runs import Run
from incofl.errors import IncoflError, RunError

Found = TypeVar("Found")


@dataclass(frozen=True)
class Options:
    """What the user asks of the analyses that compute clients' turns again.

    Attributes:
        clients: how many are compared, evenly over the levels.
        examples: of the test set, on which their models are compared.
        round: the recorded round that is looked at closely; ``None``: the last.
        history: of how many recorded rounds the course is shown.
        watch: told what is being computed.
    """

    clients: int = 10
    examples: int = 500
    round: int | None = None
    history: int = 10
    watch: Callable[[str], None] = lambda what: None


@dataclass(frozen=True)
class Findings:
    """What an analysis found.

    Attributes:
        title: of the table.
        table: its key numbers as cells, the headings in the first line; empty: none.
        files: what it wrote.
        missing: what could not be analysed and why, a line each.
    """

    title: str = ""
    table: Sequence[Sequence[str]] = ()
    files: Sequence[Path] = ()
    missing: Sequence[str] = ()


class Analysis(Protocol):
    """The analysis of some runs."""

    def __call__(self, runs: Sequence[Run], out: Path) -> Findings:
        """Writes what it finds: of each run into ``own_folder(run)``, comparisons of several into ``out``."""
        ...


def own_folder(run: Run) -> Path:
    """Where the analyses of a run are written; it is made."""
    folder = run.folder.path / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def of_each(name: str, runs: Sequence[Run], analysis: Callable[[Run], Found]) -> tuple[dict[Path, Found], list[str]]:
    """What an analysis finds of each run, by its folder, and why not of the others; refuses if of none."""
    found: dict[Path, Found] = {}
    missing: list[str] = []
    for run in runs:
        try:
            found[run.folder.path] = analysis(run)
        except IncoflError as problem:
            missing.append(f"{name}: {problem}")
    if not found:
        raise RunError(missing[0])
    return found, missing
