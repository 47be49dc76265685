"""The run folder: what it holds, and how it is written so that an interruption loses nothing.

config.toml               the resolved config
environment.json          versions, machine, commit
partition.json            the examples of each client
metrics.jsonl             a line a round
summary.json              the result
checkpoint/state.safetensors   the server after the last finished round
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incofl.config import UNBOUND, Config, make_config, read_toml
from incofl.engine.checkpoint import atomic_write, write_json
from incofl.errors import RunError

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Paths and records of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.toml"

    @property
    def checkpoint(self) -> Path:
        """The state after the last finished round."""
        return self.path / "checkpoint" / "state.safetensors"

    @property
    def metrics(self) -> Path:
        """A line a round."""
        return self.path / "metrics.jsonl"

    @property
    def partition(self) -> Path:
        """The examples of each client."""
        return self.path / "partition.json"

    @property
    def summary(self) -> Path:
        """The result."""
        return self.path / "summary.json"

    def claim(self, config: Config, resume: bool) -> None:
        """Makes the folder this run's, or refuses when another run is in it."""
        if self.config.exists():
            theirs = make_config(read_toml(self.config))
            if theirs.digest() != config.digest():
                raise RunError(
                    f"{self.path}: holds a run with another config ({difference(theirs, config)}); choose another --out"
                )
            if not resume:
                raise RunError(
                    f"{self.path}: holds this run already; continue it with --resume or choose another --out"
                )
        try:
            with atomic_write(self.config) as file:
                file.write(config.to_toml().encode())
            write_json(self.path / "environment.json", environment())
        except OSError as problem:
            raise RunError(f"{self.path}: cannot be written ({problem.strerror}); choose another --out") from None

    def save_partition(self, partition: Sequence[Tensor]) -> None:
        """Saved once, before the first round; a resumed run reads it."""
        with atomic_write(self.partition) as file:
            file.write(json.dumps([part.tolist() for part in partition], separators=(",", ":")).encode())

    def load_partition(self) -> list[Tensor] | None:
        """The saved partition, if there is one."""
        if not self.partition.exists():
            return None
        try:
            return [torch.tensor(part, dtype=torch.int64) for part in json.loads(self.partition.read_text())]
        except (ValueError, TypeError) as problem:
            raise RunError(f"{self.partition}: damaged ({problem}); delete the folder to start again") from None

    def append(self, row: Row) -> None:
        """Adds the line of a round. Written before its checkpoint, so a checkpoint never lacks its line."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """The lines so far; one that was cut off by a crash is left out."""
        if not self.metrics.exists():
            return []
        rows = []
        for line in self.metrics.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def keep_rows(self, rounds: int) -> list[Row]:
        """Drops the lines of rounds that the checkpoint does not know: they will be computed again."""
        rows = [row for row in self.rows() if row["round"] <= rounds]
        with atomic_write(self.metrics) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        return rows


def difference(theirs: Config, ours: Config) -> str:
    """The first key in which two configs differ, in words."""
    a, b = theirs.flat(), ours.flat()
    key = next(key for key in b if a.get(key) != b[key] and key not in UNBOUND)
    return f"{key} is {a.get(key)!r} there, {b[key]!r} here"


def summarise(rows: list[Row], config: Config, levels: list[int], status: str) -> dict[str, Any]:
    """The result of a run: last round, mean of the last ten evaluated rounds, totals."""
    evaluated = [row for row in rows if row["accuracy"] is not None]
    last = evaluated[-1] if evaluated else None
    tail = evaluated[-10:]
    return {
        "status": status,
        "method": config.method,
        "seed": config.seed,
        "rounds": len(rows),
        "levels": levels,
        "accuracy": last and last["accuracy"],
        "accuracy_by_level": last and last["accuracy_by_level"],
        "accuracy_last_ten": float(np.mean([row["accuracy"] for row in tail])) if tail else None,
        "accuracy_best": max((row["accuracy"] for row in evaluated), default=None),
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "rejected": sum(len(row["rejected"]) for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 3),
    }


def environment() -> dict[str, Any]:
    """What the numbers were made with."""
    return {
        "incofl": version("incofl"),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def _git(*command: str) -> str | None:
    """A fact about the checkout that the package runs from; ``None`` when it runs from no checkout of its own."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
