"""The table of arms of the study of all methods, with as many rounds of each as one budget of compute allows.

usage: python experiments/field/budget.py

Writes table.toml, and costs.csv with what each method costs a client.

A round costs, on average over cohorts, as many multiply-accumulates as its clients compute: the number of clients that
take part, times the mean of the MACs of the levels that they train, as ``incofl plan`` counts them (exits, the smallest
path of FedFloor, the widths of FjORD, MOON's other models; InCo is the server's and costs clients nothing). All clients
see the same number of examples on average, and a step costs three forward passes in all methods, so both cancel. The
budget of a column is what HeteroAvg spends in ``ROUNDS`` rounds; for both columns of ResNets, with levels of depth.
"""

import csv
import functools
import math
from pathlib import Path
from typing import Any

import tomli_w

from incofl.config import make_config
from incofl.engine.build import outline
from incofl.engine.federation import Federation

TABLE = Path(__file__).parent / "table.toml"
COSTS = Path(__file__).parent / "costs.csv"
ROUNDS = 20  # of HeteroAvg
EVALUATIONS = 6
BASELINES = ["allsmall", "largestonly", "fedavg"]
FAMILIES = ["avg", "prox", "nova", "scaffold", "moon", "dyn", "bn", "avgm", "adam", "yogi"]
BY_SIZE = ["fedprox", "fednova", "scaffold", "moon", "feddyn", "fedbn", "fedavgm", "fedadam", "fedyogi"]


def both(*names: str) -> list[str]:
    """Methods without and with InCo."""
    return [form for name in names for form in (name, f"{name}+inco")]


RESNET = ["model.name=resnet26", "model.width=0.125", "model.stem=small"]
VIT = ["model.name=vit-s", "model.dim=48", "model.heads=3", "model.depth=10", "model.patch=3"]
COLUMNS = {
    "levels of depth": RESNET,
    "levels of width": [*RESNET, "split.kind=hetero", "split.levels=[0.5,0.625,0.75,0.875,1.0]"],
    "ViT, levels of depth": VIT,
}
ARMS = {
    "levels of depth": [
        *BASELINES,
        "alllarge",
        *BY_SIZE,
        *(f"{form}{family}" for family in FAMILIES for form in ("hetero", "inco")),
        *both("fedfloor", "inclusivefl", "nefl", "depthfl"),
    ],
    "levels of width": [
        *BASELINES,
        *("heteroavg", "incoavg"),
        *both("heterofl", "fedrolex", "fedrand", "fedecover", "fiarse", "fjord", "nefl", "scalefl"),
    ],
    "ViT, levels of depth": [
        *BASELINES,
        *("heteroavg", "incoavg"),
        *both("fedfloor", "inclusivefl", "nefl", "depthfl", "reefl"),
    ],
}
# What a method says differently from its column: ScaleFL's levels are narrower and shallower, FIARSE's are shares of
# the entries and not of the channels.
OWN = {"scalefl": ["split.levels=5"], "fiarse": ["split.levels=[0.25,0.39,0.5625,0.766,1.0]"]}
BASE: dict[str, Any] = {
    "cohort": 5,
    "data": {
        "name": "fashion-mnist",
        "partition": "dirichlet",
        "alpha": 0.5,
        "clients": 20,
        "limit": 1500,
        "side": 9,
    },
    "local": {"epochs": 1, "batch_size": 16},
    "aggregate": {"weighting": "uniform"},
    "eval": {"limit": 1000, "measured": 500, "best_path": False},
}


def keys(column: str, method: str) -> list[str]:
    return [*COLUMNS[column], f"method={method}", *OWN.get(method.removesuffix("+inco"), [])]


@functools.cache
def planned(column: str, method: str) -> Federation:
    return outline(make_config(BASE, keys(column, method)))


def of_a_round(column: str, method: str) -> float:
    """The multiply-accumulates of the cohort of a round, for one example of each client, forward."""
    federation, cohort = planned(column, method), int(BASE["cohort"])
    held = [federation.levels[client] for client in range(len(federation.levels))]
    trained = [level for level in map(federation.trained, held) if level is not None]
    mean = sum(federation.costs[level].macs for level in trained) / len(trained)
    return min(cohort, len(trained)) * mean


def costs() -> list[dict[str, Any]]:
    """What each method costs a client of each level, and what its statistics are, as ``incofl plan`` has it."""
    found = []
    for column, methods in ARMS.items():
        for method in dict.fromkeys(map(plain, methods)):
            federation = planned(column, method)
            keeps = bool(federation.method.client.memory(federation.model.layout))
            names = {"column": column, "method": method, "statistics": federation.method.server.buffers, "keeps": keeps}
            for name, held in (("smallest", 0), ("largest", len(federation.costs) - 1)):
                if (level := federation.trained(held)) is not None:
                    cost = federation.costs[level]
                    sizes = {"bytes": cost.bytes_down + cost.bytes_up, "memory": cost.memory, "macs": cost.macs}
                    found.append({**names, "level": name, **sizes})
    return found


def plain(method: str) -> str:
    """The method without InCo."""
    return method.removesuffix("+inco").replace("inco", "hetero", method.startswith("inco"))


def rows(column: str) -> list[dict[str, Any]]:
    """The arms of a column with their rounds."""
    base = "levels of depth" if COLUMNS[column][0] == RESNET[0] else column
    budget = ROUNDS * of_a_round(base, "heteroavg")
    found = []
    for method in ARMS[column]:
        own = keys(column, method)
        rounds = max(1, round(budget / of_a_round(column, plain(method))))
        times = [f"rounds={rounds}", f"eval.every={math.ceil(rounds / EVALUATIONS)}"]
        found.append({"name": method, "set": [*own[len(COLUMNS[column]) :], *times]})
    return found


def table() -> str:
    """The file of the study."""
    images = "1,500 training and 1,000 test images of Fashion-MNIST, 9 x 9 pixels"
    fleet = "20 clients in five equal groups, Dirichlet 0.5, 5 clients a round, an epoch in batches of 16"
    document = {
        "title": "Every method with and without InCo, one protocol, one budget of client compute",
        "summary": f"{images}; {fleet}; as many multiply-accumulates of clients as HeteroAvg has in {ROUNDS} rounds.",
        "seeds": [300, 305],
        "reference": "heteroavg",
        "baselines": BASELINES,
        "columns": COLUMNS,
        "base": BASE,
        "sections": [{"name": c, "base": "fleet", "columns": [c], "rows": rows(c)} for c in COLUMNS],
    }
    head = "# Made by experiments/field/budget.py, which says how rounds follow from the budget (PROTOCOL.md).\n"
    return head + tomli_w.dumps(document)


if __name__ == "__main__":
    TABLE.write_text(table())
    with COSTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(costs()[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(costs())
