"""How much faster a training step is in bf16, on a processor with units for it.

usage: python benchmarks/precision.py [--widths 0.25,0.5,1] [--levels 0,4] [--repeats 10]

One core, four steps of batches of 64 of CIFAR-10's shape in float32 and in bf16 (engine.precision), in turn. What it
does to accuracy: incofl reproduce inco --part experiments/precision/table.toml.
"""

import argparse
import functools
from contextlib import nullcontext

import torch
from measure import publish, seconds, spread, table

from incofl.client import ClientInput, ClientRule, Computing, LocalSettings, Trainee, train
from incofl.engine.worker import keep_freed_memory
from incofl.models import ModelOptions, make_model
from incofl.split import make_splitter, submodel
from incofl.task import CLASSIFICATION


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="0.25,0.5,1")
    parser.add_argument("--levels", default="0,4")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    bf16: Computing = functools.partial(torch.autocast, "cpu", torch.bfloat16)

    lines, measured = [], []
    x = torch.randn(64, 3, 32, 32).to(memory_format=torch.channels_last)
    batches = [(x, torch.randint(10, (64,)))] * 4
    for width in map(float, options.widths.split(",")):
        model = make_model("resnet26", ModelOptions(width=width))
        splitter = make_splitter(model.layout, "stage", 5)
        for level in map(int, options.levels.split(",")):
            slice_ = splitter.slice(model.layout, level, 0)
            given = ClientInput(slice_.take(model.initial))
            module = submodel(model.template, model.layout, slice_)
            trainee = Trainee(module.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
            turn = functools.partial(
                train, trainee, given, batches, ClientRule(), LocalSettings(), CLASSIFICATION, None
            )
            pairs = [
                (seconds(functools.partial(turn, nullcontext)), seconds(functools.partial(turn, bf16)))
                for _ in range(1 + options.repeats)
            ][1:]  # the first is not counted
            lines.append([f"{width:g}", str(level), spread([a / b for a, b in pairs])])
            measured.append({"width": width, "level": level, "seconds": pairs})
            print(lines[-1], flush=True)
    publish("precision", table(["width", "level", "float32 / bf16"], lines), {"measured": measured})


if __name__ == "__main__":
    main()
