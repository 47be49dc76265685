"""Small federations for tests."""

import os
from functools import partial
from pathlib import Path

from incofl.config import Config, make_config
from incofl.data import find_source
from incofl.engine.backend import WORKERS
from incofl.engine.build import build
from incofl.engine.executor import Executor, InProcess
from incofl.engine.federation import Federation
from incofl.engine.processes import WorkerProcesses
from incofl.engine.round import RoundStats, run_round
from incofl.engine.store import ClientStore
from incofl.server import Server
from tests.signals import write_har
from tests.texts import text_config

TINY = {
    "method": "incoavg",
    "rounds": 3,
    "cohort": 4,
    "data": {"clients": 10, "limit": 300},
    "model": {"name": "tiny-resnet"},
    "split": {"levels": 3},
    "local": {"epochs": 1, "batch_size": 16},
}


# A member of each family of models, and one whose layout is inferred.
FAMILIES = (
    "tiny-resnet",
    "tiny-mlp",
    "tiny-vit",
    "tiny-lstm",
    "tiny-transformer",
    "tiny-resnet-1d",
    "tests.own_models:encoder",
)


def family_config(model: str, root: Path, *overrides: str) -> Config:
    """A tiny federation on a member of a family; texts are read from a folder, and signals, which are written there."""
    if model in ("tiny-lstm", "tiny-transformer"):
        return text_config(root, model, *overrides)
    if model == "tiny-resnet-1d":
        if not find_source("har").found(root):
            write_har(root)
        return tiny_config(f"model.name={model}", "data.name=har", f"data.root={root}", "data.clients=6", *overrides)
    patch = ["model.patch=2"] if model == "tiny-vit" else []
    return tiny_config(f"model.name={model}", "data.limit=150", *patch, *overrides)


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
    store = store or ClientStore(federation)
    executor: Executor = InProcess(federation, store=store)
    if workers > 1:
        executor = WorkerProcesses(federation, workers, store=store)
    for _ in range(rounds):
        before = servers[-1]
        jobs = federation.schedule(before.round, cohort, server=before)
        stats = RoundStats(on_accepted=partial(store.keep, before.round))
        servers.append(run_round(before, federation.method, jobs, executor, stats))
    executor.close()
    return servers
