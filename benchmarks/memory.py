"""What `incofl plan` estimates of a client's memory, against what a client's turn takes.

usage: python benchmarks/memory.py [--rows NAME,...] [--repeat 3]

A turn of two steps on noise is made in a new process: after a short turn of another worker, so that what the framework
allocates once is there, the growth of the process's resident memory from before the sub-model is built to its peak
(VmHWM). What the client receives is copied into the process within that time, as over a network; frozen weights are
read where they are. Once as on a node that names its memory, which returns freed blocks to the system, and once with
glibc as it is, which keeps them and the gaps between them. What is estimated has no framework in it, so the models are
large enough for tens of megabytes.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
from measure import publish, spread, table

from incofl.config import Config, make_config
from incofl.data import Data
from incofl.engine.build import build
from incofl.engine.federation import Federation, Job
from incofl.engine.worker import Worker, return_freed_memory
from incofl.tensors import clone

TEXT = ["model.name=text-transformer", "local.batch_size=64"]
VIT = ["model.name=vit-tiny", "model.patch=4", "local.batch_size=64"]
RANKS = "split.levels=[2,16]"
# What a row is called, the shape of its inputs, what differs from the default config, and its levels.
ROWS: dict[str, tuple[str, tuple[int, ...], list[str], tuple[int, ...]]] = {
    "lora-text": ("text transformer, LoRA, ranks 2 and 16", (64,), [*TEXT, "method=covered", RANKS], (0, 1)),
    "lora-vit": ("ViT-Ti, LoRA, ranks 2 and 16", (3, 32, 32), [*VIT, "method=covered", RANKS], (0, 1)),
    "lora-flora": ("ViT-Ti, LoRA with changing weights, rank 16", (3, 32, 32), [*VIT, "method=flora", RANKS], (1,)),
    "lora-random": ("ViT-Ti, random ranks, rank 2", (3, 32, 32), [*VIT, "method=random-ranks", RANKS], (0,)),
    "text": ("text transformer, smallest and largest of 5", (64,), [*TEXT, "method=heteroavg"], (0, 4)),
    "vit": ("ViT-Ti, smallest and largest of 5", (3, 32, 32), [*VIT, "method=heteroavg"], (0, 4)),
    "resnet": ("ResNet26, full width", (3, 32, 32), ["model.name=resnet26", "method=heteroavg"], (0, 4)),
}
VOCABULARY, SHORT = 8192, 2
RETURNED, KEPT = "returned", "kept"
HEAD = ["model", "level", "estimated", "measured", "estimated / measured", "with glibc as it is"]


def federation_of(row: str) -> tuple[Config, Federation]:
    """One client per level with two batches of noise."""
    _, shape, keys, levels = ROWS[row]
    text = len(shape) == 1
    count = 128 * (1 + max(levels))
    x = torch.randint(2, VOCABULARY, (count, *shape)) if text else torch.rand(count, *shape)
    data = Data((x, torch.arange(count) % 2), classes=2, vocabulary=VOCABULARY if text else 0)
    more = ["data.partition=iid", f"data.clients={1 + max(levels)}", "cohort=1", "local.epochs=1", *keys]
    config = make_config(None, more, data=data)
    return config, build(config)


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def turn(federation: Federation, level: int, examples: int | None = None) -> None:
    """A client's turn with what it received, perhaps with a few of its examples only."""
    partition = [own[:examples] for own in federation.partition]
    f, job = dataclasses.replace(federation, partition=partition), Job(level, level, 0)  # client k has level k
    server, piece = f.start(), f.slice(level, 0, level)
    server = dataclasses.replace(server, population=f.population)
    extra = piece.look(f.method.server.extra_for_client(server, level))
    received = piece.look(server.state(level))
    sent = clone({name: value for name, value in received.items() if name not in f.model.layout.frozen})
    Worker(f).turn(job, {**received, **sent}, clone(extra))


def measure(row: str, level: int, returned: bool) -> dict[str, int]:
    """Estimated and measured bytes of a turn, where freed blocks are returned or not."""
    if returned:
        return_freed_memory()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    _, federation = federation_of(row)
    turn(federation, level, SHORT)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    turn(federation, level)
    measured = resident("VmHWM") - before  # before the estimate, which may compute a batch itself
    return {"estimated": federation.costs[level].memory, "measured": measured}


def run(row: str, level: int, allocator: str) -> dict[str, int]:
    """The same in a new process."""
    command = [sys.executable, __file__, "--one", row, str(level), allocator]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--one", nargs=3, metavar=("ROW", "LEVEL", "ALLOCATOR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row, level, allocator = options.one
        print(json.dumps(measure(row, int(level), allocator == RETURNED)))
        return
    lines, measured = [], {}
    for row in options.rows.split(","):
        for level in ROWS[row][3]:
            found = {each: [run(row, level, each) for _ in range(options.repeat)] for each in (RETURNED, KEPT)}
            measured[f"{row}, level {level}"] = found
            ratios = [spread([one["estimated"] / one["measured"] for one in ones]) for ones in found.values()]
            sizes = [one["measured"] / 1e6 for one in found[RETURNED]]
            estimated = f"{found[KEPT][0]['estimated'] / 1e6:.0f} MB"
            lines.append([ROWS[row][0], str(level), estimated, f"{spread(sizes, 0)} MB", *ratios])
            publish("memory", table(HEAD, lines), {"bytes": measured})  # what is there so far


if __name__ == "__main__":
    main()
