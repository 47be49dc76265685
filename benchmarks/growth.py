"""What a larger population and a larger cohort cost: start-up, time per round and memory, with a tiny model.

usage: python benchmarks/growth.py [--repeats 3]

Populations of 100 to 1,000,000 clients with a cohort of 100, and cohorts of 10 to 10,000 out of 1,000,000 clients, on
the embedded digits; the clients' examples are drawn when they are needed (data.partition = "virtual"). Each measurement
is a process of its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from statistics import median
from time import perf_counter
from typing import Any

POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
COHORTS = (10, 100, 1_000, 10_000)
COHORT = 100


def measure(clients: int, cohort: int, rounds: int) -> dict[str, float]:
    """One run in this process, timed from its start."""
    start = perf_counter()
    import incofl
    from incofl.config import Config
    from incofl.engine.federation import Federation
    from incofl.engine.progress import Progress
    from incofl.engine.run_folder import Row

    class Clock(Progress):
        def __init__(self) -> None:
            self.times: list[float] = []

        def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
            self.times.append(perf_counter())

        def uploaded(self, client: int) -> None:
            pass

        def finished_round(self, row: Row) -> None:
            self.times.append(perf_counter())

    clock = Clock()
    config = {
        "rounds": rounds,
        "cohort": cohort,
        "data": {"name": "digits", "partition": "virtual", "clients": clients, "examples": 20, "limit": 200},
        "model": {"name": "tiny-mlp"},
        "split": {"kind": "layer"},
        "local": {"epochs": 1, "batch_size": 10},
        "eval": {"every": rounds},
        "engine": {"workers": 1},
    }
    with tempfile.TemporaryDirectory() as folder:
        incofl.run(config, folder, progress=clock)
    seconds = [after - before for before, after in zip(clock.times[1:-2], clock.times[2:-1], strict=True)]
    return {
        "start-up": clock.times[0] - start,
        "round": median(seconds),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_fresh_process(clients: int, cohort: int) -> dict[str, float]:
    rounds = max(3, 2000 // cohort)  # the first and the last are left out
    command = [sys.executable, __file__, "--one", f"{clients},{cohort},{rounds}"]
    found: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*map(int, options.one.split(",")))))
        return
    from measure import publish, spread, table

    cases = [(clients, COHORT) for clients in POPULATIONS]
    cases += [(POPULATIONS[-1], cohort) for cohort in COHORTS if cohort != COHORT]
    measured: list[dict[str, Any]] = []
    for repeat in range(options.repeats):  # in turn: what disturbs one disturbs all
        for clients, cohort in cases:
            found = in_fresh_process(clients, cohort)
            print(clients, cohort, found, flush=True)
            measured.append({"repeat": repeat, "clients": clients, "cohort": cohort, **found})

    def values(key: str, clients: int, cohort: int) -> list[float]:
        return [m[key] for m in measured if (m["clients"], m["cohort"]) == (clients, cohort)]

    def against_smallest(key: str, clients: int) -> list[float]:
        pairs = zip(values(key, clients, COHORT), values(key, POPULATIONS[0], COHORT), strict=True)
        return [a / b for a, b in pairs]

    population = [
        [
            f"{clients:,}",
            spread(values("start-up", clients, COHORT), 1),
            spread(against_smallest("round", clients)),
            spread(against_smallest("memory", clients)),
        ]
        for clients in POPULATIONS
    ]
    head = ["population, cohort of 100", "start-up in s", "time per round / that of 100", "peak memory / that of 100"]
    text = table(head, population) + "\nTargets at 1,000,000: under 10 s, at most 1.10, at most 1.10.\n\n"
    per_client = [
        [
            f"{cohort:,}",
            spread([1000 * s / cohort for s in values("round", POPULATIONS[-1], cohort)]),
            spread([1 / s for s in values("round", POPULATIONS[-1], cohort)]),
            spread(values("memory", POPULATIONS[-1], cohort), 0),
        ]
        for cohort in COHORTS
    ]
    head = ["cohort, population of 1,000,000", "ms per client", "rounds per second", "peak memory in MiB"]
    publish("growth", text + table(head, per_client), {"measured": measured})


if __name__ == "__main__":
    main()
