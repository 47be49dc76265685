"""ScaleFL: sub-models that are both shallower and narrower, with early exits that learn from the last one.

Ilhan, Su and Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023. With logits
o_1 .. o_l of the exits of a level and t = 3, and a divergence that is a mean over batch and classes, its loss is

    sum_j j ( CE(o_j, y) + [j < l] gamma t^2 KL(softmax(o_l / t) || softmax(o_j / t)) ) / (l (l + 1) / 2)

Differences: the original has four levels on ResNet110; for five of ResNet26 exits lie after blocks 5, 7, 8, 10 and 12
and the widths are 0.7, 0.7, 0.7, 0.75 and 1, rounded up, not down. gamma is 0.05 (0 in its commands for CIFAR).
The released code trains the teacher too (``scalefl.train_teacher``), uses the statistics of test batches, has a scaler
before batch norm (neutral but for eps), and evaluates each client on its own test data; here on the whole test set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn import functional

from incofl.client import ClientRule, Local, Setting
from incofl.errors import ConfigError, LayoutError
from incofl.layout import Layout
from incofl.method import Method
from incofl.methods.exits import add_exits, first_blocks, positions_of
from incofl.options import options
from incofl.split import Depths, Kind, Levels, Splitter, WidthRule, shares_of
from incofl.tensors import Inputs, call


@options("scalefl")
class ScaleFL(ClientRule):
    """The exits and their distillation."""

    gamma: Annotated[float, Ge(0)] = 0.05  # weight of the distillation; 0: none
    temperature: Annotated[float, Gt(0)] = 3.0  # temperature of both softmaxes
    # finished rounds before the distillation starts; left out, a quarter of all
    distil_after: Annotated[int, Ge(0)] | None = None
    head_convs: Annotated[int, Ge(0), Le(9)] = 3  # number of convolutions of an exit
    train_teacher: bool = False  # let the distillation train the last exit too, as the released code does

    def for_run(self, rounds: int, epochs: int) -> Self:
        return replace(self, distil_after=rounds // 4) if self.distil_after is None else self

    def check(self, setting: Setting) -> None:
        setting.need_classes("scalefl", "its exits are classifiers")

    def loss(self, local: Local, x: Inputs, y: Tensor) -> Tensor:
        gamma = self.gamma if local.given.round >= (self.distil_after or 0) else 0.0
        return weighted_loss(call(local.model, x), y, gamma, self.temperature, self.train_teacher)


@dataclass(frozen=True)
class ExitRule(WidthRule):
    """The splitting half: a level keeps the blocks before its exit, the exits up to it, and a share of the channels."""

    options: ScaleFL = field(default_factory=ScaleFL)

    def extend(self, model: nn.Module, layout: Layout, levels: Levels) -> Layout:
        """Adds an exit for every level but the last, which has the model's own head."""
        number = levels if isinstance(levels, int) else len(levels)
        positions = exit_positions(len(layout.blocks), number) if layout.blocks else ()
        return add_exits(model, layout, positions, self.options.head_convs)

    def splitter(self, layout: Layout, kind: Kind, levels: Levels, depth: Depths = "full") -> Splitter:
        if depth != "full":
            raise ConfigError(f"split.depth: got {depth!r}, expected none: exits set the depth of a level")
        shares = exit_shares(levels) if isinstance(levels, int) else shares_of(levels)
        splitter = Splitter(shares, tuple(first_blocks(layout, blocks) for blocks in positions_of(layout)))
        splitter.check_sizes(layout)
        return splitter


def exit_positions(blocks: int, levels: int) -> tuple[int, ...]:
    """The number of blocks before each level's exit: evenly spread from two fifths of the model to its end.

    For the twelve blocks of ResNet26 and five levels: 5, 7, 8, 10, 12.
    """
    if levels == 1:
        return (blocks,)
    positions = tuple(round(blocks * (0.4 + 0.6 * level / (levels - 1))) for level in range(levels))
    if len(set(positions)) < levels or positions[0] < 1:
        raise LayoutError(f"split.levels: got {levels} levels, expected fewer: the model has only {blocks} blocks")
    return positions


def exit_shares(levels: int) -> tuple[float, ...]:
    """The share of the channels of each level: 0.7, but 0.75 for the last but one and 1 for the last."""
    return (*[0.7] * (levels - 2), 0.75, 1.0) if levels > 1 else (1.0,)


def weighted_loss(exits: Sequence[Tensor], y: Tensor, gamma: float, t: float, train_teacher: bool = False) -> Tensor:
    """The loss of all exits: the later, the heavier, and the earlier ones learn from the last."""
    total = torch.zeros((), device=y.device)
    teacher = exits[-1] if train_teacher else exits[-1].detach()
    for j, logits in enumerate(exits, start=1):
        loss = functional.cross_entropy(logits, y)
        if gamma and j < len(exits):
            loss = loss + gamma * divergence(teacher, logits, t)
        total = total + j * loss
    return total / (len(exits) * (len(exits) + 1) / 2)


def divergence(teacher: Tensor, student: Tensor, t: float) -> Tensor:
    """t^2 times the mean, over batch and classes, of q (log q - log p)."""
    log_q, log_p = (functional.log_softmax(logits / t, 1) for logits in (teacher, student))
    return (log_q.exp() * (log_q - log_p)).mean() * t**2


scalefl = Method("scalefl", ScaleFL(), split=ExitRule())
