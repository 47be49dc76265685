"""What is recorded of a round: its row in ``metrics.jsonl``, with the evaluation of every level where it is due."""

import math

import numpy as np

from incofl.attacks import Attack
from incofl.config import Config
from incofl.engine.best_path import best_paths
from incofl.engine.executor import Executor
from incofl.engine.federation import Federation
from incofl.engine.round import RoundStats
from incofl.engine.run_folder import Row
from incofl.engine.worker import Worker
from incofl.server import Server
from incofl.split.growth import OPEN


def evaluated(
    config: Config, federation: Federation, executor: Executor, server: Server, stats: RoundStats
) -> tuple[Server, Row]:
    """The server after a round, with measured statistics where the method wants them, and the row of the round."""
    task = federation.task
    values: list[dict[str, float]] = []
    best, chosen = dict[str, list[float]](), list[int]()
    due = server.round % config.eval.every == 0 or server.round == config.rounds
    if due and len(federation.data.test):
        trained = [federation.trained_as(level) for level in federation.levels_in_use]
        distinct = sorted(set(trained))
        if federation.method.server.buffers == "static" and server.layout.buffers:
            server = server.measured(executor.measure(server, distinct))
        scores = dict(zip(distinct, executor.evaluate(server, distinct), strict=True))
        values = [task.values(scores[level]) for level in trained]
        if federation.best_path:
            best, chosen = best_paths(task, scores, trained)
    by_metric = {name: [_finite(level[name]) for level in values] for name in values[0]} if values else {}
    others = {name: by for name, by in by_metric.items() if name not in (task.first, "loss")}
    others |= {name: [_finite(value) for value in by] for name, by in best.items()}
    row: Row = {
        "round": server.round,
        "accuracy": _mean(by_metric.get(task.first)),
        "accuracy_by_level": by_metric.get(task.first),
        **({"metrics": others} if others else {}),
        **({"best_path": chosen} if chosen else {}),
        "loss": _finite(stats.loss),
        "test_loss": _mean(by_metric.get("loss")),
        "clients": sorted(stats.clients),
        "rejected": stats.rejected,
        **({"clipped": stats.clipped} if stats.clipped else {}),
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
        "seconds": 0.0,  # known when all is done
        **({} if federation.top is None else {OPEN: federation.top}),
        **{name: record for name, record in stats.records.items() if record},
    }
    return server, row


def attack_row(attack: Attack, attackers: frozenset[int], federation: Federation, server: Server, row: Row) -> Row:
    """Which clients of a round were attackers, and in evaluated rounds how often a backdoor opens."""
    found: Row = {"clients": sorted(attackers.intersection(row["clients"]))}
    if attack.kind == "backdoor" and row["accuracy_by_level"]:
        triggered, worker = attack.triggered(federation.data.test), Worker(federation)
        levels = [federation.trained_as(level) for level in federation.levels_in_use]
        scores = [federation.task.values(worker.evaluate(server, level, triggered)) for level in levels]
        found["success_by_level"] = [_finite(score[federation.task.first]) for score in scores]
    return found


def cannot_be_evaluated(row: Row) -> bool:
    """Whether a round was evaluated, and no level has a finite loss on the test set."""
    return row["accuracy_by_level"] is not None and row["test_loss"] is None


def _mean(values: list[float | None] | None) -> float | None:
    known = [value for value in values or [] if value is not None]
    return _finite(float(np.mean(known))) if known else None


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: what is none is null."""
    return value if value is not None and math.isfinite(value) else None
