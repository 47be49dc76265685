"""What a report is made of: run folders, read once, in groups that differ in the seed alone."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from incofl.analysis.runs import Folders, RecordedRun, by_seed, find_runs
from incofl.config import find_parts
from incofl.engine.federation import Federation
from incofl.engine.run_folder import Row, summarise
from incofl.errors import IncoflError
from incofl.statistics import mean_and_half_width, tail, tail_name
from incofl.task import CLASSIFICATION, TASKS, Task

Unit = Literal["number", "percent", "bytes"]


class ReportedRun(RecordedRun):
    """A run with everything that its folder says; of one that is still going on, so far."""

    index: int  # the group that it belongs to
    label: str  # its name among all on the page

    def json(self, name: str) -> dict[str, Any]:
        """Reads a file of the folder; empty if it is missing or half written."""
        try:
            return dict(json.loads((self.path / name).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    @cached_property
    def federation_or_reason(self) -> Federation | str:
        """The federation without its data, or why it cannot be built here."""
        try:
            return self.outline
        except (IncoflError, ImportError) as problem:  # the user's own model may not be there any more
            return str(problem)

    @cached_property
    def levels(self) -> list[int]:
        """The levels that were evaluated, smallest first; without a summary they follow from the rows."""
        if written := self.json("summary.json").get("levels"):
            return list(written)
        count, federation = max(len(row["accuracy_by_level"] or []) for row in self.rows), self.federation_or_reason
        used = [] if isinstance(federation, str) else federation.levels_in_use
        return used if len(used) == count else list(range(count))

    @cached_property
    def task(self) -> Task:
        """The task; in place of an object that only its script has, one with a metric of the same name."""
        try:
            return find_parts(self.config).task
        except (IncoflError, ImportError):
            name = str(self.json("summary.json").get("metric", "accuracy"))
            unknown = replace(CLASSIFICATION, metrics={name: CLASSIFICATION.all_metrics["accuracy"]})
            return next((task for task in TASKS.values() if task.first == name), unknown)

    @cached_property
    def judged(self) -> list[Row]:
        """The evaluations by which the run is judged."""
        evaluated = [row for row in self.rows if row["accuracy"] is not None]
        return tail(evaluated) if evaluated else []

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The result so far; the summary on disk may be of an earlier interruption."""
        written = self.json("summary.json")
        status = str(written.get("status")) if written.get("rounds") == len(self.rows) else "unfinished"
        return summarise(self.rows, self.method, self.seed, self.task, self.levels, status)

    def level(self, level: int, rows: Sequence[Row] | None = None) -> list[float | None]:
        """Returns the metric of a level in some rounds or all; unknown if the run has no such level."""
        by_level = [row["accuracy_by_level"] or [] for row in (self.rows if rows is None else rows)]
        return [dict(zip(self.levels, values, strict=False)).get(level) for values in by_level]

    def tail(self, level: int) -> float | None:
        """Returns the metric of a level by the evaluations by which the run is judged."""
        values = [value for value in self.level(level, self.judged) if value is not None]
        return fmean(values) if values else None


Series = Callable[[ReportedRun], Iterable[float | None]]  # a value for each round, where it is known
Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone, or in nothing that could change results."""

    index: int  # place on the page; colour, dash and marker follow from it
    label: str
    runs: list[ReportedRun]  # by seed

    @property
    def several(self) -> bool:
        return len(self.runs) > 1

    def mean(self, series: Series) -> Points:
        """Returns the mean over the runs, of the rounds for which all have a value."""
        values = [zip(run.rows, series(run), strict=True) for run in self.runs]
        first, *others = [{row["round"]: y for row, y in own if y is not None} for own in values]
        rounds = [x for x in first if all(x in other for other in others)]
        return rounds, [fmean([first[x], *(other[x] for other in others)]) for x in rounds]


class Groups(list[Group]):
    """All runs of a page."""

    @cached_property
    def runs(self) -> list[ReportedRun]:
        return [run for group in self for run in group.runs]

    @cached_property
    def several(self) -> bool:
        """Whether there are several seeds of something."""
        return any(group.several for group in self)

    @cached_property
    def levels(self) -> list[int]:
        return sorted({level for run in self.runs for level in run.levels})

    @cached_property
    def metric(self) -> tuple[str, Unit]:
        """The name and the unit of the metric that takes the place of the accuracy."""
        percent = all(run.task.all_metrics[run.task.first].percent for run in self.runs)
        return self.runs[0].task.first, "percent" if percent else "number"

    @cached_property
    def measure(self) -> str:
        """The evaluations by which the runs are judged, in words."""
        judged = {tail_name(run.judged) for run in self.runs if run.judged}
        return judged.pop() if len(judged) == 1 else "last evaluations"


def interval(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Returns mean and half width of the 95 % confidence interval over the runs that have a value."""
    known = [value for value in values if value is not None]
    return mean_and_half_width(known) if known else None


def read_groups(folders: Folders, **objects: Any) -> Groups:
    """Reads the runs in some folders, in groups; each is a run folder, or holds run folders."""
    found = by_seed(find_runs(folders, ReportedRun, objects))
    groups = Groups(Group(at, label, runs) for at, (label, runs) in enumerate(found.items()))
    for group in groups:
        seeds = Counter(run.seed for run in group.runs)
        for run in group.runs:
            seed = f", seed {run.seed}" + f" ({run.name})" * (seeds[run.seed] > 1)
            run.index, run.label = group.index, group.label + seed * group.several
    return groups
