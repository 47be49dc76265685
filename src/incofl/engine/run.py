"""A run: rounds, evaluation, records, a checkpoint after each round, and its resumption bit for bit."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from incofl.client import Score
from incofl.config import Config, make_config
from incofl.data import OWN
from incofl.engine.build import build
from incofl.engine.checkpoint import Identity, checkpoint_round, load_checkpoint, save_checkpoint, write_json
from incofl.engine.executor import Executor, InProcess
from incofl.engine.federation import Federation
from incofl.engine.memory import keep_freed_memory
from incofl.engine.pool import num_cores
from incofl.engine.processes import WorkerProcesses
from incofl.engine.ray_actors import RayActors
from incofl.engine.records import Row, RunFolder, summarise
from incofl.engine.round import Tally, run_round
from incofl.engine.site import Memories, Simulated, Site
from incofl.engine.store import ClientStore
from incofl.engine.tensorboard import TensorBoard, check_tensorboard
from incofl.engine.trace import SERVER, Trace
from incofl.errors import ConfigError
from incofl.server import Server

WORKERS = "INCOFL_WORKERS"  # the environment variable that says how many workers "auto" means

# About ten seconds of training on one core: four times what starting worker processes takes.
WORTH_WORKERS = 1.5e11


class Progress(Protocol):
    """Whoever watches a run."""

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """Before the first round of this process; ``rows`` are the rounds finished earlier."""
        ...

    def uploaded(self, client: int) -> None:
        """A client of the current round is done."""
        ...

    def finished_round(self, row: Row) -> None:
        """A round is done and saved."""
        ...


class Silent:
    """Watches nothing."""

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """Nothing."""

    def uploaded(self, client: int) -> None:
        """Nothing."""

    def finished_round(self, row: Row) -> None:
        """Nothing."""


def run(
    config: Config | Mapping[str, Any],
    out: str | Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    site: Site | None = None,
) -> dict[str, Any]:
    """Trains the federation that a config describes and returns its summary.

    Args:
        config: what to run; nested values as in a config file are as good.
        out: the run folder.
        resume: continue the run in that folder from its last finished round, if there is one.
        progress: told about every client and round.
        site: where its clients are; on this machine, if nothing is said.

    Raises:
        KeyboardInterrupt: as it came, with every finished round saved and the summary written.
    """
    # A config that was put together by hand is checked here.
    config = make_config(config.to_dict() if isinstance(config, Config) else config)
    keep_freed_memory()
    folder = RunFolder(Path(out))
    folder.check(config, resume)
    if config.record.tensorboard:
        check_tensorboard()
    site = site or Simulated(build_here, make_executor)
    federation = site.build(config, folder)
    with folder.locked():
        return _run(config, federation, folder, progress or Silent(), site)


def build_here(config: Config, folder: RunFolder) -> Federation:
    """The federation of a config, with the partition that its folder holds already."""
    return build(config, folder.load_partition(config.data.clients), begun=folder.checkpoint.exists())


def _run(config: Config, federation: Federation, folder: RunFolder, progress: Progress, site: Site) -> dict[str, Any]:
    identity = Identity(config.digest(), federation.data.fingerprint())
    server, store = federation.start(), site.memories(config, federation, folder.memories)
    if folder.checkpoint.exists():
        checkpoint = load_checkpoint(folder.checkpoint, server, identity)
        server = checkpoint.server
        store.restore(checkpoint.memories)
    else:
        store.restore({})
    if server.round > config.rounds:
        raise ConfigError(
            f"rounds: got {config.rounds}, expected at least {server.round}: so many are finished already"
        )
    rows = folder.keep_rows(server.round)
    folder.save_config(config)
    if config.data.partition != "virtual" and config.data.name != OWN:  # which follows from the config, or is not here
        folder.save_partition(federation.partition)
    if server.round < config.rounds:
        folder.save_environment()
    progress.started(config, federation, rows)

    if server.round == 0 and config.record.keeps(0):
        save_checkpoint(folder.snapshot(0), server, identity)
    status = "interrupted"
    trace = Trace(on=config.engine.trace)
    board = TensorBoard(folder.tensorboard, federation.levels_in_use, rows, on=config.record.tensorboard)
    executor = site.executor(config, federation, config.rounds - server.round, trace, store)
    try:
        while server.round < config.rounds:
            federation, among = site.gather(federation, server.round)
            server = dataclasses.replace(server, population=federation.population)
            remembered = dict(store.manifest)
            tally = Tally(
                sent=functools.partial(federation.method.server.sent, server),
                on_upload=progress.uploaded,
                on_accepted=store.keeper(server.round),
                trace=trace,
            )
            start = time.perf_counter()
            with trace.span("schedule"):
                jobs = federation.schedule(server.round, config.cohort_size, among)
            advanced = run_round(server, federation.method, jobs, executor, tally)
            trace.add("mean, transforms", SERVER, tally.last_arrival, time.perf_counter())
            if not site.suffices(server.round, tally):
                store.restore(remembered)
                continue
            server, row = _evaluated(config, federation, advanced, executor, tally)
            row |= site.observed() | {"seconds": round(time.perf_counter() - start, 3)}
            with trace.span("records, checkpoint"):
                folder.append(row)
                store.save()
                if config.record.keeps(server.round):
                    save_checkpoint(folder.snapshot(server.round), server, identity)
                save_checkpoint(folder.checkpoint, server, identity, store.manifest)
                store.saved()
            rows.append(row)
            board.add(row)
            progress.finished_round(row)
        status = "done"
    finally:
        executor.close()
        board.close()
        # An interruption may have come between a record and its checkpoint, or right after that.
        rows = folder.keep_rows(checkpoint_round(folder.checkpoint))
        summary = summarise(rows, config, federation.levels_in_use, status)
        write_json(folder.summary, summary)
        if trace.on:
            trace.save(folder.trace)
    return summary


def make_executor(
    config: Config,
    federation: Federation,
    rounds: int,
    trace: Trace | None = None,
    store: Memories | None = None,
) -> Executor:
    """Ray actors if these are asked for; else processes where they pay for their start, or this process."""
    assert store is None or isinstance(store, ClientStore)
    engine, workers = config.engine, _wished_workers(config)
    if engine.executor == "ray":
        return RayActors(federation, workers, engine.address, trace, store, most=config.cohort_size)
    if workers is None and _training_macs(federation, config.cohort_size) * rounds < WORTH_WORKERS:
        workers = 1
    elif workers is None:
        workers = min(num_cores(), config.cohort_size)
    if workers > 1 or engine.executor == "processes":
        return WorkerProcesses(federation, workers, trace, store)
    return InProcess(federation, trace, store)


def _wished_workers(config: Config) -> int | None:
    """How many workers the config or, if that leaves it open, the environment asks for."""
    if config.engine.workers != "auto":
        return config.engine.workers
    wish = os.environ.get(WORKERS)
    if wish and (not wish.isdecimal() or int(wish) < 1):
        raise ConfigError(f"{WORKERS}: got {wish!r}, expected a whole number >= 1")
    return int(wish) if wish else None


def _training_macs(federation: Federation, cohort: int) -> float:
    """Multiply-accumulates of an average round; a training step costs about three forward passes."""
    mean_macs = float(np.mean([federation.costs[level].macs for level in federation.levels_in_use]))
    mean_examples = float(np.mean([len(part) for part in federation.partition[:100]]))
    return 3 * mean_macs * mean_examples * federation.local.epochs * cohort


def _evaluated(
    config: Config, federation: Federation, server: Server, executor: Executor, tally: Tally
) -> tuple[Server, Row]:
    """The server after a round, with measured statistics where the method wants them, and the line of the round."""
    scores: list[Score] = []
    due = server.round % config.eval.every == 0 or server.round == config.rounds
    if due and len(federation.data.test):
        if federation.method.server.buffers == "static" and server.layout.buffers:
            server = server.measured(executor.measure(server, federation.levels_in_use))
        scores = executor.evaluate(server, federation.levels_in_use)
    row: Row = {
        "round": server.round,
        "accuracy": float(np.mean([score.accuracy for score in scores])) if scores else None,
        "accuracy_by_level": [score.accuracy for score in scores] or None,
        "loss": _finite(tally.loss),
        "test_loss": _finite(float(np.mean([score.loss for score in scores]))) if scores else None,
        "clients": sorted(tally.clients),
        "rejected": tally.rejected,
        "bytes_up": tally.bytes_up,
        "bytes_down": tally.bytes_down,
        "seconds": 0.0,  # known when all is done
        **tally.records,
    }
    return server, row


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: a loss that is none is null."""
    return value if value is not None and math.isfinite(value) else None
