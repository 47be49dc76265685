"""A method is a value made of orthogonal parts, and a round uses them without knowing its name.

Method = splitter  x  client rule  x  server rule  x  update transforms        (InCo is an update transform)
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from incofl.aggregate import Accumulator, Contribution, CoveredMean, pooled_by_width
from incofl.anchor import SMALLEST, Anchor
from incofl.client import ClientRule, Setting, Upload
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.mean import Mean
from incofl.options import has_options
from incofl.server import Changes, Population, Server
from incofl.split import Levels, Slice, SplitRule
from incofl.tensors import Tensors, only
from incofl.transform import SHARED, Context, UpdateTransform
from incofl.upload import UploadStack

Weighting = Literal["uniform", "samples"]
# All levels share one; each has its own; levels of one width share one; measured when a level is evaluated.
BufferPolicy = Literal["average", "per-level", "by-width", "static"]
ROW_KEYS = frozenset({"round", "accuracy", "accuracy_by_level", "accuracy_on_nodes", "metrics", "loss", "test_loss"})
ROW_KEYS |= {"clients", "nodes", "rejected", "bytes_up", "bytes_down", "seconds"}  # what a round records anyway
ROW_KEYS |= {"clipped", "norms", "taken_back", "attack"}  # and what validation and attacks record
UploadTransform = Callable[[Upload, Context], Upload]  # may use the memory of the given upload


@dataclass(frozen=True)
class ServerRule:
    """The server half of a method: here the covered mean, streaming."""

    weighting: Weighting = "uniform"  # as the paper's code; or by the number of a client's examples
    precision: Literal["float32", "float64"] = "float32"  # of the running sums
    buffers: BufferPolicy = "per-level"
    separate: bool = False  # levels share nothing: the server keeps one whole model for each
    anchored: bool = False  # whether the smallest level has statistics of its own in any case, for all clients train it
    squares: bool = False  # whether the squares of updates are averaged, too, for transforms that need their spread
    cohort: int = 1  # number of clients that take part in a round, or are expected to
    mean: Mean = field(default_factory=Mean)  # how uploads become a mean
    sets_values: ClassVar[bool] = False  # whether its updates lead to certain values, so that none may be transformed
    only_means: ClassVar[bool] = True  # whether it uses nothing of uploads but their means

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
        return upload.weight * self._weight(upload.examples)

    def _weight(self, examples: int) -> float:
        return float(examples) if self.weighting == "samples" else 1.0

    def filter_upload(self, upload: Upload, layout: Layout) -> Upload:
        """The part of an upload that counts: all of it, unless a client speaks for less than it holds."""
        return upload

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        """Averages uploads, each valid only until the next are asked for, at each position over its holders."""
        layout = server.layout
        shared, private, extra = self._sum(layout), dict[int, Accumulator](), dict[int, Accumulator]()
        squared, weights = self._sum(layout), list[float]()
        known: dict[int, tuple[Slice, Set[str], Set[str]]] = {}  # by level, its slice, what it keeps and shares
        for uploads in arrivals:
            for each in (uploads,) if isinstance(uploads, UploadStack) else uploads:
                if each.level not in known or known[each.level][0] is not each.slice:
                    names = self.private(layout, each.slice)
                    known[each.level] = each.slice, names, layout.axes.keys() - names
            if isinstance(uploads, UploadStack) and self._adds_stacks:
                level, (_, keeps, shares) = uploads.level, known[uploads.level]
                weights += (counts := [self._weight(examples) for examples in uploads.examples])
                self._add_stack(shared, uploads, shares, counts)
                kept = keeps | layout.buffers if self._keeps_buffers(level) else keeps
                self._add_stack(private.setdefault(level, self._sum(layout)), uploads, kept, counts)
                group, ones = level if self.separate else SHARED, [1.0] * len(uploads)
                extra.setdefault(group, self._sum(layout)).add_stack(uploads.slice, uploads.extra, ones, ones)
                continue
            counted = [self.filter_upload(upload, layout) for upload in uploads]
            own = {upload.level: known[upload.level][1] for upload in uploads}
            common = {level: known[level][2] for level in own}
            shared.add(*(part for upload in counted for part in self._parts(upload, common[upload.level])))
            weights += [self.weight(upload) for upload in counted]
            for upload in counted if self.squares else ():
                squared.add(Contribution(upload.slice, _squares(upload, common[upload.level]), self.weight(upload)))
            # Buffers are averaged even where levels keep their own: a level that has none yet starts from that.
            kept_by = {
                level: own[level] | layout.buffers if self._keeps_buffers(level) else own[level] for level in own
            }
            same: dict[int, list[Contribution]] = {level: [] for level in own}
            for upload in counted:  # in this order, so that sums do not depend on which uploads came together
                same[upload.level] += self._parts(upload, kept_by[upload.level])
                if upload.smallest:
                    part = Contribution(server.population[0][0], upload.smallest, self.weight(upload))
                    same.setdefault(0, []).append(part)
            for level, parts in same.items():
                private.setdefault(level, self._sum(layout)).add(*parts)
            for upload in uploads:
                group = upload.level if self.separate else SHARED
                extra.setdefault(group, self._sum(layout)).add(Contribution(upload.slice, upload.extra, upload.weight))
        own_means = {level: total.mean() for level, total in private.items()}
        if self.buffers == "by-width":
            above = {level: slice_ for level, (slice_, _) in server.population.items() if level or not self.anchored}
            own_means |= pooled_by_width(own_means, above, layout.buffers)
        unit = sum(weights) / max(len(weights), 1) or 1.0
        changes = Changes(shared.mean(), own_means, unit=unit)
        new = self.update_state(server, changes, {group: total.mean() for group, total in extra.items()})
        return dataclasses.replace(changes, extra=new, states=server.states, squares=squared.mean().values)

    def update_state(self, server: Server, changes: Changes, extra: Mapping[int, CoveredMean]) -> Mapping[str, Tensors]:
        """The new ``server.extra``, from the mean extra uploads: by level if levels are separate, else ``SHARED``."""
        return server.extra

    def _sum(self, layout: Layout) -> Accumulator:
        return self.mean.accumulator(layout, torch.float64 if self.precision == "float64" else torch.float32)

    def _keeps_buffers(self, level: int) -> bool:
        return self.buffers in ("per-level", "by-width") or (self.anchored and not level)

    @property
    def _adds_stacks(self) -> bool:
        """Whether a stack of uploads is one sum: not where a rule looks at each upload."""
        looks = ("weight", "filter_upload")
        return not self.squares and all(getattr(type(self), name) is getattr(ServerRule, name) for name in looks)

    def _add_stack(self, total: Accumulator, stack: UploadStack, names: Set[str], weights: Sequence[float]) -> None:
        total.add_stack(stack.slice, only(stack.update, names), weights, stack.normalisers)
        if self.buffers != "static":
            total.add_stack(stack.slice, only(stack.buffers, names), weights, [1.0] * len(stack))

    def _parts(self, upload: Upload, names: Set[str]) -> Iterator[Contribution]:
        """The entries of an upload that have one of some names; only updates have a normaliser."""
        yield Contribution(upload.slice, only(upload.update, names), self.weight(upload), upload.normaliser)
        if self.buffers != "static":
            yield Contribution(upload.slice, only(upload.buffers, names), self.weight(upload))


def _squares(upload: Upload, names: Set[str]) -> Tensors:
    if upload.normaliser != 1:
        raise ConfigError("coverage.kind: got 'signal', expected 'count': clients' updates are normalised (FedNova)")
    return {name: value.square() for name, value in only(upload.update, names).items()}


@dataclass(frozen=True)
class Method:
    """A federated method, as data; ``then`` adds a transform of the aggregated update."""

    name: str  # in tables and records
    client: ClientRule = field(default_factory=ClientRule)
    server: ServerRule = field(default_factory=ServerRule)
    split: SplitRule = field(default_factory=SplitRule)
    uploads: tuple[UploadTransform, ...] = ()  # applied in order to every accepted upload
    transforms: tuple[UpdateTransform, ...] = ()  # applied in order to the aggregated update
    anchor: Anchor = field(default_factory=lambda: Anchor(weight=0))  # whether larger levels train the smallest, too
    level: Literal["own", "smallest", "largest", "largest-only"] = "own"  # which level clients train
    # whether devices use the best of the models that they hold: see ``eval.best_path``; that changes no result
    best_path: bool = field(default=False, repr=False)
    summary: str = ""  # one line for ``incofl list methods``

    def __post_init__(self) -> None:
        names = [transform.name for transform in self.transforms]
        for transform in self.transforms:
            name = transform.name
            if names.count(name) > 1:
                raise ConfigError(f"method: two transforms of {self.name} have the name {name!r}, expected one of each")
            if "/" in name or name in ROW_KEYS:
                raise ConfigError(f"method: got a transform called {name!r}, expected no key of metrics.jsonl and no /")
            if getattr(transform, "needs_shared_model", False) and (self.server.separate or self.level != "own"):
                hint = "expected one server model for all sizes, which this method does not have"
                raise ConfigError(f"method: got {self.name!r}, {hint}: {name} mixes or disturbs its layers")

    def then(self, transform: UpdateTransform) -> "Method":
        """This method with one more update transform."""
        return dataclasses.replace(self, name=f"{self.name}+{transform.name}", transforms=(*self.transforms, transform))

    @property
    def is_baseline(self) -> bool:
        """Whether a fleet can do it without slices of one model, and every client can hold what it trains."""
        return self.level in ("smallest", "largest-only") or (self.server.separate and self.level == "own")

    def check(self, setting: Setting) -> None:
        """Refuses a model or task that the method cannot be used for, with one clear line."""
        if self.split.window != "prefix" and setting.buffers in ("per-level", "by-width") and setting.layout.buffers:
            raise ConfigError(
                f"buffers: got {setting.buffers!r}, expected 'static' or 'average': {self.name} moves a window"
            )
        if self.server.sets_values and (odd := [t.name for t in self.transforms if not _keeps_updates(t)]):
            raise ConfigError(
                f"method: {self.name} sets values, which {odd[0]} would spoil, expected no such transform"
            )
        counting = [transform.name for transform in self.transforms if getattr(transform, "counts_holders", False)]
        if counting and self.server.weighting != "uniform":
            got = f"got {self.server.weighting!r}, expected 'uniform' with {counting[0]}"
            raise ConfigError(f"aggregate.weighting: {got}: every client counts once, whatever examples it claims")
        self.client.check(setting)
        self.server.check(setting)
        self.server.mean.check(self, setting)
        if self.anchor.on and self.split.window != "prefix":
            raise ConfigError(f"method: {self.name} moves what a level holds: there is no smallest path to anchor")
        if self.anchor.on and self.anchor.beyond and self.client.counts_steps:
            why = f"{self.name} counts the steps of a client, of which the smallest path would make fewer"
            raise ConfigError(f"anchor.beyond: got {self.anchor.beyond}, expected 0: {why}")
        if self.anchor.distil:
            setting.need_classes("anchor.distil", "it compares the logits of classes")

    def extend(self, model: torch.nn.Module, layout: Layout, levels: Levels) -> Layout:
        """Adds the method's own layers to the new server model, in place, and returns the layout with them."""
        return self.client.extend(model, self.split.extend(model, layout, levels))

    def smallest_statistics(self, layout: Layout, population: Population, level: int) -> Slice | None:
        """The statistics of the smallest level that clients of a level receive and upload, for they train it, too."""
        if not self.anchor.on or not level or 0 not in population or self.server.buffers == "static":
            return None
        smallest = population[0][0]
        return Slice(only(smallest.index, layout.buffers), only(smallest.shapes, layout.buffers))

    def extra_for_client(self, server: Server, level: int) -> Tensors:
        """What the server sends to a level in addition to the model, in server coordinates."""
        extra = self.server.extra_for_client(server, level)
        held = self.smallest_statistics(server.layout, server.population, level)
        return extra if held is None else extra | {SMALLEST + n: v for n, v in held.look(server.state(0)).items()}

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        """What the uploads of a round do to the server, before update transforms."""
        return self.server.mean.aggregate(self.server, server, self.received(arrivals, server))

    def received(self, arrivals: Iterable[Sequence[Upload]], server: Server) -> Iterator[Sequence[Upload]]:
        """The uploads as the server uses them."""
        context = Context(server.layout, server.round, server.seed)
        for uploads in arrivals:
            for transform in self.uploads:
                if not getattr(transform, "idle", False):
                    uploads = [transform(upload, context) for upload in uploads]
            yield uploads

    @property
    def options(self) -> dict[str, Any]:
        """The options of all parts, or of their fields, by the name of their section in a config."""
        parts: list[Any] = [self.split, self.client, self.server, *self.uploads, *self.transforms]
        parts += [self.anchor] if self.anchor.on else []
        values = [value for part in parts for value in (part, *_fields(part).values()) if has_options(value)]
        found = {value.section: value for value in values}
        for value in values:
            if value != found[value.section]:
                raise ConfigError(f"method: parts of {self.name} have different [{value.section}], expected the same")
        return found

    def with_options(self, chosen: Mapping[str, Any]) -> "Method":
        """This method with other options, by the name of their section; sections of other methods are ignored."""

        def configured(part: Any) -> Any:
            if isinstance(part, tuple):
                return tuple(map(configured, part))
            if has_options(part):
                return chosen.get(part.section, part)
            own = {name: configured(value) for name, value in _fields(part).items() if has_options(value)}
            return dataclasses.replace(part, **own) if own else part

        names = ("split", "client", "server", "uploads", "transforms", *(["anchor"] if self.anchor.on else []))
        return dataclasses.replace(self, **{name: configured(getattr(self, name)) for name in names})


def _keeps_updates(transform: UpdateTransform) -> bool:
    """Whether a transform is the server's step at its default, which changes nothing."""
    step = getattr(transform, "lr", None), getattr(transform, "schedule", None)
    return transform.name == "schedule" and step == (1, "constant")


def _fields(part: Any) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else {}
