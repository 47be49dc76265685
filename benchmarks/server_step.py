"""The server step against the memory bandwidth: covered mean and InCo of ten uploads of the ResNet26 family.

usage: python benchmarks/server_step.py [--repeats 15]

One pass is a sum over all elements of the ten uploads: nothing that looks at every upload can be faster. The step is
everything the server does with them: covered mean, InCo, and the new server model. What validation of the uploads and
of the result takes in addition is measured by itself, and so is a clipped or trimmed mean in place of the mean.
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from measure import publish, seconds, spread, table

from incofl.client import ClientInput, ClientRule, LocalSettings, Upload, train
from incofl.engine.round import RoundStats
from incofl.engine.worker import keep_freed_memory, one_thread
from incofl.inco import InCo
from incofl.mean import Mean
from incofl.method import ServerRule
from incofl.methods.clipping import Clipping
from incofl.methods.trimmed import Trimmed
from incofl.models import make_model
from incofl.server import Server
from incofl.split import make_splitter, submodel
from incofl.tensors import num_bytes

LEVELS, PER_LEVEL = 5, 2
STEPS = 5 * 8  # of a client in a round of the paper's federation: 500 examples, batches of 64, 5 epochs
MEANS: dict[str, Mean] = {"clipped": Clipping(), "trimmed": Trimmed()}


class Step:
    """Ten uploads, two of each level, the largest first as in a schedule, and what the server does with them."""

    def __init__(self) -> None:
        self.model = make_model("resnet26")
        self.splitter = make_splitter(self.model.layout, "stage", LEVELS)
        self.server = Server(self.model.layout, self.model.initial)
        self.slices = [self.splitter.slice(self.model.layout, level, 0) for level in range(LEVELS)]
        self.uploads = [self._upload(level) for level in reversed(range(LEVELS)) for _ in range(PER_LEVEL)]
        self.rule, self.inco = ServerRule(), InCo()

    def _upload(self, level: int) -> Upload:
        part = self.slices[level].take(self.model.initial)
        update = {name: value * 1e-3 for name, value in part.items() if name in self.model.layout.parameters}
        buffers = {name: value for name, value in part.items() if name in self.model.layout.buffers}
        return Upload(level, level, self.slices[level], update, buffers, 500, 1, 0.0)

    def __call__(self, arrivals: Iterable[Sequence[Upload]], mean: Mean | None = None) -> Server:
        """One server step, by the plain mean or another."""
        changes = dataclasses.replace(self.rule, mean=mean or self.rule.mean).aggregate(self.server, arrivals)
        changes, _ = changes.transformed(self.inco, self.server)
        return self.server.advance(changes)

    def validated(self, arrivals: Sequence[Sequence[Upload]]) -> Server:
        """One server step that believes no upload before it has looked at it, nor its own result."""
        stats = RoundStats()
        return stats.kept(self.server, self(stats.validated(iter(arrivals), self.server)))

    def one_pass(self) -> float:
        """What nothing that looks at every element can beat."""
        return sum(float(value.sum()) for upload in self.uploads for value in upload.update.values())

    def training(self) -> float:
        """Seconds of the local training of these ten clients, on all cores, from two batches of each level."""
        total = 0.0
        x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
        batches = [(x.to(memory_format=torch.channels_last), y)] * 2
        for level, piece in enumerate(self.slices):
            module = submodel(self.model.template, self.model.layout, piece).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            received = piece.take(self.server.state(level))
            turn = functools.partial(train, module, ClientInput(received), batches, ClientRule(), LocalSettings())
            with one_thread():
                turn()
                total += PER_LEVEL * STEPS * seconds(turn) / len(batches)
        return total / len(os.sched_getaffinity(0))


def peak_memory(step: Step, cohort: int) -> float:
    """The memory that a step needs besides the server and the uploads, in server models."""
    arrivals = ([step.uploads[i * len(step.uploads) // cohort]] for i in range(cohort))
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    step(arrivals)
    return (_status("VmHWM") - before) / num_bytes(step.server.shared)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats

    step = Step()
    memory = {cohort: peak_memory(step, cohort) for cohort in (10, 100)}
    keep_freed_memory()
    together, one_by_one = [step.uploads], [[upload] for upload in step.uploads]
    for _ in range(3):
        step(together)
    measured = [
        {"one pass": seconds(step.one_pass), **{key: seconds(functools.partial(step, a)) for key, a in ways}}
        | {"validated": seconds(functools.partial(step.validated, one_by_one))}
        | {name: seconds(functools.partial(step, one_by_one, mean)) for name, mean in MEANS.items()}
        for ways in [(("together", together), ("one by one", one_by_one))] * repeats
    ]
    training = step.training()
    ratios = {key: [m[key] / m["one pass"] for m in measured] for key in ("together", "one by one")}
    share = [100 * m["one by one"] / training for m in measured]
    added = {key: [100 * (m[key] - m["one by one"]) / training for m in measured] for key in ("validated", *MEANS)}
    rows = [
        ["ten uploads that are there together, against one pass", spread(ratios["together"]), "at most 2.5"],
        ["the same, arriving one by one", spread(ratios["one by one"]), ""],
        ["share of a full-width round, in percent", spread(share), "at most 1"],
        ["validation of uploads and result, in addition", spread(added["validated"]), "at most 2"],
        ["a clipped mean, in addition", spread(added["clipped"]), "at most 2"],
        ["a trimmed mean, in addition", spread(added["trimmed"]), "at most 10"],
        *([f"extra memory, cohort of {c}, in server models", f"{m:.2f}", "at most 2"] for c, m in memory.items()),
    ]
    threads = f"\nOne pass over {num_bytes_of(step) / 1e6:.0f} MB; {torch.get_num_threads()} threads.\n"
    results = {"seconds": measured, "training seconds": training, "memory": memory}
    publish("server-step", table(["server step", "measured", "target"], rows) + threads, results)


def num_bytes_of(step: Step) -> int:
    return sum(num_bytes(upload.update) for upload in step.uploads)


if __name__ == "__main__":
    main()
