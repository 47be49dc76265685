"""FIARSE: a client trains the entries of largest magnitude, wherever in the model they are.

Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", NeurIPS 2024. A
level of share c holds the k = c n largest of the n entries of all matrices and kernels, by the values that the server
has at the start of a round; the others are zero in its model, in training and in evaluation. With theta the smallest
magnitude that a client received, it computes with

    w 1[|w| >= theta]        and multiplies the gradient of w by        1 + 2 theta |w| / (|w| + theta)^2,

which stands for the slope of the step at theta. The server averages each entry over the clients that held it.

The cost: entries are zero, not absent. A level sends, holds and computes the whole model, whatever its share, and
``incofl plan`` counts it so. What the share saves is bytes, for who compresses zeros, which is not done here.

Differences: biases are never zero, nor is anything of a norm layer, which the original does not mask either. A level
that holds all has no threshold. The original takes a change of exactly 0 for an entry that was not held.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from incofl.aggregate import CoveredMean
from incofl.client import ClientRule, Local, Setting, Upload
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.options import options
from incofl.server import Changes, Server
from incofl.split import Depths, Drawn, Kind, Levels, Slice, Splitter, WidthRule, Window, cut, kept, make_splitter
from incofl.tensors import Tensors, call

Threshold = Literal["model", "layer"]
SPARSE = "fiarse_slice"  # the attribute of a client's module that says which of its entries can be zero


@dataclass(frozen=True)
class SparseSlice(Slice):
    """The whole of every tensor, but of some only the largest entries: the others are zero."""

    share: float = 1.0
    sparse: frozenset[str] = frozenset()  # of which tensors
    threshold: Threshold = "model"
    round_down: bool = False

    def masks(self, full: Mapping[str, Tensor]) -> Tensors:
        """Which entries of a server-sized state are held, where not all are."""
        names = sorted(self.sparse & full.keys()) if self.share < 1 else []
        groups = [names] if self.threshold == "model" else [[name] for name in names]
        return {name: mask for group in groups for name, mask in self._masks({n: full[n] for n in group})}

    def _masks(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if values:
            sizes = [value.numel() for value in values.values()]
            every = torch.cat([value.flatten() for value in values.values()])
            chosen = torch.split(largest(every, kept(len(every), self.share, self.round_down)), sizes)
            yield from ((name, mask.view(values[name].shape)) for name, mask in zip(values, chosen, strict=True))

    def look(self, full: Mapping[str, Tensor]) -> Tensors:
        return super().look(full) | {n: torch.where(mask, full[n], 0) for n, mask in self.masks(full).items()}


def largest(values: Tensor, count: int) -> Tensor:
    """Where the ``count`` entries of largest magnitude are; the first ones among equals."""
    sizes = values.abs()
    threshold = sizes.kthvalue(len(sizes) - count + 1).values
    chosen = sizes > threshold
    equal = torch.nonzero(sizes == threshold).flatten()
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen


@dataclass(frozen=True)
class SparseSplitter(Splitter):
    """Levels that hold a share of the entries of all matrices and kernels."""

    threshold: Threshold = "model"

    def slice(self, layout: Layout, level: int, round: int = 0, client: int | None = None, drawn: Drawn = ()) -> Slice:
        whole, share = cut(layout, self.blocks(layout, level)), self.shares[level]
        return SparseSlice(
            **vars_of(whole), share=share, sparse=matrices(layout), threshold=self.threshold, round_down=self.round_down
        )


def vars_of(slice_: Slice) -> dict[str, Any]:
    """The fields of a slice."""
    return {f.name: getattr(slice_, f.name) for f in dataclasses.fields(slice_)}


def matrices(layout: Layout) -> frozenset[str]:
    """The trained matrices and kernels."""
    return frozenset(name for name in layout.parameters if len(layout.shapes[name]) > 1)


@options("fiarse")
class Fiarse:
    """Which entries a level holds."""

    # what the largest entries are chosen among: those of the whole ``model``, or of each ``layer`` by itself
    threshold: Threshold = "model"


@dataclass(frozen=True)
class FiarseRule(WidthRule):
    """Splitting by magnitude: levels are shares of the entries, not of the channels."""

    options: Fiarse = field(default_factory=Fiarse)

    @property
    def window(self) -> Window:
        return "largest"

    def splitter(self, layout: Layout, kind: Kind, levels: Levels, depth: Depths = "full") -> Splitter:
        made = make_splitter(layout, kind, levels, depth, self.window)
        return SparseSplitter(made.shares, made.depths, made.window, threshold=self.options.threshold)


@dataclass(frozen=True)
class FiarseClient(ClientRule):
    """Trains what is above the threshold."""

    stacks: ClassVar[bool] = False
    options: Fiarse = field(default_factory=Fiarse)

    def held(self, layout: Layout) -> Sequence[frozenset[str]]:
        return [matrices(layout)]  # with zeros, beside the parameters

    def check(self, setting: Setting) -> None:
        if setting.compile:
            raise ConfigError("engine.compile: got true, expected false: fiarse computes with other weights")

    def nest(self, model: nn.Module, layout: Layout, splitter: Splitter, level: int) -> None:
        vars(model)[SPARSE] = splitter.slice(layout, level)

    def begin(self, local: Local) -> None:
        sparse: SparseSlice = vars(local.model)[SPARSE]
        names = sparse.sparse if sparse.share < 1 else frozenset[str]()
        local.scratch["thresholds"] = self._thresholds(local.received, names)

    def _thresholds(self, received: Tensors, names: Set[str]) -> Tensors:
        """The smallest magnitude, not 0, that a client received."""
        lowest = {n: torch.where(received[n] == 0, torch.inf, received[n].abs()).min() for n in names}
        if self.options.threshold == "model" and lowest:
            return dict.fromkeys(lowest, torch.stack(list(lowest.values())).min())
        return lowest

    def loss(self, local: Local, x: Any, y: Tensor) -> Tensor:
        weights = {n: torch.where(w.abs() >= t, w, 0) for n, w, t in _above(local)}
        if not weights:
            return super().loss(local, x, y)
        return local.task.loss(call(functools.partial(_computed, local.model, weights), x), y)

    @torch.no_grad()
    def adjust(self, local: Local) -> None:
        for _, w, t in _above(local):
            if w.grad is not None:
                size = w.abs()
                w.grad.mul_(1 + 2 * t * size / (size + t).square())


def _above(local: Local) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """The parameters that have a threshold, with it."""
    return ((name, local.parameters[name], t) for name, t in local.scratch["thresholds"].items())


def _computed(model: nn.Module, weights: Tensors, *inputs: Any, **named: Any) -> Any:
    return functional_call(model, weights, inputs, named)


@dataclass(frozen=True)
class FiarseServer(ServerRule):
    """The covered mean, entry by entry."""

    only_means: ClassVar[bool] = False  # it corrects the mean by who held what

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        masks, weights = dict[int, Tensors](), dict[int, float]()

        def own(upload: Upload) -> Upload:
            """A client speaks for the entries that it holds."""
            if (level := upload.level) not in masks:
                held = upload.slice
                masks[level] = held.masks(server.state(level)) if isinstance(held, SparseSlice) else {}
            weights[level] = weights.get(level, 0.0) + self.weight(upload)
            update = {n: torch.where(mask, upload.update[n], 0) for n, mask in masks[level].items()}
            return dataclasses.replace(upload, update=upload.update | update)

        changes = super().aggregate(server, ([own(upload) for upload in uploads] for uploads in arrivals))
        values, weight, squares = dict(changes.shared.values), dict(changes.shared.weight), dict(changes.squares)
        for name in {name for table in masks.values() for name in table}:
            total = weight[name]  # of all, over which the mean is one so far
            weight[name] = sum(
                (masks[level].get(name, torch.ones(())).to(total.dtype) * count for level, count in weights.items()),
                torch.zeros_like(total),
            )
            share = torch.where(weight[name] > 0, total / weight[name], 0)
            for table in (values, squares):
                if name in table:
                    table[name] = table[name] * share.to(table[name].dtype)
        return dataclasses.replace(changes, shared=CoveredMean(values, weight), squares=squares)


fiarse = Method("fiarse", FiarseClient(), FiarseServer(buffers="static"), FiarseRule())
