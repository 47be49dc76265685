"""A federation: everything about a run that does not change from round to round."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from incofl.client import LocalSettings
from incofl.costs import Cost, costs
from incofl.data import Dataset
from incofl.method import Method
from incofl.models import Model
from incofl.seeds import Purpose, numpy_rng
from incofl.server import Server
from incofl.split import Slice, Splitter


@dataclass(frozen=True)
class Job:
    """One client's turn in one round."""

    client: int
    level: int
    round: int

    def __str__(self) -> str:
        return f"client {self.client}, level {self.level}"


@dataclass(frozen=True)
class ClientLevels:
    """The level of each client, as the number of clients of each level: the first clients are the smallest."""

    counts: tuple[int, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(self.counts))

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, client: int) -> int:
        if not 0 <= client < len(self):
            raise IndexError(client)  # where loops end
        return bisect.bisect_right(self._ends, client)


@dataclass(frozen=True)
class ListedLevels:
    """The level of each client, one by one: of clients that say themselves what they can do."""

    levels: tuple[int, ...]
    number: int  # of levels

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of clients of each level."""
        return tuple(self.levels.count(level) for level in range(self.number))

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, client: int) -> int:
        return self.levels[client]


def clients_by_level(method: Method, levels: ClientLevels | ListedLevels) -> list[int]:
    """How many clients train each level under a method."""
    last = len(levels.counts) - 1
    match method.level:
        case "own":
            return list(levels.counts)
        case "smallest":
            return [len(levels), *[0] * last]
        case "largest":
            return [*[0] * last, len(levels)]


@dataclass(frozen=True)
class Federation:
    """Model, method, data and clients of a run.

    Attributes:
        model: the server model.
        splitter: which part of it each level holds.
        method: how clients train and how the server aggregates.
        data: the data set.
        partition: for each client the indices of its training examples.
        levels: for each client the level that its resources allow.
        local: how clients train.
        seed: of every random stream.
        device: where clients compute.
        compile: whether they train compiled models.
        measured: training images on which static batch-norm statistics are measured.
        open: whether clients may still come to levels that have none: then all levels are in use.
    """

    model: Model
    splitter: Splitter
    method: Method
    data: Dataset
    partition: Sequence[Tensor]
    levels: ClientLevels | ListedLevels
    local: LocalSettings = field(default_factory=LocalSettings)
    seed: int = 0
    device: str = "cpu"
    compile: bool = False
    measured: int = 5000
    open: bool = False

    @cached_property
    def costs(self) -> list[Cost]:
        """The resources that each level needs."""
        return costs(self.model, self.splitter, self.local, self.method)

    def start(self) -> Server:
        """The server before the first round."""
        return self.method.server.start(Server(self.model.layout, self.model.initial, population=self.population))

    @property
    def population(self) -> dict[int, tuple[Slice, int]]:
        """For each level in use its slice in the first round and how many clients there are."""
        return {level: (self.slice(level, 0), self.clients_by_level[level]) for level in self.levels_in_use}

    def with_clients(self, levels: ClientLevels | ListedLevels, partition: Sequence[Tensor]) -> "Federation":
        """The same federation of other clients, without computing again what does not depend on them."""
        other = dataclasses.replace(self, levels=levels, partition=partition)
        other.__dict__.update({name: vars(self)[name] for name in ("costs", "_slices") if name in vars(self)})
        return other

    def labels(self, client: int) -> Tensor:
        """How many examples of each class a client has."""
        return torch.bincount(self.data.train.y[self.partition[client]].flatten(), minlength=self.data.classes)

    def level_of(self, client: int) -> int:
        """The level that a client trains under this method."""
        match self.method.level:
            case "smallest":
                return 0
            case "largest":
                return len(self.splitter.depths) - 1
            case "own":
                return self.levels[client]

    @cached_property
    def levels_in_use(self) -> list[int]:
        """The levels that some client trains, smallest first: these are evaluated."""
        everyone = self.open and self.method.level == "own"
        return [level for level, count in enumerate(self.clients_by_level) if count or everyone]

    @cached_property
    def clients_by_level(self) -> list[int]:
        """How many clients train each level under this method."""
        return clients_by_level(self.method, self.levels)

    def slice(self, level: int, round: int) -> Slice:
        """What a level holds in a round: the same object for all clients of the level."""
        key = level, round if self.splitter.moves else 0
        if key not in self._slices:
            if len(self._slices) >= 64:  # of a window that moves, old ones
                del self._slices[next(iter(self._slices))]
            self._slices[key] = self.splitter.slice(self.model.layout, level, round)
        return self._slices[key]

    def current_slice(self, level: int, server: Server) -> Slice:
        """What a level held in the last finished round: what is evaluated."""
        return self.slice(level, max(server.round - 1, 0))

    @cached_property
    def _slices(self) -> dict[tuple[int, int], Slice]:
        return {}

    def schedule(self, round: int, size: int, among: Sequence[int] | None = None) -> list[Job]:
        """The cohort of a round, drawn uniformly ``among`` some clients or all, longest turn first.

        The order is a function of the cohort alone. Uploads are accumulated in it, so that sums of floats do not
        depend on who finishes first.
        """
        clients = range(len(self.levels)) if among is None else among
        rng = numpy_rng(self.seed, Purpose.COHORT, round)
        drawn = [clients[at] for at in rng.choice(len(clients), min(size, len(clients)), replace=False, shuffle=False)]
        jobs = [Job(client, self.level_of(client), round) for client in drawn]
        return sorted(jobs, key=lambda job: (-self.costs[job.level].macs * len(self.partition[job.client]), job.client))
