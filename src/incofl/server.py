"""The server: one large model, what some levels keep for themselves, and how a round moves both."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from incofl.aggregate import CoveredMean, spread
from incofl.layout import Layout
from incofl.split import Slice
from incofl.tensors import Tensors, only
from incofl.transform import SHARED, Context, Record, UpdateTransform

Population = Mapping[int, tuple[Slice, int]]  # by level, its slice in the first round and its number of clients


@dataclass(frozen=True)
class Changes:
    """What a round does to the server: for parameters an update, to be added, and for buffers the new values."""

    shared: CoveredMean  # of the state that all levels share
    private: Mapping[int, CoveredMean] = field(default_factory=dict)  # by level, of what it keeps for itself
    extra: Mapping[str, Tensors] = field(default_factory=dict)  # the new state of the server rule
    states: Mapping[str, Tensors] = field(default_factory=dict)  # the new states of the update transforms
    given: Tensors = field(default_factory=dict)  # new values of what only the server changes
    # By level, or ``SHARED``: what is added after all transforms, where somebody held the position (FedDyn)
    correction: Mapping[int, Tensors] = field(default_factory=dict)
    unit: float = 1.0  # mean weight of a client
    squares: Tensors = field(default_factory=dict)  # mean squares of the shared updates, if the server rule keeps them
    records: Mapping[str, Record] = field(default_factory=dict)  # by name, what is recorded of how it was averaged

    def transformed(self, transform: UpdateTransform, server: "Server") -> tuple["Changes", Record]:
        """The changes with transformed updates, those of each level by themselves, and what the transform records."""
        layout, states, private, records = server.layout, dict(self.states), dict(self.private), Record()

        def apply(group: int, change: CoveredMean, shared: Tensors) -> tuple[CoveredMean, Record]:
            key = transform.name if group == SHARED else f"{transform.name}-{group}"
            before = states[key] if key in states else transform.init(layout)
            squares = self.squares if group == SHARED else {}
            context = Context(layout, server.round, server.seed, change.weight, shared, self.unit, squares)
            update, states[key], record = transform(only(change.values, layout.parameters), before, context)
            return CoveredMean(only(change.values, layout.buffers) | update, change.weight), record

        for level, change in self.private.items():  # before the shared update, which they may read, is used up
            if change.values.keys() & layout.parameters:
                private[level], record = apply(level, change, only(self.shared.values, layout.parameters))
                records |= {f"{name}, level {level}": values for name, values in record.items()}
        shared, record = apply(SHARED, self.shared, {})
        kept = {key: state for key, state in states.items() if state}
        return dataclasses.replace(self, shared=shared, private=private, states=kept), record | records


@dataclass(frozen=True)
class Server:
    """The state of a federation after ``round`` finished rounds, all in server coordinates."""

    layout: Layout
    shared: Tensors  # the server model, parameters and buffers
    # By level, what it does not share, such as batch-norm statistics; until it has its own it uses the shared values.
    private: Mapping[int, Tensors] = field(default_factory=dict)
    round: int = 0  # so it is the number of the next round, counted from 0
    extra: Mapping[str, Tensors] = field(default_factory=dict)  # what a server rule keeps (Scaffold's variate)
    states: Mapping[str, Tensors] = field(default_factory=dict)  # what update transforms keep (moments)
    population: Population = field(default_factory=dict)
    seed: int = 0  # of every random stream of the run

    def state(self, level: int) -> Tensors:
        """The model as a level sees it, in server coordinates."""
        return self.shared | self.private.get(level, {})

    def holders(self, name: str, group: int = SHARED) -> Tensor:
        """The number of clients, of a level or of all, that hold each position of a tensor; 1 where none does."""
        levels = [held for level, held in self.population.items() if group in (SHARED, level)]
        having = [(slice_, float(count)) for slice_, count in levels if name in slice_.index]
        return spread(self.layout, name, having).clamp(min=1)

    def advance(self, changes: Changes) -> "Server":
        """The server after one more round. This server stays as it is; ``changes`` are used up."""
        private = dict(self.private)
        for level, change in changes.private.items():
            private[level] = private.get(level, {}) | self._moved(
                self.state(level), change, changes.correction.get(level, {})
            )
        moved = self._moved(self.shared, changes.shared, changes.correction.get(SHARED, {}))
        shared = self.shared | moved | changes.given
        return dataclasses.replace(
            self, shared=shared, private=private, round=self.round + 1, extra=changes.extra, states=changes.states
        )

    def _moved(self, state: Tensors, change: CoveredMean, correction: Tensors) -> Tensors:
        for name, update in only(change.values, self.layout.parameters).items():
            update.add_(state[name])  # in the memory of the update
            if name in correction:
                update.add_(correction[name])
        return change.over(state)

    def measured(self, buffers: Mapping[int, Tensors]) -> "Server":
        """This server with other statistics for some levels."""
        private = {level: self.private.get(level, {}) | table for level, table in buffers.items()}
        return dataclasses.replace(self, private={**self.private, **private})
