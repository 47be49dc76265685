"""Runs as their folders record them, in groups that differ in nothing but the seed."""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from incofl.config import UNBOUND, Config, load_config, read_toml
from incofl.engine.build import build, build_model
from incofl.engine.checkpoint import checkpoint_round, load_checkpoint
from incofl.engine.federation import Federation
from incofl.engine.run_folder import Row, RunFolder
from incofl.errors import RunError
from incofl.layout import Layout
from incofl.models import Model
from incofl.server import Server


class RecordedRun:
    """A run folder; what is in it is read when it is first asked for."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.path, self.name = folder, folder.path, folder.path.name

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens a run folder; refuses one without a run or without a finished round."""
        folder, hint = RunFolder(Path(path)), "expected the folder of a run (incofl run --out, or out= in Python)"
        if not folder.path.is_dir():
            raise RunError(f"{path}: no such folder, {hint}")
        if not folder.config.exists():
            raise RunError(f"{path}: holds no run, {hint}")
        if not folder.rows():
            raise RunError(f"{path}: holds no finished round; continue it (--resume, or resume=True in Python)")
        return cls(folder)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values of the config by dotted key, which can be read without the objects that they name."""
        tree = read_toml(self.folder.config)
        tables = {name: table for name, table in tree.items() if isinstance(table, dict)}
        flat = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
        return {key: value for key, value in tree.items() if key not in tables} | flat

    @property
    def seed(self) -> int:
        return int(self.values["seed"])

    @property
    def method(self) -> str:
        return str(self.values["method"])

    @cached_property
    def rows(self) -> list[Row]:
        return self.folder.rows()

    @cached_property
    def config(self) -> Config:
        """The config of the run; needs the objects that it names."""
        return load_config(self.folder.config)

    @cached_property
    def model(self) -> Model:
        """The server model; needs no data files."""
        return build_model(self.config)

    @property
    def layout(self) -> Layout:
        return self.model.layout

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
        start = Server(self.layout, self.model.initial)
        if round is None or round == self.recorded[-1]:
            return load_checkpoint(self.folder.checkpoint, start).server
        if round not in self.recorded:
            kept = ", ".join(map(str, self.recorded))
            raise RunError(f"{self.path}: round {round} was not recorded, only {kept}; see record.every")
        return load_checkpoint(self.folder.snapshot(round), start).server


AnyRun = TypeVar("AnyRun", bound=RecordedRun)


def find_runs(paths: Sequence[str | Path], kind: type[AnyRun]) -> list[AnyRun]:
    """Opens the runs in some folders: each is a run folder, or holds run folders, of which the begun ones count."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        inside = [] if RunFolder(path).config.exists() else [file.parent for file in path.rglob("config.toml")]
        begun = sorted((folder for folder in inside if RunFolder(folder).rows()), key=_natural)
        if inside and not begun:
            raise RunError(f"{path}: holds {len(inside)} run folder(s) but no finished round, expected at least one")
        found |= dict.fromkeys(begun or [path])
    return [kind.open(path) for path in found]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Returns a key that sorts s2 before s10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", str(path))]


def by_seed(runs: Sequence[AnyRun]) -> dict[str, list[AnyRun]]:
    """Groups the runs that have one config but for the seed, by seed; the labels tell the groups apart."""
    groups: dict[str, list[AnyRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_binding(run), sort_keys=True, default=str), []).append(run)
    result: dict[str, list[AnyRun]] = {}
    for number, group in enumerate(groups.values(), start=1):
        label = _label(group[0], runs)
        result[f"{label} ({number})" if label in result else label] = sorted(group, key=lambda run: run.seed)
    return result


def _binding(run: RecordedRun) -> dict[str, Any]:
    """Returns all values that can change results, but for the seed."""
    return {key: value for key, value in run.values.items() if key not in UNBOUND and key != "seed"}


def _label(run: RecordedRun, others: Sequence[RecordedRun]) -> str:
    """Returns the method, with up to three keys that tell the run from others of the same method."""
    mine, rivals = _binding(run), [other.values for other in others if other.method == run.method]
    telling = [key for key in mine if any(rival.get(key) != mine[key] for rival in rivals)]
    return ", ".join([run.method, *(f"{key.rpartition('.')[2]} {plain(mine[key])}" for key in telling[:3])])


def plain(value: Any) -> str:
    """Returns a value of a config as a person writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
