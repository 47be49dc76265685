"""ReeFL: a ViT whose exits share one classifier, which sees the class tokens of all exits so far.

Lee et al., "Recurrent Early Exits for Federated Learning with Heterogeneous Clients", ICML 2024. The logits of exit k
come from a token that attends, in one transformer layer, to the class tokens of the exits 1 .. k. With exits 1 .. d a
client's loss is

    sum_k CE(o_k, y)  +  lambda sum_{j != t} KL(softmax(o_t) || softmax(o_j)),

where t is the exit whose running loss is the lowest: 0.8 times the old, 0.2 times the new. It is not trained by what it
teaches. lambda rises as in DepthFL.

Differences: there is an exit for each level, as in ``depthfl``, not after every block. What the classifier makes of a
class token is not fed back into the model. The running loss starts anew in every turn. The released code clips the
values of gradients at 1 and trains with SGD from 0.05 to 0.001 along a cosine (``[local]``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Self

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional

from incofl.client import ClientRule, Local, Setting
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import Method
from incofl.methods.depthfl import ExitSplit, depth_positions, risen
from incofl.options import options
from incofl.split import Levels
from incofl.tensors import Inputs, call


@options("reefl")
class ReeFL(ClientRule):
    """The exits and what the best one teaches the others."""

    distil: Annotated[float, Ge(0)] = 1.0  # factor of the distillation; 0: none
    # rounds after which it has its full weight; left out, three tenths of all
    rise: Annotated[int, Ge(1)] | None = None
    keep: Annotated[float, Ge(0), Lt(1)] = 0.8  # share of the old in the running loss of an exit

    def for_run(self, rounds: int, epochs: int) -> Self:
        return replace(self, rise=max(1, round(0.3 * rounds))) if self.rise is None else self

    def check(self, setting: Setting) -> None:
        setting.need_classes("reefl", "its exits are classifiers")

    def loss(self, local: Local, x: Inputs, y: Tensor) -> Tensor:
        exits: list[Tensor] = call(local.model, x)
        losses = torch.stack([local.task.loss(logits, y) for logits in exits])
        now, before = losses.detach(), local.scratch.get("running")
        running = now if before is None else self.keep * before + (1 - self.keep) * now
        local.scratch["running"] = running
        if not self.distil or len(exits) == 1:
            return losses.sum()
        weight = self.distil * risen(local.given.round, self.rise or 1)
        return losses.sum() + weight * taught(exits, int(running.argmin()))


def taught(exits: Sequence[Tensor], teacher: int) -> Tensor:
    """The divergences of all other exits from a teacher, summed; each a mean over the batch."""
    log_q = functional.log_softmax(exits[teacher].detach(), 1)
    others = [functional.log_softmax(logits, 1) for at, logits in enumerate(exits) if at != teacher]
    return torch.stack([(log_q.exp() * (log_q - log_p)).sum(1).mean() for log_p in others]).sum()


class SharedExitRule(ExitSplit):
    """The splitting half: a level keeps the blocks before its exit, and the classifier that all share."""

    def extend(self, model: nn.Module, layout: Layout, levels: Levels) -> Layout:
        add: Callable[[tuple[int, ...]], Layout] | None = getattr(model, "add_shared_exit", None)
        if add is None:
            hint = "expected a ViT or a model with a method add_shared_exit(positions)"
            raise ConfigError(f"model.name: {type(model).__name__} cannot have a shared exit, {hint}")
        return add(depth_positions(layout, levels))


reefl = Method("reefl", ReeFL(), split=SharedExitRule())
