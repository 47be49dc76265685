"""What a report is made of: run folders, read once, in groups that differ in the seed alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from incofl.analysis.runs import Run, find_folders
from incofl.config import UNBOUND, Config
from incofl.costs import Cost, costs
from incofl.engine.build import build_method, build_model, build_splitter, client_levels
from incofl.engine.federation import clients_by_level
from incofl.engine.records import Row, RunFolder, summarise
from incofl.errors import IncoflError
from incofl.methods import find_method
from incofl.statistics import mean_and_half_width, tail

Value = Callable[[Row], float | None]
Points = tuple[list[int], list[float]]


class ReportedRun(Run):
    """A run and what else its folder says; of one that is going on, so far."""

    @property
    def path(self) -> Path:
        """Its folder, as the user named it."""
        return self.folder.path

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What it was computed with."""
        return _json(self.folder.environment) or {}

    @cached_property
    def similarity(self) -> dict[str, Any] | None:
        """What ``incofl analyze`` found, if it was asked."""
        return _json(self.path / "analysis" / "similarity.json")

    @cached_property
    def levels(self) -> list[int]:
        """Those that were evaluated, smallest first."""
        written = _json(self.folder.summary) or {}
        return written.get("levels") or _levels_in_use(self.config, self.rows)

    @cached_property
    def status(self) -> str:
        """``done``, ``interrupted``, or ``unfinished`` (running, or stopped without a word)."""
        written = _json(self.folder.summary) or {}
        return str(written.get("status")) if written.get("rounds") == len(self.rows) else "unfinished"

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Of the rounds that there are; the one on disk may be of an earlier interruption."""
        return summarise(self.rows, self.config, self.levels, self.status)

    @cached_property
    def evaluated(self) -> list[Row]:
        """The rounds after which the server model was evaluated."""
        return [row for row in self.rows if row["accuracy"] is not None]

    def points(self, value: Value) -> Points:
        """A value over the rounds, where it is known."""
        found = [(row["round"], y) for row in self.rows if (y := value(row)) is not None]
        return [x for x, _ in found], [y for _, y in found]

    def level(self, level: int) -> Value:
        """The accuracy of a level; unknown if the run has no such level."""
        if level not in self.levels:
            return lambda row: None
        at = self.levels.index(level)
        return lambda row: row["accuracy_by_level"] and row["accuracy_by_level"][at]

    def last_ten(self, value: Value) -> float | None:
        """The mean of a value over the evaluations by which a run is judged."""
        values = [y for row in tail(self.evaluated) if (y := value(dict(row))) is not None]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone, or in nothing that could change results.

    Attributes:
        index: place on the page; colour, dash and marker follow from it.
        label: the method, and what else tells it from the other groups.
        runs: by seed.
    """

    index: int
    label: str
    runs: tuple[ReportedRun, ...]

    @property
    def config(self) -> Config:
        """That of the first run."""
        return self.runs[0].config

    def name(self, run: ReportedRun) -> str:
        """A run among all on the page."""
        if len(self.runs) == 1:
            return self.label
        same = [other for other in self.runs if other.config.seed == run.config.seed]
        again = f" ({run.path.name})" if len(same) > 1 else ""
        return f"{self.label}, seed {run.config.seed}{again}"

    def mean(self, value_of: Callable[[ReportedRun], Value]) -> Points:
        """The mean over the runs, of the rounds for which all have a value."""
        found = [dict(zip(*run.points(value_of(run)), strict=True)) for run in self.runs]
        rounds = [x for x in found[0] if all(x in other for other in found)]
        return rounds, [sum(other[x] for other in found) / len(found) for x in rounds]

    def spread(self, value: Callable[[ReportedRun], float | None]) -> tuple[float, float | None] | None:
        """Mean and half width of its 95 % interval over the runs that have a value."""
        values = [y for run in self.runs if (y := value(run)) is not None]
        return mean_and_half_width(values) if values else None

    @cached_property
    def sizes(self) -> "Sizes | str":
        """What each level costs, or why that cannot be said."""
        try:
            return Sizes.of(self.config)
        except (IncoflError, ImportError) as problem:  # a model of the user's own may not be there any more
            return str(problem)


@dataclass(frozen=True)
class Sizes:
    """The levels of a config: what each costs, and how many clients train it."""

    costs: list[Cost]
    clients: list[int]

    @classmethod
    def of(cls, config: Config) -> "Sizes":
        """Needs no data files."""
        model, method = build_model(config), build_method(config)
        found = costs(model, build_splitter(config, model), config.local, method)
        return cls(found, clients_by_level(method, client_levels(config, len(found))))

    def level_of(self, client: int) -> int:
        """The level that a client trains: the first clients are the smallest."""
        for level, count in enumerate(self.clients):
            if client < count:
                return level
            client -= count
        return len(self.clients) - 1


def read_groups(paths: Sequence[Path]) -> list[Group]:
    """The runs in some folders, in groups; each path is a run folder, or holds run folders."""
    folders = list(dict.fromkeys(folder for path in paths for folder in find_folders(path)))
    groups: dict[str, list[ReportedRun]] = {}
    for folder in folders:
        run = ReportedRun(RunFolder(folder))
        groups.setdefault(json.dumps(_binding(run.config), sort_keys=True), []).append(run)
    ordered = [tuple(sorted(runs, key=lambda run: run.config.seed)) for runs in groups.values()]
    labels = _labels([runs[0].config for runs in ordered])
    return [Group(at, label, runs) for at, (label, runs) in enumerate(zip(labels, ordered, strict=True))]


def _json(path: Path) -> dict[str, Any] | None:
    """A file that may be missing, or half written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _levels_in_use(config: Config, rows: list[Row]) -> list[int]:
    """Of a run without a summary."""
    count = max((len(row["accuracy_by_level"] or []) for row in rows), default=0)
    if find_method(config.method).level == "largest" or config.split.counts is not None:
        try:
            return [level for level, clients in enumerate(Sizes.of(config).clients) if clients]
        except (IncoflError, ImportError):
            pass
    return list(range(count))


def _binding(config: Config) -> dict[str, Any]:
    """All that can change results, but the seed."""
    return {key: value for key, value in config.flat().items() if key not in UNBOUND and key != "seed"}


def _labels(configs: Sequence[Config]) -> list[str]:
    """The method where that says it; with the keys that tell it from others of the same method where not."""
    labels = []
    for config in configs:
        rivals = [other.flat() for other in configs if other.method == config.method]
        mine = config.flat()
        telling = [key for key in _binding(config) if any(rival.get(key) != mine[key] for rival in rivals)]
        words = [f"{key.rpartition('.')[2]} {plain(mine[key])}" for key in telling[:3]]
        labels.append(", ".join([config.method, *words]))
    return labels


def plain(value: Any) -> str:
    """A value of a config as a person writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(map(plain, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
