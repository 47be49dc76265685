"""A federation: everything about a run that does not change from round to round."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from incofl.client import LocalSettings
from incofl.data import Dataset
from incofl.method import Method
from incofl.models import Model
from incofl.resources import Cost, costs
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
        return bisect.bisect_right(self._ends, client)


def clients_by_level(method: Method, levels: ClientLevels) -> list[int]:
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
    """

    model: Model
    splitter: Splitter
    method: Method
    data: Dataset
    partition: Sequence[Tensor]
    levels: ClientLevels
    local: LocalSettings = field(default_factory=LocalSettings)
    seed: int = 0
    device: str = "cpu"
    compile: bool = False
    measured: int = 5000

    @cached_property
    def costs(self) -> list[Cost]:
        """The resources that each level needs."""
        return costs(self.model, self.splitter, self.local, self.method)

    def start(self) -> Server:
        """The server before the first round."""
        counts = self.clients_by_level
        population = {level: (self.slice(level, 0), counts[level]) for level in self.levels_in_use}
        return self.method.server.start(Server(self.model.layout, self.model.initial, population=population))

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
        return [level for level, count in enumerate(self.clients_by_level) if count]

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

    def schedule(self, round: int, size: int) -> list[Job]:
        """The cohort of a round, drawn uniformly, longest turn first.

        The order is a function of the cohort alone. Uploads are accumulated in it, so that sums of floats do not
        depend on who finishes first.
        """
        drawn = numpy_rng(self.seed, Purpose.COHORT, round).choice(len(self.levels), size, replace=False, shuffle=False)
        jobs = [Job(int(client), self.level_of(int(client)), round) for client in drawn]
        return sorted(jobs, key=lambda job: (-self.costs[job.level].macs * len(self.partition[job.client]), job.client))
