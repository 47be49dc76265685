"""What a report is made of: run folders, read once, in groups that differ in the seed alone."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from incofl.analysis.runs import RecordedRun, by_seed, find_runs
from incofl.config import Config, find_parts
from incofl.costs import Cost, costs
from incofl.engine.build import build_method, build_model, build_splitter, client_levels
from incofl.engine.federation import clients_by_level
from incofl.engine.run_folder import Row
from incofl.errors import IncoflError
from incofl.statistics import mean_and_half_width, tail, tail_mean, tail_name
from incofl.task import CLASSIFICATION, TASKS, Metric

Value = Callable[[Row], float | None]
Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Sizes:
    """The levels of a config: what each costs, and how many clients train it."""

    costs: list[Cost]
    clients: list[int]

    @classmethod
    def of(cls, config: Config) -> "Sizes":
        """Computes the costs; needs no data files."""
        model, method = build_model(config), build_method(config)
        found = costs(model, build_splitter(config, model), config.local, method)
        return cls(found, clients_by_level(method, client_levels(config, len(found)).counts))

    def level_of(self, client: int) -> int:
        """Returns the level that a client trains: the first clients are the smallest."""
        levels = [level for level, count in enumerate(self.clients) for _ in range(count)]
        return levels[min(client, len(levels) - 1)]


class ReportedRun(RecordedRun):
    """A run with everything that its folder says; of one that is still going on, so far."""

    def json(self, name: str) -> dict[str, Any]:
        """Reads a file of the folder, which may be missing or half written."""
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What the run was computed with."""
        return self.json("environment.json")

    @cached_property
    def sizes(self) -> Sizes | str:
        """The costs of each level, or why they cannot be computed."""
        try:
            return Sizes.of(self.config)
        except (IncoflError, ImportError) as problem:  # the user's own model may not be there any more
            return str(problem)

    @cached_property
    def levels(self) -> list[int]:
        """The levels that were evaluated, smallest first; without a summary they follow from the rows."""
        if written := self.json("summary.json").get("levels"):
            return list(written)
        count = max(len(row["accuracy_by_level"] or []) for row in self.rows)
        used = [] if isinstance(self.sizes, str) else [level for level, n in enumerate(self.sizes.clients) if n]
        return used if len(used) == count else list(range(count))

    @cached_property
    def metric(self) -> tuple[str, Metric]:
        """The metric that takes the place of the accuracy, with its name."""
        try:
            task = find_parts(self.config).task
            name = task.first
        except (IncoflError, ImportError):  # an object that only its script has
            name = str(self.json("summary.json").get("metric", "accuracy"))
            task = next((task for task in TASKS.values() if task.first == name), CLASSIFICATION)
        return name, task.all_metrics[task.first]

    @cached_property
    def evaluated(self) -> list[Row]:
        """The rounds in which the run was evaluated."""
        return [row for row in self.rows if row["accuracy"] is not None]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The result so far; the summary on disk may be of an earlier interruption."""
        written, values = self.json("summary.json"), [row["accuracy"] for row in self.evaluated]
        best = max if self.metric[1].higher_is_better else min
        return {
            "status": str(written.get("status")) if written.get("rounds") == len(self.rows) else "unfinished",
            "rounds": len(self.rows),
            "last": values[-1] if values else None,
            "tail": tail_mean(self.evaluated) if values else None,
            "best": best(values, default=None),
            "bytes": sum(row["bytes_up"] + row["bytes_down"] for row in self.rows),
            "rejected": sum(len(row["rejected"]) for row in self.rows),
            "seconds": sum(row["seconds"] for row in self.rows),
        }

    def points(self, value: Value) -> Points:
        """Returns a value over the rounds, where it is known."""
        found = [(row["round"], y) for row in self.rows if (y := value(row)) is not None]
        return [x for x, _ in found], [y for _, y in found]

    def level(self, level: int) -> Value:
        """Returns the accuracy of a level; unknown if the run has no such level."""
        at = self.levels.index(level) if level in self.levels else None
        return lambda row: row["accuracy_by_level"][at] if row["accuracy_by_level"] and at is not None else None

    def tail(self, level: int) -> float | None:
        """Returns the metric of a level by the evaluations by which the run is judged."""
        judged = tail(self.evaluated) if self.evaluated else []
        values = [y for row in judged if (y := self.level(level)(dict(row))) is not None]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone, or in nothing that could change results."""

    index: int  # place on the page; colour, dash and marker follow from it
    label: str
    runs: list[ReportedRun]  # by seed

    @property
    def sizes(self) -> Sizes | str:
        """The sizes of the first run."""
        return self.runs[0].sizes

    def name(self, run: ReportedRun) -> str:
        """Returns the name of a run among all on the page."""
        if len(self.runs) == 1:
            return self.label
        same = [other for other in self.runs if other.seed == run.seed]
        return f"{self.label}, seed {run.seed}" + (f" ({run.name})" if len(same) > 1 else "")

    def mean(self, value_of: Callable[[ReportedRun], Value]) -> Points:
        """Returns the mean over the runs, of the rounds for which all have a value."""
        found = [dict(zip(*run.points(value_of(run)), strict=True)) for run in self.runs]
        rounds = [x for x in found[0] if all(x in other for other in found)]
        return rounds, [sum(other[x] for other in found) / len(found) for x in rounds]


def interval(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Returns mean and half width of the 95 % confidence interval over the runs that have a value."""
    known = [value for value in values if value is not None]
    return mean_and_half_width(known) if known else None


def measure(groups: Sequence[Group]) -> str:
    """Names the evaluations by which the runs are judged."""
    judged = {tail_name(tail(run.evaluated)) for group in groups for run in group.runs if run.evaluated}
    return judged.pop() if len(judged) == 1 else "last evaluations"


def read_groups(paths: Sequence[Path]) -> list[Group]:
    """Reads the runs in some folders, in groups; each path is a run folder, or holds run folders."""
    groups = by_seed(find_runs(paths, ReportedRun))
    return [Group(at, label, runs) for at, (label, runs) in enumerate(groups.items())]
