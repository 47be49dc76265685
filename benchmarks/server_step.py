"""The server step against the memory bandwidth: covered mean and InCo of ten uploads of the ResNet26 family.

usage: python benchmarks/server_step.py [--repeats 5]

Prints the ratio of its time to one pass over the same bytes (reading every upload once), both measured in this run.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from incofl.inco import InCo
from incofl.method import ServerRule, Upload
from incofl.models import make_model
from incofl.server import Server
from incofl.split import make_splitter


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats

    model = make_model("resnet26")
    splitter = make_splitter(model.layout, "stage", 5)
    server, rule, inco = Server(model.layout, model.initial), ServerRule(), InCo()
    uploads = []
    for client in range(10):
        piece = splitter.slice(model.layout, client % 5, 0)
        part = piece.take(model.initial)
        update = {name: value * 1e-3 for name, value in part.items() if name in model.layout.parameters}
        buffers = {name: value for name, value in part.items() if name in model.layout.buffers}
        uploads.append(Upload(client, client % 5, piece, update, buffers, 500, 1, 0.0))

    def step() -> Server:
        changes = rule.aggregate(server, uploads)
        update, _ = inco(changes.update, model.layout)
        return server.advance(changes.with_update(update))

    def one_pass() -> float:
        return sum(float(value.sum()) for upload in uploads for value in upload.update.values())

    ratios = [seconds(step) / seconds(one_pass) for _ in range(repeats + 1)][1:]  # the first warms up
    print(
        f"server step / one pass over the uploads: {statistics.mean(ratios):.1f} "
        f"(spread {min(ratios):.1f} to {max(ratios):.1f}, {repeats} repeats, {torch.get_num_threads()} threads)"
    )


if __name__ == "__main__":
    main()
