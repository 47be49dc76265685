"""What a report is made of: run folders, read once, in groups that differ in the seed alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from incofl.analysis.runs import Folders, RecordedRun, by_seed, find_runs
from incofl.statistics import tail_name

Unit = Literal["number", "percent", "bytes"]
Series = Callable[[RecordedRun], Iterable[float | None]]  # a value for each round, where it is known
Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone, or in nothing that could change results."""

    index: int  # place on the page; colour, dash and marker follow from it
    label: str
    runs: list[RecordedRun]  # by seed

    @property
    def several(self) -> bool:
        return len(self.runs) > 1

    def label_of(self, run: RecordedRun) -> str:
        """Names a run of the group among all on the page; seeds that occur twice with their folder."""
        again = sum(other.seed == run.seed for other in self.runs) > 1
        return self.label + (f", seed {run.seed}" + f" ({run.name})" * again) * self.several

    def mean(self, series: Series) -> Points:
        """Returns the mean over the runs, of the rounds for which all have a value."""
        values = [zip(run.rows, series(run), strict=True) for run in self.runs]
        first, *others = [{row["round"]: y for row, y in own if y is not None} for own in values]
        rounds = [x for x in first if all(x in other for other in others)]
        return rounds, [fmean([first[x], *(other[x] for other in others)]) for x in rounds]


class Groups(list[Group]):
    """All runs of a page."""

    @cached_property
    def runs(self) -> list[RecordedRun]:
        return [run for group in self for run in group.runs]

    @cached_property
    def labels(self) -> dict[RecordedRun, tuple[str, int]]:
        """The name of each run on the page, and its group."""
        return {run: (group.label_of(run), group.index) for group in self for run in group.runs}

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


def read_groups(folders: Folders, **objects: Any) -> Groups:
    """Reads the runs in some folders, in groups; each is a run folder, or holds run folders."""
    found = by_seed(find_runs(folders, objects))
    return Groups(Group(at, label, runs) for at, (label, runs) in enumerate(found.items()))
