"""A method is a value made of orthogonal parts, and a round uses them without knowing its name.

    Method = splitter  x  client rule  x  server rule  x  update transforms        (InCo is an update transform)

The splitter comes from the config's ``split`` section; the other three are a ``Method``.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from incofl.aggregate import Accumulator, Covered, Part
from incofl.client import ClientRule
from incofl.layout import Layout
from incofl.server import Change, Changes, Record, Server
from incofl.split import Kind, Slice
from incofl.split.width import Window
from incofl.tensors import Tensors

Weighting = Literal["uniform", "samples"]
BufferPolicy = Literal["average", "per-level", "static"]


@dataclass(frozen=True)
class Upload:
    """What one client sends back.

    Attributes:
        client: who.
        level: its size.
        slice: which part of the server model it holds.
        update: of the parameters in its slice, new minus received.
        buffers: their new values.
        examples: how many it has.
        steps: of its optimiser.
        loss: mean of its training.
        extra: what the method uploads besides.
        memory: what the client keeps for its next turn: it stays with the client, and no server rule may look at it.
        labels: how many examples of each class it has.
        length: by what its update is normalised; see ``ClientRule.length``.
    """

    client: int
    level: int
    slice: Slice
    update: Tensors
    buffers: Tensors
    examples: int
    steps: int
    loss: float
    extra: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    labels: Tensor | None = None
    length: float = 1.0


class UpdateTransform(Protocol):
    """A function of the aggregated update, applied on the server before the update is added."""

    @property
    def name(self) -> str:
        """The key of its record in ``metrics.jsonl``."""
        ...

    def __call__(self, update: Tensors, layout: Layout, round: int) -> tuple[Tensors, Record]:
        """The transformed update, for which it may use the memory of the given one, and what is worth recording."""
        ...


class UploadTransform(Protocol):
    """What happens to every upload on its way to the server."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    def __call__(self, upload: Upload, round: int) -> Upload:
        """The upload as it arrives, for which it may use the memory of the given one."""
        ...


@dataclass(frozen=True)
class ServerRule:
    """The server half of a method: here the covered mean, streaming.

    Attributes:
        weighting: ``uniform`` (as the paper's code) or ``samples`` (by the number of a client's examples).
        precision: of the running sums.
        buffers: ``average`` over all holders (the paper); ``per-level``: every level has statistics of its own;
            ``static``: clients' statistics are not used, each level's are measured before an evaluation.
        separate: levels share nothing: the server keeps one whole model for each.
        server_lr: by what the aggregated update is multiplied, before transforms.
    """

    weighting: Weighting = "uniform"
    precision: Literal["float32", "float64"] = "float32"
    buffers: BufferPolicy = "per-level"
    separate: bool = False
    server_lr: float = 1.0

    def start(self, server: Server) -> Server:
        """The server before the first round, with what this rule keeps in ``server.extra``."""
        return server

    def sent(self, server: Server, level: int) -> Tensors:
        """What the server sends to a level besides the model, in server coordinates."""
        return {}

    def private(self, layout: Layout, piece: Slice) -> frozenset[str]:
        """The entries of a slice that its level has for itself alone, besides what the buffer policy says."""
        return frozenset(layout.axes) if self.separate else frozenset()

    def weight(self, upload: Upload) -> float:
        """How much a client counts in the mean."""
        return float(upload.examples) if self.weighting == "samples" else 1.0

    def counted(self, upload: Upload, layout: Layout) -> Upload:
        """The upload as far as it counts: all of it, unless a method has a client speak for less than it holds."""
        return upload

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        """Averages what the clients did, per position, over those that hold it.

        Args:
            server: what the clients started from.
            arrivals: the uploads in the order of the schedule, those together that arrived together. They are valid
                only until the next ones are asked for.
        """
        layout = server.layout
        shared, private = self._sum(layout), dict[int, ChangeSum]()
        extra = dict[int, Accumulator]()
        for uploads in arrivals:
            weighted = [(self.counted(upload, layout), self.weight(upload)) for upload in uploads]
            own = {upload.level: self.private(layout, upload.slice) for upload in uploads}
            shared.add(weighted, {level: layout.axes.keys() - own[level] for level in own})
            for level in own:
                # Buffers are averaged even where levels keep their own: a level that has none yet starts from that.
                kept = own[level] | layout.buffers if self.buffers == "per-level" else own[level]
                same = [(upload, weight) for upload, weight in weighted if upload.level == level]
                private.setdefault(level, self._sum(layout)).add(same, {level: kept})
            for upload in uploads:
                group = extra.setdefault(upload.level if self.separate else SHARED, Accumulator(layout, self._dtype))
                group.add(Part(upload.slice, upload.extra))
        means = {level: change.mean(self.server_lr) for level, change in private.items()}
        changes = Changes(shared.mean(self.server_lr), means)
        learnt = self.learn(server, changes, {group: total.mean() for group, total in extra.items()})
        return dataclasses.replace(changes, extra=learnt)

    def learn(self, server: Server, changes: Changes, extra: Mapping[int, Covered]) -> Mapping[str, Tensors]:
        """The new ``server.extra``, from the changes and the mean of the clients' extra uploads.

        ``extra`` is by level if levels are separate, and has the one key ``SHARED`` if not.
        """
        return server.extra

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype

    def _sum(self, layout: Layout) -> "ChangeSum":
        return ChangeSum(layout, self._dtype, with_buffers=self.buffers != "static")


SHARED = -1  # stands for all levels together


class ChangeSum:
    """Sums up what uploads do to one state."""

    def __init__(self, layout: Layout, dtype: torch.dtype, with_buffers: bool = True) -> None:
        self._update = Accumulator(layout, dtype)
        self._buffers = Accumulator(layout, dtype)
        self._with_buffers = with_buffers

    def add(self, uploads: Sequence[tuple[Upload, float]], names: Mapping[int, Set[str]]) -> None:
        """Adds, of each upload with its weight, the entries that have one of its level's names."""
        self._update.add(*(Part(u.slice, _only(u.update, names[u.level]), w, u.length) for u, w in uploads))
        if self._with_buffers:
            self._buffers.add(*(Part(u.slice, _only(u.buffers, names[u.level]), w) for u, w in uploads))

    def mean(self, server_lr: float = 1.0) -> Change:
        """What the uploads together do; once."""
        update = self._update.mean()
        if server_lr != 1 and update.values:
            torch._foreach_mul_(list(update.values.values()), server_lr)
        return Change(update, self._buffers.mean())


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
        uploads: applied in order to every upload that was accepted, before it is aggregated.
        transforms: applied in order to the aggregated update.
        level: ``own``: each client trains its own level; ``smallest``/``largest``: all train that one.
        extensible: whether ``+inco`` makes sense: it needs one server model that levels share.
        split: the kind of splitting it is made for, which it gets if the config leaves it open.
        window: of width splitting: where the channels of a level lie.
        exits: whether it trains models with early exits.
    """

    name: str
    summary: str
    client: ClientRule = field(default_factory=ClientRule)
    server: ServerRule = field(default_factory=ServerRule)
    uploads: tuple[UploadTransform, ...] = ()
    transforms: tuple[UpdateTransform, ...] = ()
    level: Literal["own", "smallest", "largest"] = "own"
    extensible: bool = False
    split: Kind = "stage"
    window: Window = "prefix"
    exits: bool = False

    def received(self, arrivals: Iterable[Sequence[Upload]], round: int) -> Iterator[Sequence[Upload]]:
        """The uploads as they arrive."""
        for uploads in arrivals:
            for transform in self.uploads:
                uploads = [transform(upload, round) for upload in uploads]
            yield uploads

    def then(self, transform: UpdateTransform) -> "Method":
        """This method with one more update transform."""
        return dataclasses.replace(
            self, name=f"{self.name}+{transform.name}", transforms=(*self.transforms, transform), extensible=False
        )
