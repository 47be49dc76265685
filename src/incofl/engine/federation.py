"""A federation: everything about a run that does not change from round to round."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from incofl.client import LocalSettings, Setting, Upload
from incofl.costs import Cost, costs, forward_work, work
from incofl.data import Data
from incofl.data.partition import VirtualPartition
from incofl.errors import ConfigError
from incofl.method import Method
from incofl.models import Model
from incofl.seeds import Purpose, numpy_rng
from incofl.server import Server
from incofl.split import COUNTS, Drawn, Slice, Splitter, end_at, submodel
from incofl.split.growth import Growth
from incofl.task import CLASSIFICATION, Task


@dataclass(frozen=True)
class Job:
    """One client's turn in one round."""

    client: int
    level: int
    round: int
    drawn: Drawn = ()  # what the splitter has drawn for it

    def __str__(self) -> str:
        return f"client {self.client}, level {self.level}"


class ClientLevels:
    """The level of each client, of so many levels."""

    def __init__(self, levels: ArrayLike, number: int) -> None:
        self._levels = np.asarray(levels, dtype=np.int16)
        self.counts: tuple[int, ...] = tuple(np.bincount(self._levels, minlength=number).tolist())

    @classmethod
    def grouped(cls, counts: Sequence[int]) -> "ClientLevels":
        """Levels of so many clients each: the first clients are the smallest."""
        return cls(np.repeat(np.arange(len(counts)), counts), len(counts))

    def __len__(self) -> int:
        return len(self._levels)

    def __getitem__(self, client: int) -> int:
        return int(self._levels[client])


@dataclass(frozen=True)
class Federation:
    """Model, method, task, data and clients of a run."""

    model: Model  # the server's
    splitter: Splitter
    method: Method
    data: Data
    partition: Sequence[Tensor]  # for each client the indices of its training examples
    levels: ClientLevels  # that the clients' resources allow
    task: Task = CLASSIFICATION
    local: LocalSettings = field(default_factory=LocalSettings)
    seed: int = 0  # of every random stream
    device: str = "cpu"
    compile: bool = False  # whether clients train compiled models
    precision: str = "float32"  # of forward passes and losses; or ``bf16``
    vectorise: bool | str = False  # whether clients of a level train side by side; ``auto``: where it is faster
    vectorise_clients: int = 64  # how many at a time
    best_path: bool = False  # whether what devices get with the best of the models that they can hold is recorded
    measured: int = 5000  # number of training examples on which static batch-norm statistics are measured
    open: bool = False  # whether clients may still come to levels that have none: then all levels are in use
    growth: Growth | None = None  # when larger levels open; None: from the start
    top: int | None = None  # the largest level that is open now; None: all are
    notes: tuple[str, ...] = ()  # what a user should know of how it was built

    @cached_property
    def forward_work(self) -> list[int]:
        """The multiply-accumulates of one example of each level, whatever the method makes of it."""
        return forward_work(self.model, self.splitter)

    def turn(self, level: int) -> int:
        """The multiply-accumulates of one example in a turn, forward; further epochs leave out the smallest path."""
        anchor, each = self.method.anchor, work(self.forward_work, self.method)
        further = anchor.epochs(0, level) * (each[level] - each[0] // anchor.every)
        return each[level] * self.local.epochs + further

    @cached_property
    def costs(self) -> list[Cost]:
        """The resources that each level needs."""
        return costs(self.model, self.splitter, self.local, self.method)

    def computing(self) -> AbstractContextManager[Any]:
        """The context in which forward passes and losses are computed; parameters and updates stay as they are."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def check(self) -> None:
        """Refuses a model, a task or clients that the method cannot be used for."""
        buffers = self.method.server.buffers
        example = self.model.example(2)
        if self.method.server.mean.confidential and (self.open or (self.growth and self.growth.opens is None)):
            key, got = ("flower", "an open fleet") if self.open else ("split.grow", "'plateau'")
            want = f"expected what is known before the first round, with {self.method.name}"
            raise ConfigError(f"{key}: got {got}, {want}")
        self.method.check(Setting(self.model.template, example, self.model.layout, self.task, buffers, self.compile))

    def start(self) -> Server:
        """The server before the first round."""
        server = Server(self.model.layout, self.model.initial, population=self.population, seed=self.seed)
        return self.method.server.mean.start(self.method.server.start(server))

    @property
    def population(self) -> dict[int, tuple[Slice, int]]:
        """For each level that is trained now its slice in the first round and its number of clients."""
        counts = Counter[int]()
        for level in self.levels_in_use:
            counts[self.trained_as(level)] += self.clients_by_level[level]
        return {level: (self.slice(level, 0), count) for level, count in counts.items()}

    def with_clients(self, levels: ClientLevels, partition: Sequence[Tensor]) -> "Federation":
        """The same federation of other clients, without computing again what does not depend on them."""
        return self._changed(levels=levels, partition=partition)

    def after(self, rows: Sequence[Mapping[str, Any]]) -> "Federation":
        """The same federation with the levels that are open after some rounds."""
        return self if self.growth is None else self._changed(top=self.growth.top(rows))

    def opened(self, server: Server, before: int | None) -> Server:
        """The server when levels open that were closed before: each starts from what the next smaller one has."""
        private = dict(server.private)
        for level in range(1 + before, 1 + self.top) if before is not None and self.top is not None else ():
            if level - 1 in private:
                before_it = {name: value.clone() for name, value in private[level - 1].items()}
                private[level] = before_it | private.get(level, {})
        return dataclasses.replace(server, private=private)

    def _changed(self, **values: Any) -> "Federation":
        other = dataclasses.replace(self, **values)
        known = [name for name in ("costs", "forward_work", "_slices") if name in vars(self)]
        other.__dict__.update({name: vars(self)[name] for name in known})
        return other

    def trained_as(self, level: int) -> int:
        """The level whose sub-model the clients of a level have now: their own, or the largest that is open."""
        return level if self.top is None else min(level, self.top)

    def labels(self, client: int) -> Tensor | None:
        """Number of a client's examples of each class; ``None`` for tasks without classes."""
        if not self.task.classes or self.data.classes is None:
            return None
        if self._last_labels[0] != client:
            held = self.data.train.y[self.partition[client]].flatten()
            self._last_labels[:] = client, torch.bincount(held[held >= 0], minlength=self.data.classes)
        labels: Tensor = self._last_labels[1]
        return labels

    def num_examples(self, client: int) -> int:
        """Number of a client's examples; of a virtual one, without drawing them."""
        partition = self.partition
        return partition.examples if isinstance(partition, VirtualPartition) else len(partition[client])

    def identified(self, upload: Upload, job: Job) -> Upload:
        """The upload of a job, with what is known of its client."""
        slice_ = self.slice_of(job)
        return dataclasses.replace(
            upload,
            client=job.client,
            level=job.level,
            slice=slice_,
            update={name: value for name, value in upload.update.items() if name not in slice_.given},
            examples=self.num_examples(job.client),
            labels=self.labels(job.client),
        )

    def trained(self, held: int) -> int | None:
        """The level that a client trains under this method whose resources allow ``held``; ``None``: no part in it."""
        largest = len(self.splitter.depths) - 1
        only = largest if held == largest else None
        return {"own": held, "smallest": 0, "largest": largest, "largest-only": only}[self.method.level]

    def level_of(self, client: int) -> int:
        """The level that a client trains under this method, if it takes part."""
        level = self.trained(self.trained_as(self.levels[client]))
        return len(self.splitter.depths) - 1 if level is None else level

    @cached_property
    def levels_in_use(self) -> list[int]:
        """The levels that some client trains, smallest first: these are evaluated."""
        everyone = self.open and self.method.level == "own"
        return [level for level, count in enumerate(self.clients_by_level) if count or everyone]

    @cached_property
    def clients_by_level(self) -> list[int]:
        """Number of clients that train each level under this method."""
        by_level = [0] * len(self.levels.counts)
        for held, count in enumerate(self.levels.counts):
            if (level := self.trained(held)) is not None:
                by_level[level] += count
        return by_level

    def slice_of(self, job: Job) -> Slice:
        """The slice that a client holds in its turn."""
        return self.slice(job.level, job.round, job.client, job.drawn)

    def slice(self, level: int, round: int, client: int | None = None, drawn: Drawn = ()) -> Slice:
        """The slice of a client of a level in a round: the same object for all clients that hold the same.

        Without a client it is the slice on which the level is evaluated.
        """
        key = level, round if self.splitter.moves else 0, client if self.splitter.by_client else None, drawn
        if key not in self._slices:
            if len(self._slices) >= 64:  # old ones, of a window that moves
                del self._slices[next(iter(self._slices))]
            self._slices[key] = self.splitter.slice(self.model.layout, level, round, client, drawn)
        return self._slices[key]

    def current_slice(self, level: int, server: Server) -> Slice:
        """The slice of a level in the last finished round: what is evaluated."""
        return self.slice(level, max(server.round - 1, 0))

    def level_number(self, level: int) -> int:
        """The number of a level, where -1 is the largest."""
        levels = len(self.splitter.depths)
        if not -levels <= level < levels:
            raise ConfigError(f"level: got {level}, expected 0 to {levels - 1}, or -1 for the largest")
        return level % levels

    def module(self, server: Server, level: int, exit: int | None = None) -> nn.Module:
        """The module of a level with the server's values, ready for evaluation; -1 is the largest.

        With the number of an ``exit``, from 0 on, it is the part of it that ends there.
        """
        level = self.level_number(level)
        slice_ = self.current_slice(level, server)
        module = submodel(self.model.template, self.model.layout, slice_)
        module.load_state_dict(slice_.take(server.state(level)))
        self.method.client.deliver(module, self.model.layout)
        return (module if exit is None else end_at(module, self.model.layout, slice_, exit)).eval()

    @cached_property
    def _last_labels(self) -> list[Any]:
        return [None, None]  # of which client, and what

    @cached_property
    def _slices(self) -> dict[tuple[int, int, int | None, Drawn], Slice]:
        return {}

    def schedule(
        self, round: int, size: int, among: Sequence[int] | None = None, server: Server | None = None
    ) -> list[Job]:
        """The cohort of a round, drawn uniformly ``among`` some clients or all, as jobs for a ``server``."""
        clients: Sequence[int] = range(len(self.levels)) if among is None else among
        if self.method.level == "largest-only":
            clients = [client for client in clients if self.levels[client] == len(self.splitter.depths) - 1]
        mean = self.method.server.mean
        rng = numpy_rng(self.seed if server is None else mean.seed(server), Purpose.COHORT, round)
        if mean.confidential:  # drawn from all: who is away changes nothing for the others
            n = len(self.levels)
            found = np.flatnonzero(rng.random(n) < size / n) if mean.poisson else rng.choice(n, size, replace=False)
            return self.jobs(sorted(set(found.tolist()).intersection(clients)), round, server)
        drawn = [clients[at] for at in rng.choice(len(clients), min(size, len(clients)), replace=False, shuffle=False)]
        return self.jobs(drawn, round, server)

    def jobs(self, clients: Sequence[int], round: int, server: Server | None = None) -> list[Job]:
        """The turns of some clients, those of large clients with many examples first; channels are drawn in this order.

        The order is a function of the clients alone, of their examples and the level that they hold. Uploads are
        accumulated in it, so that sums of floats do not depend on who finishes first, nor on the method: by
        ``fedfloor`` the smallest level has the bits that it has by ``allsmall``.
        """
        jobs = [Job(client, self.level_of(client), round) for client in clients]
        held, examples = self.levels, self.num_examples
        jobs.sort(key=lambda job: (-self.forward_work[held[job.client]] * examples(job.client), job.client))
        counts: Mapping[str, Tensor] = {} if server is None else server.extra.get(COUNTS, {})
        for at, job in enumerate(jobs):
            drawn, counts = self.splitter.draw(self.model.layout, counts, job.level, round, job.client)
            jobs[at] = dataclasses.replace(job, drawn=drawn)
        return jobs
