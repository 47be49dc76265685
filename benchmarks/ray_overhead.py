"""What Ray adds to a round: its tasks against worker processes, both without training.

usage: python benchmarks/ray_overhead.py [--rounds 15] [--workers 2]

Ten clients of the five sizes of a full-width ResNet26 take the server's weights, load them into their models, do not
train, and upload; the server averages and applies InCo. What is left of a round is what an executor is there for:
publishing 68 MB of weights, handing out turns, taking in 492 MB of uploads. Both executors are alive all the time and
play their rounds in turn, as does a loop in this process; the ratio is taken within each turn. The first rounds touch
memory for the first time, and are left out.
"""

import argparse
import dataclasses
from dataclasses import dataclass

import torch
from measure import publish, seconds, spread, table

from incofl.client import ClientRule, Local
from incofl.config import load_config
from incofl.engine.build import build
from incofl.engine.executor import Executor, InProcess
from incofl.engine.federation import Federation
from incofl.engine.processes import WorkerProcesses
from incofl.engine.ray_tasks import Connection, RayTasks
from incofl.engine.round import RoundStats, run_round
from incofl.engine.worker import keep_freed_memory
from incofl.server import Server
from incofl.tensors import Tensors

WARM_UP = 3


@dataclass(frozen=True)
class Idle(ClientRule):
    """A client that says it has trained."""

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        """One step, so that its upload counts."""
        local.steps = 1
        return {}, {}


def idle_federation() -> Federation:
    """The paper's sizes at full width; each client has one example, which makes no whole batch."""
    overrides = ["data.name=digits", "model.stem=small", "data.clients=10", "cohort=10", "local.drop_last=true"]
    federation = build(load_config("paper-cifar10", overrides))
    method = dataclasses.replace(federation.method, client=Idle())
    return dataclasses.replace(federation, method=method, partition=[torch.tensor([i]) for i in range(10)])


class Rounds:
    """The rounds of one executor."""

    def __init__(self, federation: Federation, executor: Executor) -> None:
        self._federation, self.executor = federation, executor
        self.server = federation.start()

    def play(self) -> Server:
        """One more."""
        stats, f = RoundStats(), self._federation
        self.server = run_round(self.server, f.method, f.schedule(self.server.round, 10), self.executor, stats)
        assert not stats.rejected
        return self.server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    keep_freed_memory()
    federation = idle_federation()
    executors: dict[str, Executor] = {
        "this process": InProcess(federation),
        "worker processes": WorkerProcesses(federation, options.workers),
        "Ray": RayTasks(Connection(cores=options.workers), federation, options.workers),
    }
    played = {name: Rounds(federation, executor) for name, executor in executors.items()}
    measured: list[dict[str, float]] = []
    try:
        for _ in range(WARM_UP + options.rounds):
            measured.append({name: seconds(rounds.play) for name, rounds in played.items()})
            print({name: round(value, 3) for name, value in measured[-1].items()}, flush=True)
        first, *others = (rounds.server.shared for rounds in played.values())
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    finally:
        for executor in executors.values():
            executor.close()
    counted = measured[WARM_UP:]
    rows = [
        [name, spread([m[name] / m["worker processes"] for m in counted]), "at most 2.5" if "Ray" in name else ""]
        for name in executors
    ]
    text = table(["executor", "time of a round / that of worker processes", "target"], rows)
    text += (
        f"\n{options.rounds} rounds without training, ResNet26 at full width, 10 clients, {options.workers} workers.\n"
    )
    publish("ray-overhead", text, {"rounds": options.rounds, "workers": options.workers, "seconds": measured})


if __name__ == "__main__":
    main()
