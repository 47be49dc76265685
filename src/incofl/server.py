"""The server: one large model, what some levels keep for themselves, and how a round moves both."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from incofl.aggregate import Covered
from incofl.layout import Layout
from incofl.split import Slice
from incofl.tensors import Tensors

Record = dict[str, dict[str, float]]
Transform = Callable[[Tensors, Layout, int], tuple[Tensors, Record]]


@dataclass(frozen=True)
class Change:
    """What a round does to one state: an update of its parameters, to be added, and new values of its buffers."""

    update: Covered = field(default_factory=Covered)
    buffers: Covered = field(default_factory=Covered)

    def with_update(self, update: Tensors) -> "Change":
        """The same change with another update, over the same coverage."""
        return Change(Covered(update, self.update.weight), self.buffers)

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
    """What a round does to the server: to the shared state, and to what each level keeps for itself."""

    shared: Change
    private: Mapping[int, Change] = field(default_factory=dict)
    extra: Mapping[str, Tensors] = field(default_factory=dict)

    @property
    def update(self) -> Tensors:
        """The aggregated update of the shared parameters: what transforms act on."""
        return self.shared.update.values

    def with_update(self, update: Tensors) -> "Changes":
        """The same changes with another update of the shared parameters, over the same coverage."""
        return dataclasses.replace(self, shared=self.shared.with_update(update))

    def transformed(self, transform: Transform, layout: Layout, round: int) -> tuple["Changes", Record]:
        """The changes with their updates transformed, and what the transform records.

        A level's private layers are transformed together with the shared shallow layers that they lack.
        """
        private, records = dict(self.private), Record()
        for level, change in self.private.items():
            own = change.update.values
            pairs = [
                pair
                for table in (layout.shallow, layout.first_same_shape, layout.across_blocks)
                for pair in table.items()
            ]
            shallow = {s for deep, s in pairs if deep in own and s not in own and s in self.update}
            if own:
                update, record = transform(own | {name: self.update[name].clone() for name in shallow}, layout, round)
                private[level] = change.with_update({name: update[name] for name in own})
                records |= {f"{name}, level {level}": values for name, values in record.items() if name in own}
        update, record = transform(self.update, layout, round)
        return dataclasses.replace(self.with_update(update), private=private), record | records


@dataclass(frozen=True)
class Server:
    """The state of a federation after ``round`` finished rounds.

    Attributes:
        layout: the structure of the model.
        shared: the server model, parameters and buffers.
        private: per level, the entries that this level does not share with the others, in server coordinates (for
            example batch-norm statistics under the ``per-level`` policy). A level that has none yet uses the shared
            values.
        round: how many rounds are finished, and so the 0-based number of the next.
        extra: what a server rule keeps from round to round, in tables of its own (Scaffold's variate).
        population: for each level that has clients, its slice in the first round and how many clients there are.
    """

    layout: Layout
    shared: Tensors
    private: Mapping[int, Tensors] = field(default_factory=dict)
    round: int = 0
    extra: Mapping[str, Tensors] = field(default_factory=dict)
    population: Mapping[int, tuple[Slice, int]] = field(default_factory=dict)

    def state(self, level: int) -> Tensors:
        """The model as a level sees it, in server coordinates."""
        return self.shared | self.private.get(level, {})

    def advance(self, changes: Changes) -> "Server":
        """The server after one more round. This server stays as it is; ``changes`` are used up."""
        private = dict(self.private)
        for level, change in changes.private.items():
            private[level] = private.get(level, {}) | change.apply(self.state(level))
        shared = self.shared | changes.shared.apply(self.shared)
        return dataclasses.replace(self, shared=shared, private=private, round=self.round + 1, extra=changes.extra)

    def measured(self, buffers: Mapping[int, Tensors]) -> "Server":
        """This server with other statistics for some levels."""
        private = {level: self.private.get(level, {}) | table for level, table in buffers.items()}
        return dataclasses.replace(self, private={**self.private, **private})
