"""DepthFL: sub-models that end early, each with the classifiers of all smaller ones, which teach each other.

Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023. A client whose model has the
exits 1 .. d with logits o_1 .. o_d trains all of them:

    sum_i CE(o_i, y)  +  lambda / (d - 1) sum_i sum_{j != i} KL(softmax(o_j) || softmax(o_i)),

where o_j is not trained by what it teaches, and lambda rises over the rounds t: exp(-5 (1 - min(t, T) / T)^2). The
server averages each tensor over those that hold it. A model answers with the mean of the logits of its exits.

Differences: exits lie at the ends of stages if there are as many levels, else evenly over the blocks. An exit is that
of ``exits.py`` or a ResNet's own, not the original's branch with attention. T is 300 of 1000 rounds there, and the same
share here. The original adds FedDyn (``depthfl.alpha = 0.1``); it is off here, so that methods differ in one thing.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Self

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional

from incofl.client import ClientRule, Local, Setting, Upload
from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.methods.exits import add_exits, first_blocks, positions_of
from incofl.methods.feddyn import FedDyn, FedDynServer
from incofl.options import options
from incofl.server import Changes, Server
from incofl.split import Depths, Kind, Levels, SplitRule, Splitter
from incofl.tensors import Inputs, Tensors, call


@options("depthfl")
class DepthFL(ClientRule):
    """The exits and what they teach each other."""

    distil: Annotated[float, Ge(0)] = 1.0  # factor of the distillation; 0: none
    # rounds after which it has its full weight; left out, three tenths of all
    rise: Annotated[int, Ge(1)] | None = None
    mean: bool = True  # evaluate the mean of all exits of a level, else its last
    head_convs: Annotated[int, Ge(0), Le(9)] = 1  # number of convolutions of a ResNet's exit
    alpha: Annotated[float, Ge(0)] = 0.0  # strength of FedDyn's regularisation; 0: none

    def for_run(self, rounds: int, epochs: int) -> Self:
        return replace(self, rise=max(1, round(0.3 * rounds))) if self.rise is None else self

    def check(self, setting: Setting) -> None:
        setting.need_classes("depthfl", "its exits are classifiers")

    def loss(self, local: Local, x: Inputs, y: Tensor) -> Tensor:
        exits: list[Tensor] = call(local.model, x)
        total = torch.stack([local.task.loss(logits, y) for logits in exits]).sum()
        if self.distil and len(exits) > 1:
            total = total + self.distil * risen(local.given.round, self.rise or 1) * mutual(exits)
        return total

    @property
    def regularised(self) -> FedDyn | None:
        """FedDyn, if it is on."""
        return FedDyn(alpha=self.alpha) if self.alpha else None

    def memory(self, layout: Layout) -> frozenset[str]:
        return self.regularised.memory(layout) if self.regularised else frozenset()

    def adjust(self, local: Local) -> None:
        if self.regularised:
            self.regularised.adjust(local)

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        return self.regularised.finish(local, update) if self.regularised else ({}, {})


def risen(round: int, rise: int) -> float:
    """Lambda of a round, which starts at exp(-5) and ends at 1."""
    return math.exp(-5 * (1 - min(round, rise) / rise) ** 2)


def mutual(exits: Sequence[Tensor]) -> Tensor:
    """The mean divergence of each exit from all others, summed over the exits; a mean over the batch."""
    logs = [functional.log_softmax(logits, 1) for logits in exits]
    pairs = itertools.permutations(logs, 2)
    # KL(q || p) of a student p, with its mean over the batch and, where there are several, positions
    parts = [(log_q.detach().exp() * (log_q.detach() - log_p)).sum(1).mean() for log_q, log_p in pairs]
    return torch.stack(parts).sum() / (len(exits) - 1)


class ExitSplit(SplitRule):
    """Splitting of a model with exits: a level keeps the blocks before its own, and the exits up to it."""

    def splitter(self, layout: Layout, kind: Kind, levels: Levels, depth: Depths = "full") -> Splitter:
        if kind not in ("stage", "layer"):
            raise LayoutError(f"split.kind: got {kind!r}, expected 'stage' or 'layer': exits leave out blocks")
        depths = tuple(first_blocks(layout, blocks) for blocks in positions_of(layout))
        return Splitter((1.0,) * len(depths), depths)


@dataclass(frozen=True)
class DepthRule(ExitSplit):
    """The splitting half, which adds the exits."""

    options: DepthFL = field(default_factory=DepthFL)

    def extend(self, model: nn.Module, layout: Layout, levels: Levels) -> Layout:
        positions = depth_positions(layout, levels) if layout.blocks else ()
        return add_exits(model, layout, positions, self.options.head_convs, "mean" if self.options.mean else "last")


def depth_positions(layout: Layout, levels: Levels) -> tuple[int, ...]:
    """The number of blocks of each level: the ends of the stages, or evenly spread, or as a list says."""
    total = len(layout.blocks)
    if not isinstance(levels, int):
        wanted = tuple(entry for entry in levels if isinstance(entry, int))
        if len(wanted) != len(levels) or wanted[-1] != total or list(wanted) != sorted(set(wanted)) or wanted[0] < 1:
            expected = f"numbers of blocks from small to large, the last one {total}"
            raise LayoutError(f"split.levels: got {list(levels)}, expected {expected}")
        return wanted
    if levels == len(layout.stages):
        return tuple(itertools.accumulate(layout.depth))
    if levels > total:
        raise LayoutError(f"split.levels: got {levels} levels, expected fewer: the model has only {total} blocks")
    return tuple(round(total * (level + 1) / levels) for level in range(levels))


@dataclass(frozen=True)
class DepthServer(ServerRule):
    """The server half: the covered mean, with FedDyn if it is on."""

    options: DepthFL = field(default_factory=DepthFL)

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        if not (own := self.options.regularised):
            return super().aggregate(server, arrivals)
        common: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(ServerRule)}
        return FedDynServer(**common, options=own).aggregate(server, arrivals)


depthfl = Method("depthfl", DepthFL(), DepthServer(), DepthRule())
