"""What comes of clients' turns, in the coordinates of their slice: of one, or of several that trained side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from incofl.split import Slice
from incofl.tensors import Tensors, clone


@dataclass(frozen=True)
class Upload:
    """What comes of a client's turn, in the coordinates of its slice."""

    client: int = 0
    level: int = 0
    slice: Slice = field(default_factory=lambda: Slice({}, {}))  # the part of the server model that it holds
    update: Tensors = field(default_factory=dict)  # of the trained parameters: new minus received
    buffers: Tensors = field(default_factory=dict)  # their new values
    examples: int = 0
    steps: int = 0  # of the optimiser
    loss: float = 0.0  # mean over the targets of all epochs
    extra: Tensors = field(default_factory=dict)  # what the method uploads in addition
    memory: Tensors = field(default_factory=dict)  # stays with the client for its next turn; no server rule may read it
    labels: Tensor | None = None  # number of its examples of each class; none for tasks without classes
    normaliser: float = 1.0  # see ``ClientRule.normaliser``
    weight: float = 1.0  # multiplies its weight in the mean; set by the server
    smallest: Tensors = field(default_factory=dict)  # statistics of the smallest path in it, where it is trained, too


@dataclass(frozen=True)
class UploadStack(Sequence[Upload]):
    """The uploads of clients that hold the same slice; tensors have the clients as their first dimension.

    It is a sequence of uploads, so whoever does not care for the stack can take one after the other.
    """

    clients: Sequence[int]
    level: int
    slice: Slice
    update: Tensors
    buffers: Tensors
    examples: Sequence[int]
    steps: Sequence[int]
    losses: Sequence[float]
    extra: Tensors
    memory: Tensors
    labels: Tensor | None
    normalisers: Sequence[float]

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]

        def row(table: Tensors) -> Tensors:
            return {name: value[at] for name, value in table.items()}

        return Upload(
            client=self.clients[at],
            level=self.level,
            slice=self.slice,
            update=row(self.update),
            buffers=row(self.buffers),
            examples=self.examples[at],
            steps=self.steps[at],
            loss=self.losses[at],
            extra=row(self.extra),
            memory=row(self.memory),
            labels=None if self.labels is None else self.labels[at],
            normaliser=self.normalisers[at],
        )


def kept(upload: Upload) -> Upload:
    """An upload in memory of its own, which stays valid; without what the client remembers."""
    tables: dict[str, Any] = {name: clone(getattr(upload, name)) for name in ("update", "buffers", "extra", "smallest")}
    return replace(upload, memory={}, **tables)
