"""The server: one large model, what some levels keep for themselves, and how a round moves both."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from incofl.aggregate import CoveredMean
from incofl.layout import Layout
from incofl.split import Slice
from incofl.tensors import Tensors
from incofl.transform import SHARED, Context, Record, UpdateTransform


@dataclass(frozen=True)
class Change:
    """What a round does to one state: an update of its parameters, to be added, and new values of its buffers."""

    update: CoveredMean = field(default_factory=CoveredMean)
    buffers: CoveredMean = field(default_factory=CoveredMean)

    def with_update(self, update: Tensors) -> "Change":
        """The same change with another update, over the same coverage."""
        return Change(CoveredMean(update, self.update.weight), self.buffers)

    def apply(self, state: Mapping[str, Tensor]) -> Tensors:
        """The new values of the entries it touches, in the memory of the update: a change is applied once."""
        for name, value in self.update.values.items():
            value.add_(state[name])
        return self.update.over(state) | self.buffers.over(state)


@dataclass(frozen=True)
class Changes:
    """What a round does to the server."""

    shared: Change  # of the state that all levels share
    private: Mapping[int, Change] = field(default_factory=dict)  # by level, of what it keeps for itself
    extra: Mapping[str, Tensors] = field(default_factory=dict)  # the new state of the server rule
    states: Mapping[str, Tensors] = field(default_factory=dict)  # the new states of the update transforms

    @property
    def update(self) -> Tensors:
        """The aggregated update of the shared parameters."""
        return self.shared.update.values

    def transformed(self, transform: UpdateTransform, server: "Server") -> tuple["Changes", Record]:
        """The changes with their updates transformed, and what the transform records.

        Private updates of a level are transformed by themselves, with a state of their own.
        """
        states, private, records = dict(self.states), dict(self.private), Record()

        def apply(group: int, change: Change, shared: Tensors) -> tuple[Change, Record]:
            key = transform.name if group == SHARED else f"{transform.name}-{group}"
            before = states[key] if key in states else transform.init(server.layout)
            context = Context(server.layout, server.round, server.seed, change.update.weight, shared)
            update, states[key], record = transform(change.update.values, before, context)
            return change.with_update(update), record

        for level, change in self.private.items():  # before the shared update, which they may read, is used up
            if change.update.values:
                private[level], record = apply(level, change, self.update)
                records |= {f"{name}, level {level}": values for name, values in record.items()}
        shared, record = apply(SHARED, self.shared, {})
        kept = {key: state for key, state in states.items() if state}
        return dataclasses.replace(self, shared=shared, private=private, states=kept), record | records


@dataclass(frozen=True)
class Server:
    """The state of a federation after ``round`` finished rounds, all in server coordinates.

    ``private`` has, per level, the entries that it does not share with the others, such as batch-norm statistics under
    the ``per-level`` policy; a level that has none yet uses the shared values.
    """

    layout: Layout
    shared: Tensors  # the server model, parameters and buffers
    private: Mapping[int, Tensors] = field(default_factory=dict)
    round: int = 0  # so it is the number of the next round, counted from 0
    extra: Mapping[str, Tensors] = field(default_factory=dict)  # what a server rule keeps (Scaffold's variate)
    states: Mapping[str, Tensors] = field(default_factory=dict)  # what update transforms keep (moments)
    population: Mapping[int, tuple[Slice, int]] = field(default_factory=dict)  # a level's first slice, its clients
    seed: int = 0  # of every random stream of the run

    def state(self, level: int) -> Tensors:
        """The model as a level sees it, in server coordinates."""
        return self.shared | self.private.get(level, {})

    def advance(self, changes: Changes) -> "Server":
        """The server after one more round. This server stays as it is; ``changes`` are used up."""
        private = dict(self.private)
        for level, change in changes.private.items():
            private[level] = private.get(level, {}) | change.apply(self.state(level))
        shared = self.shared | changes.shared.apply(self.shared)
        return dataclasses.replace(
            self, shared=shared, private=private, round=self.round + 1, extra=changes.extra, states=changes.states
        )

    def measured(self, buffers: Mapping[int, Tensors]) -> "Server":
        """This server with other statistics for some levels."""
        private = {level: self.private.get(level, {}) | table for level, table in buffers.items()}
        return dataclasses.replace(self, private={**self.private, **private})
