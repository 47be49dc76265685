"""How much of the machine a run uses: bare local training steps on W processes against a run with W workers.

usage: python benchmarks/efficiency.py [--root DIR] [--workers 2] [--rounds N] [--rows quarter,full] [--name NAME]

The bare processes train the same clients with the same optimised step on the same batches, augmentation included, with
no federation around them: no slices, uploads, aggregation, records or checkpoints. A run pauses after each of its
rounds while the bare processes train the cohort of that round; the first round, in which workers start, is left out.
The federation is the paper's: 100 clients, a cohort of 10, 5 epochs, batches of 64, on CIFAR-10 from DIR, or without it
on noise of CIFAR-10's shape: what a step costs does not depend on what the images show. The other models (--rows
vit,lstm,transformer --name efficiency-models) and adapters (--rows lora,lora-svd --name efficiency-lora) train one or
two epochs; texts are always noise.
"""

import argparse
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measure import publish, spread, table
from torch import nn
from torch.nn import functional

import incofl
from incofl.config import Config
from incofl.data.pipeline import local_batches
from incofl.engine.build import build
from incofl.engine.federation import Federation, Job
from incofl.engine.progress import Progress
from incofl.engine.run_folder import Row
from incofl.engine.worker import keep_freed_memory, worker_environment
from incofl.path import image_format
from incofl.seeds import Purpose, torch_rng
from incofl.split import submodel

_RANKS = ["split.levels=[2,4,8,12,16]"]
_SMALL_VIT = ["model.name=vit-tiny", "model.dim=64", "model.heads=1", "model.patch=8"]

# A model family is one more row: what it is called, the preset, what differs from it, rounds to measure, the target.
ROWS = {
    "quarter": ("ResNet26, quarter width", "paper-cifar10", ["model.width=0.25"], 12, "at least 0.92"),
    "full": ("ResNet26, full width", "paper-cifar10", [], 4, "at least 0.95"),
    "vit": ("ViT of 12 blocks, width 64", "paper-vit-cifar10", [*_SMALL_VIT, "local.epochs=1"], 6, "none"),
    "lstm": ("4 LSTM layers, width 128", "shakespeare", ["method=incoavg"], 6, "none"),
    "transformer": ("text transformer, 6 blocks, width 128", "sst2", ["method=incoavg"], 6, "none"),
    "lora": ("the same, LoRA of ranks 2 to 16, covered", "sst2", [*_RANKS, "method=covered"], 6, "at least 0.9"),
    "lora-svd": ("the same, LoRA of ranks 2 to 16, flexlora", "sst2", [*_RANKS, "method=flexlora"], 6, "at least 0.9"),
}
TEXTS = ("lstm", "transformer", "lora", "lora-svd")


class Bare:
    """One of the bare processes: models and data, and nothing else."""

    federation: Federation
    models: dict[int, nn.Module]

    @classmethod
    def start(cls, config: dict[str, Any]) -> None:
        """Everything that a client needs, built before the clock starts."""
        torch.set_num_threads(1)
        keep_freed_memory()
        f = cls.federation = build(incofl.make_config(config))
        cls.models = {}
        for level in f.levels_in_use:
            piece = f.slice(level, 0)
            model = submodel(f.model.template, f.model.layout, piece)
            cls.models[level] = model.to(memory_format=image_format(model))  # type: ignore[call-overload]
            cls.models[level].load_state_dict(piece.take(f.model.initial))

    @classmethod
    def train(cls, job: Job) -> float:
        """The local steps of one client."""
        start, f, model = perf_counter(), cls.federation, cls.models[job.level]
        model.train()
        optimizer = f.local.make_optimizer(p for p in model.parameters() if p.requires_grad)
        rng = torch_rng(f.seed, Purpose.TRAINING, job.round, job.client)
        for x, y in local_batches(f.data.train, f.partition[job.client], f.data.pipeline, f.local, rng):
            if x.dim() == 4:
                x = x.to(memory_format=image_format(model))
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return perf_counter() - start


class Enough(Exception):
    """All rounds are measured."""


class Comparison(Progress):
    """Watches a run, and lets the bare processes train after each of its rounds what it has just trained."""

    def __init__(self, config: Config, workers: int, rounds: int) -> None:
        os.environ.update(worker_environment())
        self._pool = ProcessPoolExecutor(workers, get_context("spawn"), Bare.start, (config.to_dict(),))
        self._cohort, self._workers, self._rounds = config.cohort_size, workers, rounds
        self.measured: list[dict[str, float]] = []

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """The clock starts."""
        self._federation = federation
        self._resumed = perf_counter()

    def finished_round(self, row: Row) -> None:
        """The run has taken its time for the round; now the bare processes take theirs."""
        run = perf_counter() - self._resumed
        bare, busy = self._bare(row["round"] - 1)
        if row["round"] > 1:
            self.measured.append({"run": run, "bare": bare, "bare, ideally balanced": busy / self._workers})
            print(f"  round {row['round']}: run {run:.2f} s, bare {bare:.2f} s, ratio {bare / run:.3f}", flush=True)
        if len(self.measured) == self._rounds:
            self._pool.shutdown()
            raise Enough
        self._resumed = perf_counter()

    def _bare(self, round: int) -> tuple[float, float]:
        """The seconds until the last process has finished a cohort, and the sum of those of all clients."""
        jobs = self._federation.schedule(round, self._cohort)
        start = perf_counter()
        busy = sum(self._pool.map(Bare.train, jobs))  # the next client goes to whoever is free
        return perf_counter() - start, busy


def noisy_texts(root: Path) -> None:
    """A play of 120 roles and sentences of two classes."""
    rng = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(rng.choice(["to", "be", "or", "not", "that", "is", "the", "question"], count))

    blocks = [f"Role {role}:\n{words(1200)}" for role in range(120)]
    (root / "tinyshakespeare.txt").write_text("\n\n".join(blocks) + "\n")
    (root / "sst2").mkdir()
    for name, count in (("train", 60_000), ("dev", 800)):
        rows = [f"{words(9)}\t{number % 2}" for number in range(count)]
        (root / "sst2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")


def noise(root: Path) -> None:
    """Files like CIFAR-10's."""
    folder, rng = root / "cifar-10-batches-bin", np.random.default_rng(0)
    folder.mkdir()
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        records = rng.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder that holds cifar-10-batches-bin")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="measured rounds of each row, instead of its own")
    parser.add_argument("--rows", default="quarter,full", help=", ".join(ROWS))
    parser.add_argument("--name", default="efficiency", help="of the results")
    options = parser.parse_args()

    lines, measured = [], {}
    with tempfile.TemporaryDirectory() as folder:
        if options.root is None:
            noise(Path(folder))
        noisy_texts(Path(folder))
        for row in options.rows.split(","):
            name, preset, overrides, measurements, target = ROWS[row]
            measurements = options.rounds or measurements
            print(name, flush=True)
            rounds = measurements + 2  # the first starts the workers, the last would be evaluated
            root = folder if row in TEXTS else options.root or folder
            more = [f"data.root={root!r}", f"rounds={rounds}", f"eval.every={rounds}"]
            config = incofl.load_config(preset, [*overrides, *more, f"engine.workers={options.workers}"])
            comparison = Comparison(config, options.workers, measurements)
            try:
                incofl.run(config, Path(folder) / row, progress=comparison)
            except Enough:
                measured[row] = comparison.measured
            efficiency = [m["bare"] / m["run"] for m in measured[row]]
            balance = [m["bare, ideally balanced"] / m["run"] for m in measured[row]]
            lines.append([name, str(measurements), spread(efficiency, 3), target, spread(balance, 3)])
    head = ["model", "rounds", "bare / run", "target", "bare, ideally balanced / run"]
    data = "images: CIFAR-10" if options.root else "images: noise of CIFAR-10's shape"
    data += "; texts: noise" if set(options.rows.split(",")) & set(TEXTS) else ""
    text = table(head, lines) + f"\n{options.workers} workers, {data}.\n"
    publish(options.name, text, {"data": data, "workers": options.workers, "seconds": measured})


if __name__ == "__main__":
    main()
