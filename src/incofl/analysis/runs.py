"""A run as its folder tells it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from incofl.config import Config, load_config
from incofl.engine.build import build, build_model
from incofl.engine.checkpoint import checkpoint_round, load_checkpoint
from incofl.engine.federation import Federation
from incofl.engine.run_folder import Row, RunFolder
from incofl.errors import RunError
from incofl.layout import Layout
from incofl.models import Model
from incofl.server import Server


@dataclass(frozen=True)
class Run:
    """A run folder, read as far as it is asked for."""

    folder: RunFolder

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """The run in a folder; refuses one that holds no run."""
        folder = RunFolder(Path(path))
        if not folder.config.exists():
            raise RunError(f"{path}: holds no run, expected a folder that incofl run made")
        if not folder.rows():
            raise RunError(f"{path}: holds no finished round; continue it with: incofl run --resume --out {path}")
        return cls(folder)

    @property
    def name(self) -> str:
        """What it is called in tables and figures."""
        return self.folder.path.name

    @cached_property
    def config(self) -> Config:
        """What was run."""
        return load_config(self.folder.config)

    @cached_property
    def rows(self) -> list[Row]:
        """The finished rounds."""
        return self.folder.rows()

    @cached_property
    def model(self) -> Model:
        """The server model; needs no data files."""
        return build_model(self.config)

    @property
    def layout(self) -> Layout:
        """Its structure."""
        return self.model.layout

    @cached_property
    def federation(self) -> Federation:
        """Everything about it, data included; needs the data files."""
        return build(self.config, self.folder.load_partition(self.config.data.clients), begun=True)

    @cached_property
    def recorded(self) -> list[int]:
        """The rounds after which the server's state is on disk: the last, and those that ``record`` kept."""
        last = checkpoint_round(self.folder.checkpoint)
        return sorted({round for round in self.folder.snapshots() if round <= last} | {last})

    def server(self, round: int | None = None) -> Server:
        """The server after so many rounds; left out, after the last."""
        start = Server(self.layout, self.model.initial)
        if round is None or round == self.recorded[-1]:
            return load_checkpoint(self.folder.checkpoint, start).server
        if round not in self.recorded:
            kept = ", ".join(map(str, self.recorded))
            raise RunError(f"{self.folder.path}: round {round} was not recorded, only {kept}; see record.every")
        return load_checkpoint(self.folder.snapshot(round), start).server


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in some folders: each is a run folder, or holds run folders as ``incofl compare`` makes them."""
    return [Run.open(folder) for path in paths for folder in find_folders(Path(path))]


def find_folders(path: Path) -> list[Path]:
    """The run folders that a path stands for; in a folder of runs, those without a finished round are left out."""
    inside = [] if RunFolder(path).config.exists() else [file.parent for file in path.rglob("config.toml")]
    begun = sorted((folder for folder in inside if RunFolder(folder).rows()), key=_natural)
    if not inside:
        Run.open(path)  # says what is wrong with it
    elif not begun:
        raise RunError(f"{path}: holds {len(inside)} run folder(s) but no finished round, expected at least one")
    return begun or [path]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts s2 before s10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", str(path))]
