"""A method is a value made of orthogonal parts, and a round uses them without knowing its name.

    Method = splitter  x  client rule  x  server rule  x  update transforms        (InCo is an update transform)

The splitter comes from the config's ``split`` section; the other three are a ``Method``.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from incofl.aggregate import Accumulator, Part
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
    """A function of the aggregated update, applied on the server before the update is added."""

    @property
    def name(self) -> str:
        """The key of its record in ``metrics.jsonl``."""
        ...

    def __call__(self, update: Tensors, layout: Layout) -> tuple[Tensors, Record]:
        """The transformed update, for which it may use the memory of the given one, and what is worth recording."""
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

    def weight(self, upload: Upload) -> float:
        """How much a client counts in the mean."""
        return float(upload.examples) if self.weighting == "samples" else 1.0

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        """Averages what the clients did, per position, over those that hold it.

        Args:
            server: what the clients started from.
            arrivals: the uploads in the order of the schedule, those together that arrived together. They are valid
                only until the next ones are asked for.
        """
        layout, dtype = server.layout, getattr(torch, self.precision)
        shared = _ChangeSum(layout, dtype)
        private: dict[int, _ChangeSum] = {}
        for uploads in arrivals:
            weighted = [(upload, self.weight(upload)) for upload in uploads]
            own = {upload.level: self.private(layout, upload.slice) for upload in uploads}
            shared.add(weighted, {level: layout.axes.keys() - own[level] for level in own})
            for level in own:
                # Buffers are averaged even where levels keep their own: a level that has none yet starts from that.
                kept = own[level] | layout.buffers if self.buffers == "per-level" else own[level]
                same = [(upload, weight) for upload, weight in weighted if upload.level == level]
                private.setdefault(level, _ChangeSum(layout, dtype)).add(same, {level: kept})
        return Changes(shared.mean(), {level: change.mean() for level, change in private.items()})


class _ChangeSum:
    """Sums up what uploads do to one state."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self._update = Accumulator(layout, dtype)
        self._buffers = Accumulator(layout, dtype)

    def add(self, uploads: Sequence[tuple[Upload, float]], names: Mapping[int, Set[str]]) -> None:
        """Adds, of each upload with its weight, the entries that have one of its level's names."""
        self._update.add(*(Part(u.slice, _only(u.update, names[u.level]), weight) for u, weight in uploads))
        self._buffers.add(*(Part(u.slice, _only(u.buffers, names[u.level]), weight) for u, weight in uploads))

    def mean(self) -> Change:
        return Change(self._update.mean(), self._buffers.mean())


def _only(part: Tensors, names: Set[str]) -> Tensors:
    return {name: value for name, value in part.items() if name in names}


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
