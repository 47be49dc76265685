"""A method is a value made of orthogonal parts, and a round uses them without knowing its name.

    Method = splitter  x  client rule  x  server rule  x  update transforms        (InCo is an update transform)

A section of the config can set the options of a part: a class decorated with ``options``, or a field that is one.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from incofl.aggregate import Accumulator, Contribution, CoveredMean
from incofl.client import ClientRule, Setting, Upload
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.options import has_options
from incofl.server import Change, Changes, Server
from incofl.split import Levels, Slice, SplitRule
from incofl.tensors import Tensors
from incofl.transform import SHARED, Context, UpdateTransform

Weighting = Literal["uniform", "samples"]
BufferPolicy = Literal["average", "per-level", "static"]


class UploadTransform(Protocol):
    """A function of every accepted upload, applied before it is aggregated."""

    def __call__(self, upload: Upload, context: Context) -> Upload:
        """The upload as the server uses it; it may use the memory of the given one."""
        ...


@dataclass(frozen=True)
class ServerRule:
    """The server half of a method: here the covered mean, streaming.

    Buffers are averaged over all holders (``average``, the paper), every level has its own (``per-level``), or those of
    clients are not used and each level's are measured before an evaluation (``static``).
    """

    weighting: Weighting = "uniform"  # as the paper's code; or by the number of a client's examples
    precision: Literal["float32", "float64"] = "float32"  # of the running sums
    buffers: BufferPolicy = "per-level"
    separate: bool = False  # levels share nothing: the server keeps one whole model for each

    def check(self, setting: Setting) -> None:
        """Refuses a model or task that the method cannot be used for, with one clear line."""

    def start(self, server: Server) -> Server:
        """The server before the first round, with what this rule keeps in ``server.extra``."""
        return server

    def extra_for_client(self, server: Server, level: int) -> Tensors:
        """What the server sends to a level in addition to the model, in server coordinates."""
        return {}

    def private(self, layout: Layout, slice_: Slice) -> frozenset[str]:
        """The entries of a slice that its level keeps for itself, in addition to what the buffer policy says."""
        return frozenset(layout.axes) if self.separate else frozenset()

    def weight(self, upload: Upload) -> float:
        """The weight of a client in the mean."""
        return float(upload.examples) if self.weighting == "samples" else 1.0

    def filter_upload(self, upload: Upload, layout: Layout) -> Upload:
        """The part of an upload that counts: all of it, unless a client speaks for less than it holds."""
        return upload

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        """Averages the uploads, at each position over the clients that hold it.

        Uploads come in the order of the schedule, and are valid only until the next ones are asked for.
        """
        layout = server.layout
        shared, private, extra = self._sum(layout), dict[int, ChangeSum](), dict[int, Accumulator]()
        for uploads in arrivals:
            weighted = [(self.filter_upload(upload, layout), self.weight(upload)) for upload in uploads]
            own = {upload.level: self.private(layout, upload.slice) for upload in uploads}
            shared.add(weighted, {level: layout.axes.keys() - own[level] for level in own})
            for level in own:
                # Buffers are averaged even where levels keep their own: a level that has none yet starts from that.
                kept = own[level] | layout.buffers if self.buffers == "per-level" else own[level]
                same = [(upload, weight) for upload, weight in weighted if upload.level == level]
                private.setdefault(level, self._sum(layout)).add(same, {level: kept})
            for upload in uploads:
                group = extra.setdefault(upload.level if self.separate else SHARED, Accumulator(layout, self._dtype))
                group.add(Contribution(upload.slice, upload.extra))
        changes = Changes(shared.mean(), {level: change.mean() for level, change in private.items()})
        new = self.update_state(server, changes, {group: total.mean() for group, total in extra.items()})
        return dataclasses.replace(changes, extra=new, states=server.states)

    def update_state(self, server: Server, changes: Changes, extra: Mapping[int, CoveredMean]) -> Mapping[str, Tensors]:
        """The new ``server.extra``, from the mean extra uploads: by level if levels are separate, else ``SHARED``."""
        return server.extra

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype

    def _sum(self, layout: Layout) -> "ChangeSum":
        return ChangeSum(layout, self._dtype, with_buffers=self.buffers != "static")


class ChangeSum:
    """Sums up what uploads do to one state."""

    def __init__(self, layout: Layout, dtype: torch.dtype, with_buffers: bool = True) -> None:
        self._update = Accumulator(layout, dtype)
        self._buffers = Accumulator(layout, dtype)
        self._with_buffers = with_buffers

    def add(self, uploads: Sequence[tuple[Upload, float]], names: Mapping[int, Set[str]]) -> None:
        """Adds, of each upload with its weight, the entries that have one of its level's names."""
        self._update.add(*(Contribution(u.slice, _only(u.update, names[u.level]), w, u.normaliser) for u, w in uploads))
        if self._with_buffers:
            self._buffers.add(*(Contribution(u.slice, _only(u.buffers, names[u.level]), w) for u, w in uploads))

    def mean(self) -> Change:
        """The change that the uploads make together; can be called once."""
        return Change(self._update.mean(), self._buffers.mean())


def _only(part: Tensors, names: Set[str]) -> Tensors:
    return {name: value for name, value in part.items() if name in names}


@dataclass(frozen=True)
class Method:
    """A federated method, as data; ``then`` adds a transform of the aggregated update.

    By ``level``, each client trains its own level, all the smallest or the largest, or only those of the largest take
    part.
    """

    name: str  # in tables and records
    client: ClientRule = field(default_factory=ClientRule)
    server: ServerRule = field(default_factory=ServerRule)
    split: SplitRule = field(default_factory=SplitRule)
    uploads: tuple[UploadTransform, ...] = ()  # applied in order to every accepted upload
    transforms: tuple[UpdateTransform, ...] = ()  # applied in order to the aggregated update
    level: Literal["own", "smallest", "largest", "largest-only"] = "own"
    summary: str = ""  # one line for ``incofl list methods``

    def __post_init__(self) -> None:
        names = [transform.name for transform in self.transforms]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"method: two transforms of {self.name} have the name {twice[0]!r}, expected one of each")

    def then(self, transform: UpdateTransform) -> "Method":
        """This method with one more update transform."""
        return dataclasses.replace(self, name=f"{self.name}+{transform.name}", transforms=(*self.transforms, transform))

    def check(self, setting: Setting) -> None:
        """Refuses a model or task that the method cannot be used for, with one clear line."""
        if self.split.window != "prefix" and setting.buffers == "per-level" and setting.layout.buffers:
            raise ConfigError(f"buffers: got 'per-level', expected 'static' or 'average': {self.name} moves a window")
        self.client.check(setting)
        self.server.check(setting)

    def extend(self, model: torch.nn.Module, layout: Layout, levels: Levels) -> Layout:
        """Adds the method's own layers to the new server model, in place, and returns the layout with them."""
        return self.client.extend(model, self.split.extend(model, layout, levels))

    def received(self, arrivals: Iterable[Sequence[Upload]], server: Server) -> Iterator[Sequence[Upload]]:
        """The uploads as the server uses them."""
        context = Context(server.layout, server.round, server.seed)
        for uploads in arrivals:
            for transform in self.uploads:
                uploads = [transform(upload, context) for upload in uploads]
            yield uploads

    @property
    def options(self) -> dict[str, Any]:
        """The options of all parts, by the name of their section in a config."""
        parts = [self.split, self.client, self.server, *self.uploads, *self.transforms]
        values = [value for part in parts for value in (part, *_fields(part).values())]
        return {value.section: value for value in values if has_options(value)}

    def with_options(self, chosen: Mapping[str, Any]) -> "Method":
        """This method with other options, by the name of their section; sections of other methods are ignored."""

        def configured(part: Any) -> Any:
            if has_options(part):
                return chosen.get(part.section, part)
            own = {name: configured(value) for name, value in _fields(part).items() if has_options(value)}
            return dataclasses.replace(part, **own) if own else part

        return dataclasses.replace(
            self,
            split=configured(self.split),
            client=configured(self.client),
            server=configured(self.server),
            uploads=tuple(map(configured, self.uploads)),
            transforms=tuple(map(configured, self.transforms)),
        )


def _fields(part: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
    return {name: getattr(part, name) for name in names}
