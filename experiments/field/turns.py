"""How long a client's turn takes by each method, against the smallest level's by HeteroAvg, on one core.

usage: python experiments/field/turns.py [--root DIR]

Writes turns.csv. All turns are of 64 examples, an epoch in batches of 16, as in the study; each is measured several
times in turn with HeteroAvg's, the fastest of each counts, and their ratio hardly depends on the machine.
"""

import argparse
import csv
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from budget import ARMS, BASE, keys, plain

from incofl.config import make_config
from incofl.engine.build import build
from incofl.engine.worker import Worker

HERE = Path(__file__).parent
EXAMPLES, REPEATED = 64, 5


def turn(column: str, method: str, level: int, root: str) -> Callable[[], Any] | None:
    """The turn of a client of a level, to be timed; ``None`` if such clients take no part."""
    federation = build(make_config(BASE, [*keys(column, method), f"data.root={root!r}", "engine.workers=1"]))
    federation = dataclasses.replace(federation, partition=[torch.arange(EXAMPLES)] * len(federation.partition))
    client = next(c for c in range(len(federation.levels)) if federation.levels[c] == level % len(federation.costs))
    if federation.trained(federation.levels[client]) is None:
        return None
    server, worker = federation.start(), Worker(federation)
    (job,) = federation.jobs([client], 0, server)
    memory = worker.train(server, job).memory  # some compute more when they remember a turn
    return lambda: worker.train(server, job, memory)


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any]) -> float:
    """How many times as long the one takes as the other."""
    best = [float("inf"), float("inf")]
    for _ in range(1 + REPEATED):
        for at, run in enumerate((ours, theirs)):
            start = time.perf_counter()
            run()
            best[at] = min(best[at], time.perf_counter() - start)
    return best[0] / best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    root = parser.parse_args().root
    torch.set_num_threads(1)
    with (HERE / "turns.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["column", "method", "level", "turn"])
        for column, methods in ARMS.items():
            base = turn(column, "heteroavg", 0, root)
            for method in dict.fromkeys(map(plain, methods)):
                for name, level in (("smallest", 0), ("largest", -1)):
                    if base is not None and (own := turn(column, method, level, root)) is not None:
                        writer.writerow([column, method, name, f"{ratio(own, base):.2f}"])
                        file.flush()


if __name__ == "__main__":
    main()
