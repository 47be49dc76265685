"""ScaleFL: sub-models that are both shallower and narrower, with early exits that learn from the last one.

Ilhan, Su and Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023. A level holds
the first blocks of the model up to its exit, the exits before, and the first channels of every layer. Its loss, with
logits o_1 .. o_l of its exits and t = 3:

    sum_j j ( CE(o_j, y) + [j < l] gamma t^2 KL(softmax(o_l / t) || softmax(o_j / t)) ) / (l (l + 1) / 2)

1. An exit is three 3x3 convolutions with batch norm at the width of its stage, pooling and a linear layer; the last
   exit is the model's own head.
2. The divergence is a mean over batch and classes, as in the released code; the teacher is not trained by it.
3. Distillation starts after a quarter of the rounds.
4. Every position is averaged over the clients that hold it, all alike.
5. A level is evaluated at its last exit. With InCo, trunk convolutions are mixed, exits are not.

Differences: the original has four levels on ResNet110 and other networks; for the five levels of ResNet26 the exits lie
after blocks 5, 7, 8, 10 and 12 and the widths are 0.7, 0.7, 0.7, 0.75 and 1. Widths are rounded up, not down. gamma is
0.05 (0 in the authors' commands for CIFAR, 0.05 for text); the released code trains the teacher too
(``scalefl.train_teacher``). Batch-norm statistics follow the buffer policy; the released code uses those of test
batches. Its scaler before batch norm, which changes nothing but the effect of eps, is left out. It sends clients the
blocks behind their exit too, untrained, and evaluates each client on test data of its own; here on the whole test set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from incofl.client import ClientRule, Local
from incofl.errors import ConfigError
from incofl.method import Method


@dataclass(frozen=True)
class ScaleFL(ClientRule):
    """The client half: the config section ``scalefl``.

    Attributes:
        gamma: weight of the distillation; 0: none.
        temperature: of both softmaxes.
        distil_after: finished rounds before the distillation starts; left out, a quarter of all.
        head_convs: convolutions of an exit.
        train_teacher: let the distillation train the last exit too, as the released code does.
    """

    gamma: float = 0.05
    temperature: float = 3.0
    distil_after: int | None = None
    head_convs: int = 3
    train_teacher: bool = False

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ConfigError(f"scalefl.gamma: got {self.gamma}, expected a number >= 0")
        if not self.temperature > 0:
            raise ConfigError(f"scalefl.temperature: got {self.temperature}, expected a number > 0")
        if self.distil_after is not None and not self.distil_after >= 0:
            raise ConfigError(f"scalefl.distil_after: got {self.distil_after}, expected a whole number >= 0 or none")
        if not 0 <= self.head_convs <= 9:
            raise ConfigError(f"scalefl.head_convs: got {self.head_convs}, expected a whole number from 0 to 9")

    def loss(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """All exits."""
        distil = self.gamma > 0 and local.given.round >= (self.distil_after or 0)
        gamma = self.gamma if distil else 0.0
        return weighted_loss(local.model(x), y, gamma, self.temperature, self.train_teacher)


def weighted_loss(
    exits: Sequence[Tensor], y: Tensor, gamma: float, temperature: float, train_teacher: bool = False
) -> Tensor:
    """The loss of all exits: the later, the heavier, and the earlier ones learn from the last."""
    total = torch.zeros((), device=y.device)
    teacher = exits[-1] if train_teacher else exits[-1].detach()
    for j, logits in enumerate(exits, start=1):
        loss = functional.cross_entropy(logits, y)
        if gamma and j < len(exits):
            loss = loss + gamma * divergence(teacher, logits, temperature)
        total = total + j * loss
    return total / (len(exits) * (len(exits) + 1) / 2)


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """t^2 times the mean, over batch and classes, of q (log q - log p)."""
    log_q, log_p = (functional.log_softmax(logits / temperature, 1) for logits in (teacher, student))
    return (log_q.exp() * (log_q - log_p)).mean() * temperature**2


scalefl = Method(
    "scalefl",
    "ScaleFL: fewer blocks and fewer channels, with early exits",
    ScaleFL(),
    extensible=True,
    split="hetero",
    exits=True,
)
