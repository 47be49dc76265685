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
        """The new values of the entries it touches; a position that nobody held keeps its value bit for bit.

        The memory of the update becomes that of the new values: a change is applied once.
        """
        update = {name: new.add_(state[name]) for name, new in self.update.values.items()}
        return {
            name: covered.replace(name, state[name], new)
            for covered, values in ((self.update, update), (self.buffers, self.buffers.values))
            for name, new in values.items()
        }


@dataclass(frozen=True)
class Changes:
    """What a round does to the server.

    Attributes:
        shared: the change of the shared state.
        private: by level, the change of what the level keeps for itself.
        extra: the new state of the server rule.
        states: the new states of the update transforms.
    """

    shared: Change
    private: Mapping[int, Change] = field(default_factory=dict)
    extra: Mapping[str, Tensors] = field(default_factory=dict)
    states: Mapping[str, Tensors] = field(default_factory=dict)

    @property
    def update(self) -> Tensors:
        """The aggregated update of the shared parameters."""
        return self.shared.update.values

    def transformed(self, transform: UpdateTransform, server: "Server") -> tuple["Changes", Record]:
        """The changes with their updates transformed, and what the transform records.

        The private updates of a level are transformed by themselves; the transform can read the shared ones beside
        them. Private and shared updates have states of their own.
        """
        states, private, records = dict(self.states), dict(self.private), Record()
        context = Context(server.layout, server.round, server.seed)

        def apply(group: int, change: Change, shared: Tensors) -> tuple[Change, Record]:
            key = state_key(transform, group)
            beside = dataclasses.replace(context, weight=change.update.weight, shared=shared)
            before = states[key] if key in states else transform.init(server.layout)
            update, states[key], record = transform(change.update.values, before, beside)
            return change.with_update(update), record

        for level, change in self.private.items():
            if change.update.values:
                private[level], record = apply(level, change, self.update)
                records |= {f"{name}, level {level}": values for name, values in record.items()}
        shared, record = apply(SHARED, self.shared, {})
        kept = {key: state for key, state in states.items() if state}
        return dataclasses.replace(self, shared=shared, private=private, states=kept), record | records


def state_key(transform: UpdateTransform, group: int) -> str:
    """The name under which the state of a transform is kept."""
    return transform.name if group == SHARED else f"{transform.name}-{group}"


@dataclass(frozen=True)
class Server:
    """The state of a federation after ``round`` finished rounds.

    Attributes:
        layout: the structure of the model.
        shared: the server model, parameters and buffers.
        private: per level, the entries that this level does not share with the others, in server coordinates (for
            example batch-norm statistics under the ``per-level`` policy). A level that has none yet uses the shared
            values.
        round: number of finished rounds, and so the number of the next round, counted from 0.
        extra: what a server rule keeps from round to round, in tables of its own (Scaffold's variate).
        states: what update transforms keep from round to round (the moments of a server optimiser).
        population: for each level that has clients, its slice in the first round and the number of clients.
        seed: seed of every random stream of the run.
    """

    layout: Layout
    shared: Tensors
    private: Mapping[int, Tensors] = field(default_factory=dict)
    round: int = 0
    extra: Mapping[str, Tensors] = field(default_factory=dict)
    states: Mapping[str, Tensors] = field(default_factory=dict)
    population: Mapping[int, tuple[Slice, int]] = field(default_factory=dict)
    seed: int = 0

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
