"""Workers on Ray: the same bits as in one process, whatever happens to them."""

import dataclasses
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import incofl
from incofl.client import ClientRule, Local, Upload
from incofl.engine.executor import Executor, InProcess, Lost
from incofl.engine.federation import Federation
from incofl.engine.processes import WorkerProcesses
from incofl.engine.ray_tasks import Connection, RayTasks
from incofl.engine.round import RoundStats, run_round
from incofl.engine.store import ClientStore
from incofl.errors import RunError
from incofl.server import Server
from incofl.task import Score
from incofl.tensors import Tensors
from tests.federations import tiny_config, tiny_federation
from tests.shell import Shell
from tests.test_objects import check_frozen

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),  # starts once, and not once per process of the suite
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

RAY = ["--set", "engine.executor=ray"]


def test_without_ray_there_is_one_clear_line(incofl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = incofl("run", "--quiet", "--out", tmp_path / "a", *RAY)
    expected = "engine.executor: got 'ray', expected Ray to be installed; try: pip install 'incofl[ray]'"
    assert (code, err) == (2, f"incofl: {expected}\n")


@pytest.mark.parametrize(("address", "reason"), [("127.0.0.1:1", "refused"), ("nonsense", "nvalid address")])
def test_a_wrong_address_is_one_clear_line(incofl: Shell, tmp_path: Path, address: str, reason: str) -> None:
    """At once: Ray alone would try for minutes."""
    code, _, err = incofl("run", "--quiet", "--out", tmp_path / "a", *RAY, "--set", f"engine.address={address}")
    assert code == 2
    assert err.startswith(f"incofl: engine.address: got '{address}', expected the address of a running Ray cluster (")
    assert reason in err
    assert err.endswith("start one with: ray start --head\n")
    assert err.count("\n") == 1


def test_an_address_goes_with_ray_only(incofl: Shell, tmp_path: Path) -> None:
    code, _, err = incofl("run", "--out", tmp_path / "a", "--set", "engine.address=auto")
    assert (code, err.count("\n")) == (2, 1)
    assert "engine.address: got 'auto', expected none without engine.executor = 'ray'" in err


@pytest.fixture(scope="module")
def cluster() -> Iterator[Connection]:
    """Ray on this machine, for all tests below: executors use the connection that a process has."""
    handler = signal.getsignal(signal.SIGTERM)
    connection = Connection(cores=4)
    assert signal.getsignal(signal.SIGTERM) is handler
    yield connection
    connection.close()
    with warnings.catch_warnings():  # Ray leaves its processes to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


Make = Callable[[Federation, ClientStore], Executor]


def play(
    federation: Federation, make: Make
) -> tuple[Server, ClientStore, list[RoundStats], list[Score], dict[int, Tensors]]:
    """Two rounds of eight clients: the server, what clients remember, counts, scores and measured statistics."""
    server, store, tallies = federation.start(), ClientStore(federation), []
    executor = make(federation, store)
    try:
        for _ in range(2):
            tallies.append(RoundStats(on_accepted=partial(store.keep, server.round)))
            jobs = federation.schedule(server.round, 8, server=server)
            server = run_round(server, federation.method, jobs, executor, tallies[-1])
        levels = federation.levels_in_use
        return server, store, tallies, executor.evaluate(server, levels), executor.measure(server, levels)
    finally:
        executor.close()


def in_process(federation: Federation, store: ClientStore) -> Executor:
    return InProcess(federation, store=store)


def in_processes(federation: Federation, store: ClientStore) -> Executor:
    return WorkerProcesses(federation, 2, store=store)


def on_ray(federation: Federation, store: ClientStore) -> Executor:
    return RayTasks(Connection(), federation, 2, store=store)


def killing(federation: Federation, done: Path) -> Federation:
    """A federation of which a client kills the process that trains it, once, in the second round."""
    rule = federation.method.client

    class Killing(type(rule)):  # type: ignore[misc]  # found at run time
        def begin(self, local: Local) -> None:
            if local.given.round == 1 and not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            super().begin(local)

    deadly = Killing(**{field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)})
    return dataclasses.replace(federation, method=dataclasses.replace(federation.method, client=deadly))


def assert_same_tensors(a: Mapping[Any, Tensors], b: Mapping[Any, Tensors]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].keys() == b[key].keys()
        assert all(torch.equal(a[key][name], b[key][name]) for name in a[key])


def assert_same(federation: Federation, make: Make, others: Sequence[Make]) -> None:
    """Server, client memory, losses, scores and statistics, bit for bit."""
    server, store, tallies, scores, measured = play(federation, make)
    assert [stats.rejected for stats in tallies] == [[], []]
    for other in others:
        expected, kept, counted, right, statistics = play(federation, other)
        assert_same_tensors({"": server.shared}, {"": expected.shared})
        assert_same_tensors(server.private, expected.private)
        assert_same_tensors(server.extra, expected.extra)
        assert [(stats.loss, stats.clients) for stats in tallies] == [(stats.loss, stats.clients) for stats in counted]
        np.testing.assert_equal([score.totals for score in scores], [score.totals for score in right])
        assert_same_tensors(measured, statistics)
        assert store.manifest == kept.manifest
        pieces = {client: federation.slice(*held) for client, held in store.manifest.items()}
        remembered = [{client: s.get(client, piece) for client, piece in pieces.items()} for s in (store, kept)]
        assert_same_tensors(*remembered)


@pytest.mark.parametrize("method", ["incoavg", "fedrand", "fedecover"])
def test_same_bits_as_in_process(method: str, cluster: Connection) -> None:
    """Channels that a turn draws, by itself or from the server's pools, are the same everywhere."""
    assert_same(tiny_federation(f"method={method}"), on_ray, [in_process])


@pytest.mark.parametrize("method", ["flexlora", "random-ranks"])
def test_adapters_of_three_ranks_have_the_same_bits(method: str, cluster: Connection) -> None:
    """Frozen weights are read where the model is built; ranks that a turn draws are the same everywhere."""
    federation = tiny_federation(f"method={method}", "model.name=tiny-mlp", "split.levels=[2, 4, 8]")
    assert [cost.rank for cost in federation.costs] == [2, 4, 8]
    assert_same(federation, on_ray, [in_process])


def test_a_killed_worker_changes_nothing(
    cluster: Connection, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new one takes over its turn, with what the client remembers; nothing is written over the display."""
    done = tmp_path / "done"

    def make(federation: Federation, store: ClientStore) -> Executor:
        return RayTasks(Connection(), killing(federation, done), 2, store=store)

    assert_same(tiny_federation("method=incoscaffold"), make, [in_process, in_processes])
    assert done.exists()
    assert capfd.readouterr() == ("", "")


@dataclass(frozen=True)
class Deadly(ClientRule):
    """Kills the process that trains from a certain server."""

    def begin(self, local: Local) -> None:
        if float(local.received["fc.bias"][0]) == 7.0:
            os.kill(os.getpid(), signal.SIGKILL)
        if float(local.received["fc.bias"][0]) == 8.0:
            raise ZeroDivisionError("a bug")


def test_a_client_that_kills_its_worker_twice_is_given_up(cluster: Connection) -> None:
    """And the executor is as good as new; a mistake in a method is an error with its place, and no lost client."""
    federation = tiny_federation("method=heteroavg")
    federation = dataclasses.replace(federation, method=dataclasses.replace(federation.method, client=Deadly()))
    executor = RayTasks(Connection(), federation, 1)
    try:
        server = federation.start()
        server.shared["fc.bias"][0] = 7.0
        (outcome,) = itertools.chain.from_iterable(executor.train(server, federation.schedule(0, 1)))
        assert isinstance(outcome, Lost)
        assert outcome.reason == "its Ray worker died 2 times (WorkerCrashedError); out of memory?"
        server.shared["fc.bias"][0] = 0.0
        outcomes = list(itertools.chain.from_iterable(executor.train(server, federation.schedule(0, 6))))
        assert [type(outcome) for outcome in outcomes] == [Upload] * 6
        server.shared["fc.bias"][0] = 8.0
        with pytest.raises(RuntimeError, match=r"(?s)in a Ray worker, client.*ZeroDivisionError: a bug"):
            list(executor.train(server, federation.schedule(0, 1)))
    finally:
        executor.close()


def test_what_workers_cannot_import_is_one_clear_line(cluster: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("nowhere_else")
    rule = type("Mine", (ClientRule,), {"__module__": "nowhere_else"})
    module.Mine = rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nowhere_else", module)
    federation = tiny_federation("method=heteroavg")
    federation = dataclasses.replace(federation, method=dataclasses.replace(federation.method, client=rule()))
    executor = RayTasks(Connection(), federation, 1)
    try:
        with pytest.raises(
            RunError, match=r"no Ray worker can start .*No module named 'nowhere_else'.*, expected"
        ) as line:
            list(executor.train(federation.start(), federation.schedule(0, 1)))
        assert "\n" not in str(line.value)
    finally:
        executor.close()


def test_a_cluster_without_a_free_core(cluster: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not wait forever; what holds the cores here is a task that sleeps."""
    monkeypatch.setattr(sys.modules["incofl.engine.ray_tasks"], "PATIENCE", 3)
    holding = cluster.ray.remote(num_cpus=4)(lambda: time.sleep(60)).remote()
    executor = RayTasks(Connection(), tiny_federation(), 1)
    try:
        with pytest.raises(RunError, match=r"no Ray worker has started for 3 s, expected one core .* \(of 4 in"):
            executor.evaluate(tiny_federation().start(), [0])
    finally:
        cluster.ray.cancel(holding, force=True)
        executor.close()


def test_a_run_on_an_existing_cluster(cluster: Connection, tmp_path: Path) -> None:
    """Begun here, continued by the command line on a cluster by its address, which lives on: the same bits."""
    options = ["method=fedrolex+inco", "engine.workers=1"]
    incofl.run(tiny_config("rounds=3", *options), tmp_path / "a")
    incofl.run(tiny_config("rounds=1", *options), tmp_path / "b")
    address = cluster.ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [
            *(sys.executable, "-m", "incofl", "run", "--resume", "--out", tmp_path / "b", "--set", "rounds=3"),
            *(*RAY, "--set", f"engine.address={address}", "--set", "engine.workers=2"),
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "raylet" not in done.stdout
    first, second = ((tmp_path / name / "checkpoint" / "state.safetensors").read_bytes() for name in "ab")
    assert first == second
    first, second = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in "ab")
    assert re.sub(rb'"seconds": [\d.]+', b"", first) == re.sub(rb'"seconds": [\d.]+', b"", second)
    assert cluster.cores == 4


def test_frozen_layers_are_neither_trained_nor_uploaded(tmp_path: Path) -> None:
    check_frozen(tmp_path, "heteroscaffold", {"executor": "ray", "workers": 2})
