"""Runs as their folders record them, in groups that differ in nothing but the seed."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from incofl.config import UNBOUND, Config, load_config, read_toml
from incofl.config.resolve import OBJECTS, name_of
from incofl.config.schema import flat
from incofl.engine.build import build, outline
from incofl.engine.checkpoint import checkpoint_round, load_checkpoint
from incofl.engine.federation import Federation
from incofl.engine.run_folder import RunFolder
from incofl.errors import RunError
from incofl.layout import Layout
from incofl.server import Server


class RecordedRun:
    """A run folder: its config and rounds; model, data and states are read when they are first asked for."""

    def __init__(self, folder: RunFolder, objects: Mapping[str, Any] | None = None) -> None:
        self.folder, self.path, self.name, self.rows = folder, folder.path, folder.path.name, folder.rows()
        # By dotted key; unlike the config they can be read without the objects that they name.
        self.values = flat(read_toml(folder.config))
        self.seed, self.method, self.objects = int(self.values["seed"]), str(self.values["method"]), objects or {}

    @classmethod
    def open(cls, path: str | Path, objects: Mapping[str, Any] | None = None) -> Self:
        """Opens a run folder; refuses one without a run or without a finished round."""
        folder, hint = RunFolder(Path(path)), "expected the folder of a run (incofl run --out, or out= in Python)"
        if not folder.path.is_dir():
            raise RunError(f"{path}: no such folder, {hint}")
        if not folder.config.exists():
            raise RunError(f"{path}: holds no run, {hint}")
        if not folder.rows():
            raise RunError(f"{path}: holds no finished round; continue it (--resume, or resume=True in Python)")
        return cls(folder, objects)

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


AnyRun = TypeVar("AnyRun", bound=RecordedRun)
Folders = str | Path | Sequence[str | Path]


def find_runs(folders: Folders, kind: type[AnyRun], objects: Mapping[str, Any] | None = None) -> list[AnyRun]:
    """Opens the runs in some folders: each is a run folder, or holds run folders, of which the begun ones count."""
    found: dict[Path, None] = {}
    for path in (Path(each).expanduser() for each in ([folders] if isinstance(folders, str | Path) else folders)):
        inside = [] if RunFolder(path).config.exists() else [file.parent for file in path.rglob("config.toml")]
        begun = sorted((folder for folder in inside if RunFolder(folder).rows()), key=_natural)
        if inside and not begun:
            raise RunError(f"{path}: holds {len(inside)} run folder(s) but no finished round, expected at least one")
        found |= dict.fromkeys(begun or [path])
    return [kind.open(path, objects) for path in found]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Returns a key that sorts s2 before s10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", str(path))]


def by_seed(runs: Sequence[AnyRun]) -> dict[str, list[AnyRun]]:
    """Groups the runs that differ in the seed alone; labels are methods, with up to three keys that tell them apart."""
    binding = {run: {key: v for key, v in run.values.items() if key not in UNBOUND and key != "seed"} for run in runs}
    groups: dict[str, list[AnyRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(binding[run], sort_keys=True, default=str), []).append(run)
    labelled: dict[str, list[AnyRun]] = {}
    for number, group in enumerate(groups.values(), start=1):
        method, mine = group[0].method, binding[group[0]]
        rivals = [other.values for other in runs if other.method == method]
        telling = [key for key in mine if any(rival.get(key) != mine[key] for rival in rivals)]
        label = ", ".join([method, *(f"{key.rpartition('.')[2]} {plain(mine[key])}" for key in telling[:3])])
        labelled[f"{label} ({number})" if label in labelled else label] = sorted(group, key=lambda run: run.seed)
    return labelled


def plain(value: Any) -> str:
    """Returns a value of a config as a person writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
