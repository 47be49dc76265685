"""Where the clients of a run are: on this machine, on a Ray cluster, or at the other end of a network."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from incofl.client import Upload
from incofl.config import Config
from incofl.engine.build import build
from incofl.engine.checkpoint import Manifest
from incofl.engine.executor import Executor, InProcess
from incofl.engine.federation import Federation
from incofl.engine.pool import num_cores
from incofl.engine.processes import WorkerProcesses
from incofl.engine.ray_tasks import Connection, RayTasks
from incofl.engine.round import RoundStats
from incofl.engine.run_folder import Row, RunFolder
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.errors import ConfigError

WORKERS = "INCOFL_WORKERS"  # the environment variable that says how many workers "auto" means

# About ten seconds of training on one core: four times what starting worker processes takes.
WORTH_WORKERS = 1.5e11


class Memories(Protocol):
    """What clients remember, as far as the server takes part in it; ``ClientStore`` keeps all of it."""

    manifest: Manifest

    def keep(self, round: int, upload: Upload) -> None: ...
    def saved(self) -> None: ...
    def restore(self, manifest: Manifest, spare: Manifest | None = None) -> None: ...


class Backend:
    """The place where the clients of a run are: this process and its workers, also on a Ray cluster. All are there."""

    def build(self, config: Config, folder: RunFolder) -> Federation:
        """The federation, before the folder is locked."""
        return build(config, folder.load_partition(config.num_clients), begun=folder.checkpoint.exists())

    def memories(self, config: Config, federation: Federation, folder: Path) -> Memories:
        """What clients remember."""
        self._store = ClientStore(federation, folder, config.engine.client_memory)
        return self._store

    def executor(self, config: Config, federation: Federation, rounds: int, trace: Trace) -> Executor:
        """Computes the clients' turns; from here on the folder belongs to this run."""
        return make_executor(config, federation, rounds, trace, self._store)

    def gather(self, federation: Federation, round: int) -> tuple[Federation, Sequence[int] | None]:
        """The federation as its clients are before a round, and those that can be reached (``None``: all)."""
        return federation, None

    def suffices(self, round: int, stats: RoundStats) -> bool:
        """Whether a round's uploads are enough; if not, the round is repeated."""
        return True

    def observed(self) -> Row:
        """What the backend adds to the row of the last round."""
        return {}


def make_executor(
    config: Config, federation: Federation, rounds: int, trace: Trace | None = None, store: ClientStore | None = None
) -> Executor:
    """Ray if it is asked for; else processes where they pay for their start, or this process."""
    engine, workers = config.engine, _wished_workers(config)
    if engine.executor == "ray":
        cluster = Connection(engine.address, workers)
        workers = workers or min(cluster.cores, config.cohort_size)
        return RayTasks(cluster, federation, workers, trace=trace, store=store)
    if workers is None:
        long = _training_macs(federation, config.cohort_size) * rounds >= WORTH_WORKERS
        workers = min(num_cores(), config.cohort_size) if long else 1
    if workers > 1 or engine.executor == "processes":
        return WorkerProcesses(federation, workers, trace, store)
    return InProcess(federation, trace, store)


def _wished_workers(config: Config) -> int | None:
    """The number of workers that the config or, if that leaves it open, the environment asks for."""
    if config.engine.workers != "auto":
        return config.engine.workers
    wish = os.environ.get(WORKERS)
    if wish and (not wish.isdecimal() or int(wish) < 1):
        raise ConfigError(f"{WORKERS}: got {wish!r}, expected a whole number >= 1")
    return int(wish) if wish else None


def _training_macs(federation: Federation, cohort: int) -> float:
    """Multiply-accumulates of an average round; a training step costs about three forward passes."""
    mean_macs = float(np.mean([federation.turn(level) for level in federation.levels_in_use]))
    mean_examples = float(np.mean([len(part) for part in federation.partition[:100]]))
    return 3 * mean_macs * mean_examples * cohort
