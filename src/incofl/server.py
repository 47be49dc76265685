"""The server: one large model, what some levels keep for themselves, and how a round moves both."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from incofl.aggregate import Covered
from incofl.layout import Layout
from incofl.tensors import Tensors


@dataclass(frozen=True)
class Change:
    """What a round does to one state: an update of its parameters, to be added, and new values of its buffers."""

    update: Covered = field(default_factory=Covered)
    buffers: Covered = field(default_factory=Covered)

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

    @property
    def update(self) -> Tensors:
        """The aggregated update of the shared parameters: what transforms act on."""
        return self.shared.update.values

    def with_update(self, update: Tensors) -> "Changes":
        """The same changes with another update of the shared parameters, over the same coverage."""
        covered = Covered(update, self.shared.update.weight)
        return Changes(Change(covered, self.shared.buffers), self.private)


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
    """

    layout: Layout
    shared: Tensors
    private: Mapping[int, Tensors] = field(default_factory=dict)
    round: int = 0

    def state(self, level: int) -> Tensors:
        """The model as a level sees it, in server coordinates."""
        return self.shared | self.private.get(level, {})

    def advance(self, changes: Changes) -> "Server":
        """The server after one more round. This server stays as it is; ``changes`` are used up."""
        private = dict(self.private)
        for level, change in changes.private.items():
            private[level] = private.get(level, {}) | change.apply(self.state(level))
        return Server(self.layout, self.shared | changes.shared.apply(self.shared), private, self.round + 1)
