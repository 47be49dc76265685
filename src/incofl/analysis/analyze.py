"""All analyses of some runs, as ``incofl analyze`` makes them.

Each analysis is a module of this folder with a function ``figures(runs, out, options) -> Findings``. It writes numbers
(JSON) and figures of each run into RUN/analysis, and comparisons of several runs into ``out``.
"""

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic_core import to_jsonable_python

from incofl.analysis.runs import Folders, RecordedRun, by_seed, find_runs
from incofl.engine.files import write_json
from incofl.errors import ConfigError, IncoflError, nearest, needs_extra

NAMES = ("similarity", "features", "updates", "environments", "coefficients")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Options:
    """The arguments of ``analyze`` for the analyses that compute clients' models again."""

    clients: int = 10
    examples: int = 500
    round: int | None = None
    history: int = 10
    watch: Callable[[str], None] = lambda what: None


@dataclass
class Findings:
    """What an analysis found: a table, files, and why something is missing."""

    title: str = ""
    table: list[list[str]] = field(default_factory=list)  # the headings first
    files: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # a line each

    def row(self, cells: Mapping[str, Any]) -> None:
        """Adds a line to the table, by heading."""
        self.table += [] if self.table else [list(cells)]
        self.table.append([cell(value) for value in cells.values()])

    def file(self, where: RecordedRun | Path, name: str) -> Path:
        """Adds a file that is about to be written, of a run or of a comparison, and makes its folder."""
        path = (where if isinstance(where, Path) else where.path / "analysis") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.files.append(path)
        return path

    def json(self, where: RecordedRun | Path, name: str, value: Any) -> None:
        write_json(self.file(where, name), jsonable(value))

    def of_each(self, runs: Sequence[RecordedRun], look: Callable[[RecordedRun], Found]) -> dict[RecordedRun, Found]:
        """Looks at each run; notes why one cannot be analysed, and refuses if none can."""
        found: dict[RecordedRun, Found] = {}
        problems = []
        for run in runs:
            try:
                found[run] = look(run)
            except IncoflError as problem:
                problems.append(problem)
        if not found:
            raise problems[0]
        self.missing += map(str, problems)
        return found


def jsonable(value: Any) -> Any:
    """Returns dataclasses, arrays and mappings as JSON has them; null where a number is not finite."""
    return to_jsonable_python(value, inf_nan_mode="null", fallback=lambda array: array.tolist())


def cell(value: Any, form: str = ".3f") -> str:
    """Returns a value as tables and labels show it; a dash for an unknown number."""
    if isinstance(value, float):
        return format(value, form) if math.isfinite(value) else "-"
    return "-" if value is None else str(value)


def first_seeds(found: Mapping[RecordedRun, Found]) -> dict[str, Found]:
    """Returns what was found in the first run of each setting, for figures that cannot show all seeds."""
    return {group.label: found[group.runs[0]] for group in by_seed(list(found))}


def evenly(values: Sequence[Found], most: int) -> list[Found]:
    """Returns at most ``most`` values, evenly spaced; the last is always among them, the first if there are two."""
    return [values[at] for at in np.unique(np.linspace(len(values) - 1, 0, min(most, len(values))).round().astype(int))]


def analyze(
    folders: Folders,
    out: str | Path | None = None,
    *,
    only: Sequence[str] | None = None,
    clients: int = 10,
    examples: int = 500,
    round: int | None = None,
    history: int = 10,
    watch: Callable[[str | Findings], None] = lambda what: None,
    **objects: Any,
) -> list[Findings]:
    """Analyses finished runs: figures and numbers into the folder ``analysis`` of each run.

    Args:
        folders: run folders, or folders that hold some.
        out: the folder for comparisons of several runs; left out, ``analysis`` beside them.
        only: names of analyses; left out, all that these runs allow.
        clients: number of clients whose models are compared, evenly over the levels.
        examples: number of test examples on which they are compared.
        round: the recorded round to look at closely; left out, the last.
        history: number of recorded rounds in curves over rounds.
        watch: is told what is being computed, and what each analysis found.
        objects: the objects that the runs were made from, if any: ``model``, ``data``, ``method``, ``task``; a list
            where runs differ, as the methods of a comparison.
    """
    runs = find_runs(folders, objects)
    place = default_out(runs) if out is None else Path(out).expanduser()
    wanted = [name for name in NAMES if name != "environments" or len(by_seed(runs)) > 1] if only is None else only
    for name in wanted or [""]:
        if name not in NAMES:
            raise ConfigError(f"--only: got {name!r}{nearest(name, NAMES)}")
    with needs_extra("analysis", "analyze"):
        importlib.import_module("matplotlib")
        importlib.import_module("sklearn")
    options, found, problems = Options(clients, examples, round, history, watch), [], []
    for name in (name for name in NAMES if name in wanted):
        try:
            findings: Findings = importlib.import_module(f"incofl.analysis.{name}").figures(runs, place, options)
        except IncoflError as problem:
            problems.append(problem)
            findings = Findings(missing=[str(problem)])
        findings.missing = [f"{name}: {line}" for line in findings.missing]
        watch(findings)
        found.append(findings)
    if len(problems) == len(found):
        raise problems[0]
    return found


def default_out(runs: Sequence[RecordedRun]) -> Path:
    """Returns where comparisons go: beside the runs; of a single run, into its own folder."""
    paths = [run.path.absolute() for run in runs]
    return Path(os.path.commonpath([path.parent for path in paths]) if len(paths) > 1 else paths[0]) / "analysis"
