"""Small federations for tests."""

import os

from incofl.config import Config, make_config
from incofl.engine.build import build
from incofl.engine.executor import Executor, InProcess, make_store
from incofl.engine.federation import Federation
from incofl.engine.processes import WorkerProcesses
from incofl.engine.round import Tally, run_round
from incofl.engine.run import WORKERS
from incofl.engine.store import ClientStore
from incofl.server import Server

TINY = {
    "rounds": 3,
    "cohort": 4,
    "data": {"clients": 10, "limit": 300},
    "model": {"name": "tiny-resnet"},
    "split": {"levels": 3},
    "local": {"epochs": 1, "batch_size": 16},
}


def tiny_config(*overrides: str) -> Config:
    """Ten clients, three sizes of a network of a few thousand parameters, 300 digits."""
    return make_config(TINY, overrides)


def tiny_federation(*overrides: str) -> Federation:
    return build(tiny_config(*overrides))


def run_rounds(
    federation: Federation,
    rounds: int,
    cohort: int = 4,
    server: Server | None = None,
    store: ClientStore | None = None,
) -> list[Server]:
    """The server before the first round and after each."""
    servers = [server or federation.start()]
    workers = int(os.environ.get(WORKERS, "1"))
    store = store or make_store(federation)
    executor: Executor = InProcess(federation, store=store)
    if workers > 1:
        executor = WorkerProcesses(federation, workers, store=store)
    for _ in range(rounds):
        before = servers[-1]
        jobs = federation.schedule(before.round, cohort)
        tally = Tally(on_accepted=store.keeper(before.round))
        servers.append(run_round(before, federation.method, jobs, executor, tally))
    executor.close()
    return servers
