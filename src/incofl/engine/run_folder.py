"""The run folder: what it holds, and how it is written so that an interruption loses nothing.

config.toml               the resolved config
environment.json          versions, machine, commit
partition.json            the examples of each client
metrics.jsonl             a line for each round
summary.json              the result
trace.json                a timeline, with engine.trace
tensorboard/, wandb/, mlflow.json   what trackers keep, with record.trackers
nodes.json                which node is which client and what it can do, for a run on Flower
checkpoint/state.safetensors   the server after the last finished round
checkpoint/previous.safetensors   the one before, used if that is damaged
checkpoint/records.crc32       checksums of the lines of metrics.jsonl
checkpoint/clients/            what clients remember, for methods that need it
snapshots/round-000010.safetensors   the server after earlier rounds, with record.every or record.window
"""

import contextlib
import fcntl
import functools
import json
import os
import platform
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict  # that of Python 3.11 does not do for pydantic

from incofl.config import UNBOUND, Config, make_config, read_toml
from incofl.config.schema import flat
from incofl.engine.files import append_line, atomic_write, read_json, write_json
from incofl.errors import RunError
from incofl.statistics import tail_mean
from incofl.task import Task

Row = dict[str, Any]
# Keys that every config of a run has.
ALWAYS = dict.fromkeys(("method", "data.name", "model.name", "task.name"), str) | {"seed": int, "rounds": int}


class RunFolder:
    """Paths and records of one run."""

    def __init__(self, path: Path) -> None:
        self.path, self.tensorboard = path, path / "tensorboard"
        self.config, self.metrics, self.summary = path / "config.toml", path / "metrics.jsonl", path / "summary.json"
        self.environment, self.partition = path / "environment.json", path / "partition.json"
        self.choices = path / "vectorised.json"
        self.trace, self.nodes = path / "trace.json", path / "nodes.json"
        self.checkpoint, self.memories = path / "checkpoint" / "state.safetensors", path / "checkpoint" / "clients"
        self.checksums = path / "checkpoint" / "records.crc32"

    def snapshot(self, round: int) -> Path:
        """The state after some earlier round, with ``record``."""
        return self.path / "snapshots" / f"round-{round:06d}.safetensors"

    def snapshots(self) -> dict[int, Path]:
        """The states that were kept, by round."""
        paths = sorted(self.snapshot(0).parent.glob("round-*.safetensors"))
        return {int(path.stem.removeprefix("round-")): path for path in paths}

    def check(self, config: Config, resume: bool) -> None:
        """Refuses a folder in which this run must not be started or continued."""
        try:
            occupied = self.config.exists()
            stray = not occupied and (
                self.checkpoint.exists() or (self.metrics.exists() and self.metrics.stat().st_size)
            )
        except OSError as problem:
            raise RunError(f"{self.path}: cannot be read ({problem.strerror}); choose another folder") from None
        if stray:
            raise RunError(f"{self.path}: holds records but no config.toml; choose another folder")
        if not occupied:
            return
        theirs = make_config(self.config, **config.objects)
        if theirs.digest() != config.digest():
            there, here = theirs.flat(), config.flat()
            key = next(key for key in here if there.get(key) != here[key] and key not in UNBOUND)
            difference = f"{key} is {there.get(key)!r} there, {here[key]!r} here"
            raise RunError(f"{self.path}: holds a run with another config ({difference}); choose another folder")
        if not resume:
            hint = "continue it (--resume, or resume=True in Python) or choose another folder"
            raise RunError(f"{self.path}: holds this run already; {hint}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder for this process; creates it if necessary."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as problem:
            raise RunError(f"{self.path}: cannot be written ({problem.strerror}); choose another folder") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"{self.path}: another process is running in it; choose another folder") from None
            yield

    def save_config(self, config: Config) -> None:
        """The config that the rounds from here on are run with."""
        atomic_write(self.config, config.to_toml().encode())

    def values(self) -> dict[str, Any]:
        """The config by dotted key; unlike the config itself it can be read without the objects that it names."""
        found = flat(read_toml(self.config))
        for key, kind in ALWAYS.items():
            if not isinstance(value := found.get(key), kind):
                raise RunError(f"{self.config}: damaged ({key} is {value!r:.40}, expected a resolved config)")
        return found

    def save_environment(self) -> None:
        """What the rounds are computed with; a resumption is added to what is known of the rounds before it."""
        now = environment()
        if self.environment.exists():
            known = read_json(self.environment, "delete it, and the rounds from here on have a new one")
            before = known.get("resumed", [])
            now = known | {"resumed": [*(before if isinstance(before, list) else []), now]}
        write_json(self.environment, now)

    def save_partition(self, partition: Sequence[Tensor]) -> None:
        """Saved before the first round; a resumed run reads it."""
        atomic_write(self.partition, json.dumps([part.tolist() for part in partition], separators=(",", ":")).encode())

    def load_partition(self, clients: int) -> list[Tensor] | None:
        """The saved partition, if there is one."""
        if not self.partition.exists():
            return None
        try:
            parts = json.loads(self.partition.read_text())
            indices = [index for part in parts for index in part]
        except (ValueError, TypeError, RecursionError) as problem:
            raise RunError(f"{self.partition}: damaged ({problem}); delete this file: it is made again") from None
        whole = all(type(index) is int and index >= 0 for index in indices)
        if len(parts) != clients or not whole or len(set(indices)) < len(indices):  # some examples may be left out
            raise RunError(f"{self.partition}: damaged (not a partition among {clients} clients); delete this file")
        return [torch.tensor(part, dtype=torch.int64) for part in parts]

    def save_choices(self, choices: Mapping[int, bool]) -> None:
        """Which levels train side by side, as measured."""
        write_json(self.choices, {str(level): chosen for level, chosen in choices.items()})

    def load_choices(self) -> dict[int, bool]:
        """What was measured before, if anything."""
        hint = "delete it: it is measured again, and the bits of the rounds from here on may differ"
        if not self.choices.exists():
            return {}
        try:
            found = {int(level): bool(chosen) for level, chosen in read_json(self.choices, hint).items()}
        except ValueError as problem:
            raise RunError(f"{self.choices}: damaged ({problem}); {hint}") from None
        return found

    def append(self, row: Row) -> None:
        """Adds the line of a round. Written before its checkpoint, so a checkpoint never lacks its line."""
        line = json.dumps(row, allow_nan=False)
        append_line(self.checksums, _checksum(line))
        append_line(self.metrics, line)

    def rows(self) -> list[Row]:
        """The lines so far; one that was cut off by a crash is left out, and any other damage is refused."""
        return self._checked(self._lines())

    def keep_rows(self, rounds: int) -> list[Row]:
        """Drops the lines of rounds that the checkpoint does not know: they will be computed again."""
        lines = self._lines()[:rounds]
        if len(lines) < rounds:
            raise RunError(f"{self.metrics}: lacks rounds that the checkpoint has ({rounds})")
        rows = self._checked(lines)
        atomic_write(self.checksums, "".join(f"{_checksum(line)}\n" for line in lines).encode())
        atomic_write(self.metrics, "".join(f"{line}\n" for line in lines).encode())
        return rows

    def _checked(self, lines: Sequence[str]) -> list[Row]:
        """The rows of some lines, if they are as they were written."""
        for number, (line, checksum) in enumerate(zip(lines, self._checksums(), strict=False), 1):
            if _checksum(line) != checksum:
                raise RunError(f"{self.metrics}: damaged (line {number} was altered)")
        return [_row(self.metrics, number, line) for number, line in enumerate(lines, 1)]

    def _lines(self) -> list[str]:
        """The lines that have an end."""
        if not self.metrics.exists():
            return []
        try:
            *lines, rest = self.metrics.read_bytes().split(b"\n")
            found = [line.decode() for line in lines]
        except UnicodeDecodeError as problem:
            raise RunError(f"{self.metrics}: damaged ({problem})") from None
        return [*found, rest.decode()] if _is_json(rest) else found

    def _checksums(self) -> list[str]:
        """Those that were written; a line without one is believed."""
        if not self.checksums.exists():
            return []
        return self.checksums.read_text(encoding="ascii", errors="replace").splitlines()


def _checksum(line: str) -> str:
    return f"{zlib.crc32(line.encode()):08x}"


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _Refused(TypedDict):
    client: int
    reason: str


class _RowShape(TypedDict):
    """What every line of ``metrics.jsonl`` has; some have more."""

    round: int
    accuracy: float | None
    accuracy_by_level: list[float | None] | None
    loss: float | None
    clients: list[int]
    rejected: list[_Refused]
    bytes_up: int
    bytes_down: int
    seconds: float


@functools.cache
def _row_shape() -> Any:
    from pydantic import ConfigDict, TypeAdapter, with_config  # not needed by commands that only list names

    return TypeAdapter(with_config(ConfigDict(extra="allow", allow_inf_nan=False))(_RowShape))


def _row(path: Path, number: int, line: str) -> Row:
    """The line of a round, if it is one."""
    from pydantic import ValidationError

    try:
        row: Row = json.loads(line)
        _row_shape().validate_python(row, strict=True)
    except (ValueError, RecursionError, ValidationError) as problem:
        what = (
            f"{'.'.join(map(str, problem.errors()[0]['loc']))}: {problem.errors()[0]['msg']}"
            if isinstance(problem, ValidationError)
            else str(problem)
        )
        raise RunError(f"{path}: damaged (line {number}: {what})") from None
    if row["round"] != number:
        raise RunError(f"{path}: damaged (line {number} is of round {row['round']})")
    return row


def new_folder(config: Config) -> Path:
    """A new folder for a run, different also for runs that a sweep starts in the same second."""
    data, method = (re.sub(r"[^\w.+-]+", "-", name) for name in (config.data.name, config.method))
    return Path("runs") / f"{method}-{data}-s{config.seed}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"


def summarise(
    rows: list[Row], method: str, seed: int, task: Task, levels: Sequence[int], status: str
) -> dict[str, Any]:
    """The result of a run: last round, mean of the evaluations by which it is judged, totals."""
    best = max if task.all_metrics[task.first].higher_is_better else min
    evaluated = [row for row in rows if row["accuracy"] is not None]
    last = evaluated[-1] if evaluated else None
    return {
        "status": status,
        "method": method,
        "seed": seed,
        "rounds": len(rows),
        "levels": list(levels),
        "metric": task.first,
        "accuracy": last and last["accuracy"],
        "accuracy_by_level": last and last["accuracy_by_level"],
        **({"best_path": last["best_path"]} if last and "best_path" in last else {}),
        "accuracy_tail": tail_mean(evaluated) if evaluated else None,
        "accuracy_best": best((row["accuracy"] for row in evaluated), default=None),
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
