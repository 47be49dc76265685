"""Runs as their folders record them, in groups that differ in nothing but the seed."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from incofl.config import UNBOUND, Config, find_parts, load_config
from incofl.config.resolve import OBJECTS, name_of
from incofl.config.schema import called
from incofl.engine.build import build, outline
from incofl.engine.checkpoint import checkpoint_round, load_checkpoint
from incofl.engine.federation import Federation
from incofl.engine.run_folder import Row, RunFolder, summarise
from incofl.errors import IncoflError, RunError
from incofl.layout import Layout
from incofl.server import Server
from incofl.statistics import tail, tail_name
from incofl.task import CLASSIFICATION, TASKS, Task


class RecordedRun:
    """A run with a finished round: its config and rounds; the rest is read when it is first asked for."""

    def __init__(self, path: str | Path, objects: Mapping[str, Any] | None = None) -> None:
        self.folder, self.path, self.objects = RunFolder(Path(path)), Path(path), objects or {}
        self.name, self.rows = self.path.name, self.folder.rows()
        if not self.folder.config.exists():
            what = "holds no run" if self.path.is_dir() else "no such folder"
            raise RunError(f"{path}: {what}, expected the folder of a run (incofl run --out, or out= in Python)")
        if not self.rows:
            raise RunError(f"{path}: holds no finished round; continue it (--resume, or resume=True in Python)")
        # By dotted key; unlike the config they can be read without the objects that they name.
        self.values = self.folder.values()
        self.seed, self.method = int(self.values["seed"]), str(self.values["method"])

    @cached_property
    def config(self) -> Config:
        """The config of the run, with those of the given objects that it was made from."""
        given = {kind: value if isinstance(value, list) else [value] for kind, value in self.objects.items()}
        names = {kind: self.values[".".join(filter(None, OBJECTS[kind]))] for kind in given}
        own = {kind: value for kind in given for value in given[kind] if name_of(value) == names[kind]}
        return load_config(self.folder.config, **own)

    @cached_property
    def outline(self) -> Federation:
        """The federation without data; needs no data files."""
        return outline(self.config)

    @property
    def layout(self) -> Layout:
        return self.outline.model.layout

    @cached_property
    def federation(self) -> Federation:
        """The federation, data included; needs the data files."""
        return build(self.config, self.folder.load_partition(self.config.num_clients), begun=True)

    @cached_property
    def recorded(self) -> list[int]:
        """The rounds after which the server's state is on disk: the last, and those that ``record`` kept."""
        last = checkpoint_round(self.folder.checkpoint)
        return sorted({round for round in self.folder.snapshots() if round <= last} | {last})

    def server(self, round: int | None = None) -> Server:
        """Returns the server after a recorded round, by default the last."""
        *_, last = self.recorded
        if round is not None and round not in self.recorded:
            kept = ", ".join(map(str, self.recorded))
            raise RunError(f"{self.path}: round {round} was not recorded, only {kept}; see record.every")
        path = self.folder.checkpoint if round is None or round == last else self.folder.snapshot(round)
        return load_checkpoint(path, self.outline.start()).server

    def json(self, name: str) -> dict[str, Any]:
        """Reads a file of the folder; empty if it is missing or half written."""
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

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
        written = self.json("summary.json").get("levels")
        if isinstance(written, list) and written and all(isinstance(level, int) for level in written):
            return written
        count, federation = max(len(row["accuracy_by_level"] or []) for row in self.rows), self.federation_or_reason
        used = [] if isinstance(federation, str) else federation.levels_in_use
        return used if len(used) == count else list(range(count))

    def called(self, level: int) -> str:
        """What the devices of a level are called."""
        return called(self.values.get("split.names"), level)

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
    def evaluated(self) -> list[Row]:
        """The rounds in which it was evaluated."""
        return [row for row in self.rows if row["accuracy"] is not None]

    @cached_property
    def judged(self) -> list[Row]:
        """The evaluations by which the run is judged."""
        return tail(self.evaluated) if self.evaluated else []

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


Folders = str | Path | Sequence[str | Path]
Unit = Literal["number", "percent", "bytes"]
Series = Callable[[RecordedRun], Iterable[float | None]]  # a value for each round, where it is known
Points = tuple[list[float], list[float]]


def find_runs(folders: Folders, objects: Mapping[str, Any] | None = None) -> list[RecordedRun]:
    """Opens the runs in some folders: each is a run folder, or holds run folders, of which the begun ones count."""
    found: dict[Path, None] = {}
    for path in (Path(each).expanduser() for each in ([folders] if isinstance(folders, str | Path) else folders)):
        inside = [] if RunFolder(path).config.exists() else [file.parent for file in path.rglob("config.toml")]
        begun = sorted((folder for folder in inside if RunFolder(folder).rows()), key=_natural)
        if inside and not begun:
            raise RunError(f"{path}: holds {len(inside)} run folder(s) but no finished round, expected at least one")
        found |= dict.fromkeys(begun or [path])
    return [RecordedRun(path, objects) for path in found]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Returns a key that sorts s2 before s10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", str(path))]


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

    def called(self, level: int) -> str:
        """What the devices of a level are called, if all runs call them so."""
        names = {run.called(level) for run in self.runs}
        return names.pop() if len(names) == 1 else f"level {level}"

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


def by_seed(runs: Sequence[RecordedRun]) -> Groups:
    """Groups the runs that differ in the seed alone; labels are methods, with up to three keys that tell them apart."""
    binding = {run: {key: v for key, v in run.values.items() if key not in UNBOUND and key != "seed"} for run in runs}
    alike: dict[str, list[RecordedRun]] = {}
    for run in runs:
        alike.setdefault(json.dumps(binding[run], sort_keys=True, default=str), []).append(run)
    groups = Groups()
    for number, same in enumerate(alike.values()):
        method, mine = same[0].method, binding[same[0]]
        rivals = [other.values for other in runs if other.method == method]
        telling = [key for key in mine if any(rival.get(key) != mine[key] for rival in rivals)]
        label = ", ".join([method, *(f"{key.rpartition('.')[2]} {plain(mine[key])}" for key in telling[:3])])
        again = f" ({number + 1})" if any(group.label == label for group in groups) else ""
        groups.append(Group(number, label + again, sorted(same, key=lambda run: run.seed)))
    return groups


def read_groups(folders: Folders, **objects: Any) -> Groups:
    """Reads the runs in some folders, in groups; each is a run folder, or holds run folders."""
    return by_seed(find_runs(folders, objects))


def plain(value: Any) -> str:
    """Returns a value of a config as a person writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
