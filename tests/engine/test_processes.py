"""Worker processes: the same bits as in one process, whatever happens to the workers."""

import dataclasses
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import incofl
from incofl.client import ClientRule, Local, Upload
from incofl.engine.executor import Executor, InProcess, Lost
from incofl.engine.federation import Federation
from incofl.engine.processes import WorkerProcesses
from incofl.engine.round import RoundStats, run_round
from incofl.server import Server
from tests.federations import tiny_config, tiny_federation


def rounds(federation: Federation, executor: Executor, count: int, cohort: int = 6) -> tuple[Server, list[RoundStats]]:
    server, tallies = federation.start(), []
    for _ in range(count):
        tallies.append(RoundStats())
        jobs = federation.schedule(server.round, cohort)
        server = run_round(server, federation.method, jobs, executor, tallies[-1])
    return server, tallies


def same(a: Server, b: Server) -> bool:
    levels = range(3)
    return all(torch.equal(a.state(level)[n], b.state(level)[n]) for level in levels for n in a.state(level))


@pytest.mark.parametrize(("workers", "method"), [(1, "incoavg"), (3, "incoavg"), (2, "fedavg")])
def test_same_bits_as_in_process(workers: int, method: str) -> None:
    federation = tiny_federation(f"method={method}")
    expected, tallies = rounds(federation, InProcess(federation), 2)
    executor = WorkerProcesses(federation, workers)
    try:
        found, others = rounds(federation, executor, 2)
        assert same(found, expected)
        assert [t.loss for t in others] == [t.loss for t in tallies]
        assert [t.clients for t in others] == [t.clients for t in tallies]
        levels = federation.levels_in_use
        scores, right = executor.evaluate(found, levels), InProcess(federation).evaluate(expected, levels)
        np.testing.assert_equal([score.totals for score in scores], [score.totals for score in right])
    finally:
        executor.close()


@pytest.mark.slow
def test_same_run_and_resume(tmp_path: Path) -> None:
    """In one go in this process; or a part with two workers, then the rest with three."""
    incofl.run(tiny_config("rounds=4", "engine.workers=1"), tmp_path / "a")
    incofl.run(tiny_config("rounds=2", "engine.workers=2"), tmp_path / "b")
    incofl.run(tiny_config("rounds=4", "engine.workers=3"), tmp_path / "b", resume=True)
    first, second = ((tmp_path / name / "checkpoint" / "state.safetensors").read_bytes() for name in "ab")
    assert first == second


@pytest.mark.slow
def test_memory_does_not_grow_with_the_cohort() -> None:
    """Uploads go through a fixed number of slots, also when many more clients than slots take part."""
    federation = tiny_federation()
    executor = WorkerProcesses(federation, 2)
    try:
        assert same(
            rounds(federation, executor, 1, cohort=10)[0], rounds(federation, InProcess(federation), 1, cohort=10)[0]
        )
        assert len(executor._results) < 10
    finally:
        executor.close()


@pytest.fixture
def killer() -> Iterator[threading.Event]:
    """Kills a random worker of this process again and again, until the test ends."""
    stop = threading.Event()
    rng = random.Random(0)

    def work() -> None:
        while not stop.wait(rng.uniform(0.5, 4.0)):
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            if children:
                os.kill(int(rng.choice(children)), signal.SIGKILL)

    thread = threading.Thread(target=work)
    thread.start()
    yield stop
    stop.set()
    thread.join()


@pytest.mark.slow
def test_killed_workers_lose_nothing(killer: threading.Event) -> None:
    """Rounds end; a client is rejected only when its worker died twice; without such a one the bits are the same."""
    federation = tiny_federation("local.epochs=5")
    expected, _ = rounds(federation, InProcess(federation), 3)
    executor = WorkerProcesses(federation, 2)
    try:
        start = time.monotonic()
        found, tallies = rounds(federation, executor, 3)
        assert time.monotonic() - start < 300
        killer.set()
        rejected = [refusal for stats in tallies for refusal in stats.rejected]
        assert all("its worker process died 2 times (signal SIGKILL)" in str(r["reason"]) for r in rejected)
        assert all(
            sorted(t.clients) == sorted(j.client for j in federation.schedule(i, 6)) for i, t in enumerate(tallies)
        )
        if not rejected:
            assert same(found, expected)
    finally:
        executor.close()


@dataclass(frozen=True)
class Deadly(ClientRule):
    """Kills the process that trains a batch with a certain first label sum."""

    def begin(self, local: Local) -> None:
        if float(local.received["fc.bias"][0]) == 7.0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_client_that_kills_its_worker_twice_is_given_up() -> None:
    federation = tiny_federation("method=heteroavg")
    federation = dataclasses.replace(federation, method=dataclasses.replace(federation.method, client=Deadly()))
    executor = WorkerProcesses(federation, 2)
    try:
        server = federation.start()
        server.shared["fc.bias"][0] = 7.0
        outcomes = list(itertools.chain.from_iterable(executor.train(server, federation.schedule(0, 2))))
        assert len(outcomes) == 2
        assert all(isinstance(outcome, Lost) and "died 2 times" in outcome.reason for outcome in outcomes)
        server.shared["fc.bias"][0] = 0.0  # and the pool is as good as new
        outcomes = list(itertools.chain.from_iterable(executor.train(server, federation.schedule(0, 4))))
        assert len(outcomes) == 4
        assert all(isinstance(outcome, Upload) for outcome in outcomes)
    finally:
        executor.close()


@dataclass(frozen=True)
class Faulty(ClientRule):
    """A bug in a method."""

    def loss(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        raise ZeroDivisionError("a bug")


def train_two_clients(rule: ClientRule) -> None:
    """In worker processes, with a client rule of the caller's."""
    federation = tiny_federation("method=heteroavg")
    federation = dataclasses.replace(federation, method=dataclasses.replace(federation.method, client=rule))
    executor = WorkerProcesses(federation, 2)
    try:
        list(executor.train(federation.start(), federation.schedule(0, 2)))
    finally:
        executor.close()


def test_an_exception_in_a_worker_is_shown_with_its_place() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process, client.*ZeroDivisionError: a bug"):
        train_two_clients(Faulty())


def test_a_script_without_main_guard(tmp_path: Path) -> None:
    """Scripts that define their own rule and run at import time work as they stand."""
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "import dataclasses, sys\n"
        "from incofl.client import ClientRule\n"
        "from incofl.engine.processes import WorkerProcesses\n"
        "from tests.federations import tiny_federation\n"
        "class Mine(ClientRule):\n"
        "    def loss(self, local, x, y):\n"
        "        return super().loss(local, x, y) * 2\n"
        "f = tiny_federation('method=heteroavg')\n"
        "f = dataclasses.replace(f, method=dataclasses.replace(f.method, client=Mine()))\n"
        "e = WorkerProcesses(f, 2)\n"
        "print(sum(map(len, e.train(f.start(), f.schedule(0, 4)))))\n"
        "e.close()\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    assert (done.stdout, done.stderr) == ("4\n", "")


def test_workers_are_gone_after_close() -> None:
    federation = tiny_federation()
    executor = WorkerProcesses(federation, 2)
    executor.evaluate(federation.start(), [0, 1])
    pids = [process.pid for process, _ in executor._processes.values()]
    executor.close()
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_method_that_workers_cannot_import_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a client that is given up."""
    import sys
    import types

    module = types.ModuleType("nowhere_else")
    rule = type("Mine", (ClientRule,), {"__module__": "nowhere_else"})
    module.Mine = rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nowhere_else", module)
    with pytest.raises(RuntimeError, match=r"(?s)at its start:.*No module named 'nowhere_else'"):
        train_two_clients(rule())


@pytest.mark.slow
def test_dropout_draws_the_same_numbers_everywhere(tmp_path: Path) -> None:
    """In this process and in two workers, whatever was drawn before; and nothing is drawn from outside."""
    config = tiny_config("model.name=tests.own_models:encoder", "method=heteroavg", "data.limit=150")
    states = []
    for workers in (1, 2):
        torch.rand(workers)
        before = torch.random.get_rng_state()
        folder = tmp_path / str(workers)
        incofl.run(dataclasses.replace(config, engine=dataclasses.replace(config.engine, workers=workers)), folder)
        assert torch.equal(before, torch.random.get_rng_state())
        states.append((folder / "checkpoint" / "state.safetensors").read_bytes())
    assert states[0] == states[1]
