"""Where clients' turns are computed. An executor decides place and time, never the result."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from incofl.client import Score, evaluate, train
from incofl.data import eval_batches, local_batches
from incofl.engine.federation import Federation, Job
from incofl.engine.seeds import Purpose, torch_rng
from incofl.method import Upload
from incofl.server import Server
from incofl.split import submodel


class Executor(Protocol):
    """The seam between a round and the processes that compute it."""

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Upload]:
        """The uploads of the jobs, lazily and in the order of the jobs."""
        ...

    def evaluate(self, server: Server, levels: Sequence[int]) -> list[Score]:
        """The score of each level's sub-model on the test set."""
        ...


class Worker:
    """Computes single turns. Sub-models are built once per level and used again."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._modules: dict[int, nn.Module] = {}

    def train(self, server: Server, job: Job) -> Upload:
        """One client's turn: cut its slice out of the server, train, send back the difference."""
        f = self._federation
        piece = f.slice(job.level, job.round)
        received = {name: value.to(f.device) for name, value in piece.take(server.state(job.level)).items()}
        indices = f.partition[job.client]
        rng = torch_rng(f.seed, Purpose.TRAINING, job.round, job.client)
        batches = local_batches(f.data.train, indices, f.data.pipeline, f.local, rng)
        on_device = ((x.to(f.device), y.to(f.device)) for x, y in batches)
        with one_thread():
            trained = train(self._module(job), received, on_device, f.method.client, f.local)
        return Upload(
            client=job.client,
            level=job.level,
            slice=piece,
            update={name: value.cpu() for name, value in trained.update.items()},
            buffers={name: value.cpu() for name, value in trained.buffers.items()},
            examples=len(indices),
            steps=trained.steps,
            loss=trained.loss,
        )

    def evaluate(self, server: Server, level: int) -> Score:
        """The score of a level's sub-model on the whole test set."""
        f = self._federation
        job = Job(client=-1, level=level, round=server.round)
        state = f.slice(level, server.round).take(server.state(level))
        batches = ((x.to(f.device), y.to(f.device)) for x, y in eval_batches(f.data.test, f.data.pipeline))
        with one_thread():
            return evaluate(self._module(job), state, batches)

    def _module(self, job: Job) -> nn.Module:
        if job.level not in self._modules:
            f = self._federation
            module = submodel(f.model.template, f.model.layout, f.slice(job.level, job.round))
            self._modules[job.level] = module.to(f.device)
        return self._modules[job.level]


class InProcess:
    """Computes one turn after the other in this process."""

    def __init__(self, federation: Federation) -> None:
        self._worker = Worker(federation)

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Upload]:
        """The uploads of the jobs, each computed when it is asked for."""
        for job in jobs:
            yield self._worker.train(server, job)

    def evaluate(self, server: Server, levels: Sequence[int]) -> list[Score]:
        """The score of each level's sub-model on the test set."""
        return [self._worker.evaluate(server, level) for level in levels]


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of floats depend on how they are divided over threads; with one thread a turn is the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
