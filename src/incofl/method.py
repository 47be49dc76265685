"""A method is a value made of orthogonal parts, and a round uses them without knowing its name.

    Method = splitter  x  client rule  x  server rule  x  update transforms        (InCo is an update transform)

The splitter comes from the config's ``split`` section; the other three are a ``Method``.
"""

import dataclasses
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from incofl.aggregate import Accumulator
from incofl.client import ClientRule
from incofl.layout import Layout
from incofl.server import Change, Changes, Server
from incofl.split import Slice
from incofl.tensors import Tensors

Weighting = Literal["uniform", "samples"]
BufferPolicy = Literal["average", "per-level"]
Record = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Upload:
    """What one client sends back: the update of its slice (new minus received) and its buffers' new values."""

    client: int
    level: int
    slice: Slice
    update: Tensors
    buffers: Tensors
    examples: int
    steps: int
    loss: float


class UpdateTransform(Protocol):
    """A pure function of the aggregated update, applied on the server before the update is added."""

    @property
    def name(self) -> str:
        """The key of its record in ``metrics.jsonl``."""
        ...

    def __call__(self, update: Tensors, layout: Layout) -> tuple[Tensors, Record]:
        """The transformed update and what is worth recording about it."""
        ...


@dataclass(frozen=True)
class ServerRule:
    """The server half of a method: here the covered mean, streaming.

    Attributes:
        weighting: ``uniform`` (as the paper's code) or ``samples`` (by the number of a client's examples).
        precision: of the running sums.
        buffers: ``average`` over all holders (the paper), or ``per-level``: every level has statistics of its own.
    """

    weighting: Weighting = "uniform"
    precision: Literal["float32", "float64"] = "float32"
    buffers: BufferPolicy = "per-level"

    def private(self, layout: Layout, piece: Slice) -> frozenset[str]:
        """The entries of a slice that its level has for itself alone, besides what the buffer policy says."""
        return frozenset()

    def aggregate(self, server: Server, uploads: Iterable[Upload]) -> Changes:
        """Averages what the clients did, per position, over those that hold it."""
        layout, dtype = server.layout, getattr(torch, self.precision)
        shared = _ChangeSum(layout, dtype)
        private: dict[int, _ChangeSum] = {}
        for upload in uploads:
            own = self.private(layout, upload.slice)
            weight = float(upload.examples) if self.weighting == "samples" else 1.0
            shared.add(upload, layout.axes.keys() - own, weight)
            # Buffers are averaged even where levels keep their own: a level that has none yet starts from the average.
            kept = own | layout.buffers if self.buffers == "per-level" else own
            private.setdefault(upload.level, _ChangeSum(layout, dtype)).add(upload, kept, weight)
        return Changes(shared.mean(), {level: change.mean() for level, change in private.items()})


class _ChangeSum:
    """Sums up what uploads do to one state."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self._update = Accumulator(layout, dtype)
        self._buffers = Accumulator(layout, dtype)

    def add(self, upload: Upload, names: Set[str], weight: float) -> None:
        """Adds the entries of an upload that have one of the names."""
        for accumulator, part in ((self._update, upload.update), (self._buffers, upload.buffers)):
            accumulator.add(upload.slice, {name: part[name] for name in part if name in names}, weight)

    def mean(self) -> Change:
        return Change(self._update.mean(), self._buffers.mean())


@dataclass(frozen=True)
class Method:
    """A federated method, as data.

    Attributes:
        name: its name in the table.
        summary: one line for ``incofl list methods``.
        client: the client half.
        server: the server half.
        transforms: applied in order to the aggregated update.
        level: ``own``: each client trains its own level; ``smallest``/``largest``: all train that one.
        extensible: whether ``+inco`` makes sense: it needs one server model that levels share.
    """

    name: str
    summary: str
    client: ClientRule = field(default_factory=ClientRule)
    server: ServerRule = field(default_factory=ServerRule)
    transforms: tuple[UpdateTransform, ...] = ()
    level: Literal["own", "smallest", "largest"] = "own"
    extensible: bool = False

    def then(self, transform: UpdateTransform) -> "Method":
        """This method with one more update transform."""
        return dataclasses.replace(
            self, name=f"{self.name}+{transform.name}", transforms=(*self.transforms, transform), extensible=False
        )
