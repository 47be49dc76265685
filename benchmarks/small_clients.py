"""Many clients with little to do: a turn, and clients side by side, against the bare training steps.

usage: python benchmarks/small_clients.py [--repeats 5] [--work 20x1,20x5,200x1,200x5] [--before SRC]
                                          [--cohorts 100,1000,10000,100000] [--name NAME]

Models of a few thousand parameters on the embedded digits, 20 or 200 examples a client, 1 or 5 epochs of batches of 20.
The bare steps are those of benchmarks/efficiency.py: the same batches and fused optimiser on a model that is there, and
no federation around. A turn is all that a round does for a client: its examples are found, it receives, trains, sends,
is checked and added up; side by side likewise, with engine.vectorise; auto chose one of both. All run in turn in one
process with one thread, and the clock is the processor time of that process, which other work on the machine disturbs
least. With --before, the turn of an earlier version, whose src is at SRC, takes part in a process of its own.

Then whole rounds of growing cohorts out of a million clients, on two workers and by the clock on the wall, each in a
process of its own. The peers are compared by: python benchmarks/peers.py --small.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import small_models
import torch
from torch import nn
from torch.nn import functional

from incofl.config import Config, make_config
from incofl.data.pipeline import local_batches
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.round import RoundStats, run_round
from incofl.engine.worker import keep_freed_memory
from incofl.path import image_format
from incofl.seeds import Purpose, torch_rng
from incofl.split import submodel

MODELS = {
    "tiny-mlp": None,
    "CNN, group norm": small_models.cnn_group_norm,
    "CNN, batch norm": small_models.cnn_batch_norm,
    "LSTM": small_models.lstm,
}
WORK = [(20, 1), (20, 5), (200, 1), (200, 5)]  # examples and epochs
SIDE_BY_SIDE = 64  # clients of a measured round
# What the table must show, by model, examples and epochs: bare / turn, and turn before or bare / side by side.
TARGETS = {
    ("tiny-mlp", 20, 1): "bare/turn 0.6, before/side 10",
    ("CNN, group norm", 20, 1): "bare/side 1.3, before/side 2",
}
TARGETS |= {("CNN, group norm", 200, 5): "bare/turn 0.9"}


def config_of(model: str, examples: int, epochs: int, cohort: int, engine: dict[str, Any]) -> Config:
    """A federation of a million clients."""
    data = {"name": "digits", "partition": "virtual", "clients": 1_000_000, "examples": examples}
    values = {
        "method": "heteroavg",
        "cohort": cohort,
        "data": data,
        "split": {"kind": "layer"} if MODELS[model] is None else {"kind": "hetero", "levels": [1.0]},
        "local": {"epochs": epochs, "batch_size": 20},
        "engine": {"workers": 1, **engine},
    }
    if MODELS[model] is None:
        return make_config({**values, "model": {"name": model}})
    return make_config(values, model=MODELS[model])


class Case:
    """One model and amount of work, ready to be measured in several ways."""

    def __init__(self, model: str, examples: int, epochs: int) -> None:
        self._clients = SIDE_BY_SIDE if examples * epochs <= 200 else 8  # of a round of turns, and of bare steps
        stacked = {"vectorise": True, "vectorise_clients": SIDE_BY_SIDE}
        engines: list[dict[str, Any]] = [{}] if _OLD else [{}, stacked, {**stacked, "vectorise": "auto"}]
        self._federations = [build(config_of(model, examples, epochs, 64, engine)) for engine in engines]
        self._executors = [InProcess(federation) for federation in self._federations]
        self._servers = [federation.start() for federation in self._federations]
        f = self._federations[0]
        self._models: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}
        for level in f.levels_in_use:
            module = submodel(f.model.template, f.model.layout, f.slice(level, 0))
            module = module.to(memory_format=image_format(module))  # type: ignore[call-overload]
            module.load_state_dict(f.slice(level, 0).take(f.model.initial))
            self._models[level] = module.train(), f.local.make_optimizer(module.parameters())

    def round(self, at: int) -> float:
        """Processor seconds per client of a round: of turns, side by side, or as ``auto`` chose in the first one."""
        clients = SIDE_BY_SIDE * len(self._models) if at else self._clients
        f, server = self._federations[at], self._servers[at]
        jobs = f.schedule(server.round, clients)
        start = time.process_time()
        self._servers[at] = run_round(server, f.method, jobs, self._executors[at], RoundStats())
        return (time.process_time() - start) / clients

    def bare(self) -> float:
        """Processor seconds per client of the bare steps."""
        f, server = self._federations[0], self._servers[0]
        jobs = f.schedule(server.round, self._clients)
        held = [f.partition[job.client] for job in jobs]
        start = time.process_time()
        for job, part in zip(jobs, held, strict=True):
            model, optimizer = self._models[job.level]
            rng = torch_rng(f.seed, Purpose.TRAINING, job.round, job.client)
            for x, y in local_batches(f.data.train, part, f.data.pipeline, f.local, rng):
                if x.dim() == 4:
                    x = x.to(memory_format=image_format(model))
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return (time.process_time() - start) / len(jobs)


_OLD = "--serve" in sys.argv  # a process of an earlier version, which knows no stacks


def serve() -> None:
    """Measures a turn of each case that comes in, of an earlier version."""
    cases: dict[str, Case] = {}
    for line in sys.stdin:
        case = cases.setdefault(line, Case(*json.loads(line)))
        print(case.round(0), flush=True)


def compare(work: list[tuple[int, int]], repeats: int, before: str | None) -> list[dict[str, Any]]:
    """All models with some amounts of work, the ways in turn."""
    old: Any = None
    if before is not None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([before, os.path.dirname(__file__)])}
        old = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
    measured: list[dict[str, Any]] = []
    for model in MODELS:
        for examples, epochs in work:
            case = Case(model, examples, epochs)
            for repeat in range(-1, repeats):  # the first is not counted
                ways = ("turn", "side by side", "auto")
                found = {"bare": case.bare(), **{way: case.round(at) for at, way in enumerate(ways)}}
                if old is not None:
                    old.stdin.write(json.dumps([model, examples, epochs]) + "\n")
                    old.stdin.flush()
                    found["before"] = float(old.stdout.readline())
                if repeat >= 0:
                    measured.append({"model": model, "examples": examples, "epochs": epochs, "seconds": found})
            ms = {way: 1000 * seconds for way, seconds in measured[-1]["seconds"].items()}
            print(model, examples, epochs, " ".join(f"{way} {value:.2f}" for way, value in ms.items()), flush=True)
    if old is not None:
        old.stdin.close()
        old.wait()
    return measured


def cohort(size: int) -> dict[str, float]:
    """Rounds of a cohort on two workers; the first starts the workers and is not counted."""
    import incofl
    from incofl.engine.progress import Progress
    from incofl.engine.run_folder import Row

    class Clock(Progress):
        """Notes when rounds end."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def finished_round(self, row: Row) -> None:
            self.times.append(time.perf_counter())

    rounds, clock = (5 if size <= 10_000 else 3), Clock()
    config = config_of("tiny-mlp", 20, 1, size, {"workers": 2, "vectorise": True})
    values = config.to_dict() | {"rounds": rounds, "eval": {"every": rounds}}
    with tempfile.TemporaryDirectory() as folder:
        incofl.run(values, folder, progress=clock)
    seconds = [b - a for a, b in zip(clock.times[:-2], clock.times[1:-1], strict=True)]
    here, workers = (
        resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {"round": median(seconds), "memory": here, "memory of a worker": workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", default=",".join(f"{n}x{e}" for n, e in WORK), help="examples x epochs")
    parser.add_argument("--cohorts", default="100,1000,10000,100000", help="sizes, separated by commas; none: empty")
    parser.add_argument("--before", help="the src of an earlier version")
    parser.add_argument("--name", default="small-clients", help="of the results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cohort", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    if options.serve:
        serve()
        return
    if options.cohort:
        print(json.dumps(cohort(options.cohort)))
        return
    from measure import publish, spread, table

    work = [(int(examples), int(epochs)) for examples, _, epochs in (w.partition("x") for w in options.work.split(","))]
    measured = compare(work, options.repeats, options.before)
    rows = []
    for model in MODELS:
        for examples, epochs in work:
            own = [
                m["seconds"] for m in measured if (m["model"], m["examples"], m["epochs"]) == (model, examples, epochs)
            ]

            def ratio(a: str, b: str, own: list[dict[str, float]] = own) -> str:
                return spread([m[a] / m[b] for m in own]) if a in own[0] else "-"

            ratios = [ratio("bare", "turn"), ratio("bare", "side by side"), ratio("turn", "side by side")]
            best = spread([min(m["turn"], m["side by side"]) / m["auto"] for m in own])
            rows.append([model, str(examples), str(epochs), *ratios, best, ratio("before", "side by side")])
            rows[-1].append(TARGETS.get((model, examples, epochs), ""))
    head = ["model", "examples", "epochs", "bare / turn", "bare / side by side", "turn / side by side"]
    head += ["faster of both / auto (target 0.9)"]
    text = table([*head, "turn before / side by side", "target, at least"], rows)
    sizes = [int(size) for size in options.cohorts.split(",") if size]
    rounds: list[dict[str, Any]] = []
    for _ in range(min(3, options.repeats) if sizes else 0):
        for size in sizes:
            command = [sys.executable, __file__, "--cohort", str(size)]
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            print(size, found, flush=True)
            rounds.append({"cohort": size, **found})
    if sizes:
        lines = []
        for size in sizes:
            of_size = [r for r in rounds if r["cohort"] == size]
            per_client = [1000 * r["round"] / size for r in of_size]
            memory = [spread([r[key] for r in of_size], 0) for key in ("memory", "memory of a worker")]
            lines.append([f"{size:,}", spread([r["round"] for r in of_size]), spread(per_client), *memory])
        head = ["cohort out of 1,000,000", "seconds a round", "ms per client", "MiB of the server", "MiB of a worker"]
        text += (
            "\n" + table(head, lines) + "\ntiny-mlp, 20 examples, two workers, side by side; target: 10,000 in 6 s.\n"
        )
    publish(options.name, text, {"measured": measured, "rounds": rounds})


if __name__ == "__main__":
    main()
