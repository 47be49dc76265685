"""Kills a run without warning at random moments, again and again: every resumption must succeed, and end bit-equal.

usage: python -m tests.torture [--kills 50] [--seed 0] [--folder DIR]

The run has two worker processes and a method whose clients remember something. When it is finished, it is compared with
an undisturbed run and started anew, until all kills are spent. Its processes, workers too, are forks of one that has
already imported what they import, which takes longer than the run.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

KEYS = ["method=incoscaffold", "data.clients=10", "data.limit=200", "cohort=4", "model.name=tiny-mlp"]
KEYS += ["local.epochs=1", "rounds=12", "engine.workers=2", "eval.limit=50", "record.every=4"]


FORKS = multiprocessing.get_context("forkserver")
SERVER: Any = forkserver._forkserver


def start(folder: Path) -> BaseProcess:
    """Starts or resumes the run, in a process of its own."""
    FORKS.set_forkserver_preload(["incofl.cli", "incofl.engine.run", "incofl.engine.processes"])
    forkserver.ensure_running()
    process = FORKS.Process(target=run, args=(folder, SERVER._forkserver_address))
    process.start()
    return process


class Descriptor:
    """An open file that a process gets from the one that starts it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return opened, (DupFd(self.number),)


def opened(passed: Any) -> int:
    """The number of such a file in the new process."""
    number: int = passed.detach()
    return number


class Fork:
    """In the place of a fresh interpreter: a fork that has imported what it imports."""

    def __init__(self, module: str, *arguments: int, pass_fds: Sequence[int], **_: Any) -> None:
        place = len(arguments) - len(pass_fds)  # what comes before the files
        passed = [*arguments[:place], *map(Descriptor, arguments[place:])]
        self._process = FORKS.Process(target=work, args=(module, passed))
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0


def work(module: str, arguments: list[int]) -> None:
    sys.argv = ["-c", *map(str, arguments)]
    importlib.import_module(module).main()


def run(folder: Path, address: str) -> None:
    """The command line, which says what is wrong in a file beside the folder."""
    from incofl.cli import main
    from incofl.engine import processes

    SERVER._forkserver_address, SERVER.ensure_running = address, lambda: None  # workers are forks of the same process
    processes.start_python = Fork  # type: ignore[assignment]
    log = os.open(f"{folder}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    keys = (word for key in KEYS for word in ("--set", key))
    sys.argv = ["incofl", "run", "--quiet", "demo", *keys, "--out", str(folder), "--resume"]
    main()


def finish(folder: Path) -> None:
    process = start(folder)
    process.join()
    assert process.exitcode == 0, Path(f"{folder}.log").read_text()


def outcome(folder: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, bytes]]:
    """All that must not depend on interruptions: the state, the rows without durations, what clients remember."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    named = json.loads((folder / "summary.json").read_text())
    assert named["status"] == "done", named
    state, clients = folder / "checkpoint" / "state.safetensors", folder / "checkpoint" / "clients"
    memories = {path.name: path.read_bytes() for path in sorted(clients.iterdir()) if path.suffix == ".safetensors"}
    return state.read_bytes(), [row | {"seconds": 0} for row in rows], memories


def same(ours: tuple[Any, Any, dict[str, bytes]], theirs: tuple[Any, Any, dict[str, bytes]]) -> bool:
    """Whether two outcomes are equal; of memories that an interruption has left over, those that both have."""
    shared = ours[2].keys() & theirs[2].keys()
    return ours[:2] == theirs[:2] and all(ours[2][name] == theirs[2][name] for name in shared) and len(shared) > 0


def torture(folder: Path, kills: int, seed: int) -> str:
    """Kills runs so many times; raises if one cannot be resumed or ends differently. Returns what was done."""
    chance = random.Random(seed)
    finish(folder / "first")  # which imports
    begun = time.monotonic()
    finish(folder / "whole")
    whole, span, before_any, finished = outcome(folder / "whole"), time.monotonic() - begun, 0, 0
    assert same(outcome(folder / "first"), whole)
    number, left = 0, kills
    while left:
        killed = folder / f"killed-{number}"
        process = start(killed)
        process.join(chance.uniform(0.1, 1.1) * span)
        if process.is_alive():
            process.kill()
            process.join()
            left -= 1
            before_any += not (killed / "checkpoint" / "state.safetensors").exists()
            continue
        assert process.exitcode == 0, Path(f"{killed}.log").read_text()
        assert same(outcome(killed), whole), f"{killed} differs from {folder / 'whole'}"
        shutil.rmtree(killed)
        finished, number = finished + 1, number + 1
    killed = folder / f"killed-{number}"
    finish(killed)
    assert same(outcome(killed), whole), f"{killed} differs from {folder / 'whole'}"
    minutes = (time.monotonic() - begun) / 60
    return (
        f"{kills} kills ({before_any} before the first checkpoint), {finished + 1} runs finished, all bit-equal, "
        f"{minutes:.1f} minutes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print(torture(arguments.folder or Path(temporary), arguments.kills, arguments.seed))


if __name__ == "__main__":
    main()
