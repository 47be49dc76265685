"""What torch.compile gains in a training step, what it costs, and after how many rounds it pays.

usage: python benchmarks/compile.py [--widths 0.25,1] [--levels 0,4] [--repeats 20]

One core, batches of 64 of CIFAR-10's shape. A round here is the paper's: every worker trains each of the five levels
once (ten clients, two workers), 40 steps each; compiled once per level at the start of every worker.
"""

import argparse
import functools
import statistics

import torch
from measure import publish, seconds, spread, table
from torch import nn

from incofl.client import Batch, ClientInput, ClientRule, LocalSettings, train
from incofl.engine.worker import keep_freed_memory
from incofl.models import ModelOptions, make_model
from incofl.split import make_splitter, submodel
from incofl.tensors import Tensors

STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="0.25,1")
    parser.add_argument("--levels", default="0,4")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()

    lines, measured = [], []
    for width in map(float, options.widths.split(",")):
        model = make_model("resnet26", ModelOptions(width=width))
        splitter = make_splitter(model.layout, "stage", 5)
        for level in map(int, options.levels.split(",")):
            piece = splitter.slice(model.layout, level, 0)
            received = piece.take(model.initial)
            x = torch.randn(64, 3, 32, 32).to(memory_format=torch.channels_last)
            batch = [(x, torch.randint(10, (64,)))] * 4

            def turn(module: nn.Module, received: Tensors = received, batch: list[Batch] = batch) -> None:
                train(module, ClientInput(received), batch, ClientRule(), LocalSettings())

            eager, compiled = (submodel(model.template, model.layout, piece) for _ in range(2))
            for module in (eager, compiled):
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            compiled.compile()
            turn(eager)
            cost = seconds(functools.partial(turn, compiled))
            pairs = [
                (seconds(functools.partial(turn, eager)) / 4, seconds(functools.partial(turn, compiled)) / 4)
                for _ in range(options.repeats)
            ]
            gain = statistics.median(a - b for a, b in pairs)
            rounds = f"{cost / (gain * STEPS):.0f}" if gain > 0 else "never"
            ratios = [a / b for a, b in pairs]
            lines.append([f"{width:g}", str(level), spread(ratios), f"{cost:.0f}", rounds])
            measured.append({"width": width, "level": level, "compile": cost, "steps": pairs})
            print(lines[-1], flush=True)
    head = ["width", "level", "eager / compiled", "seconds to compile", "rounds until it pays"]
    publish("compile", table(head, lines), {"measured": measured})


if __name__ == "__main__":
    main()
