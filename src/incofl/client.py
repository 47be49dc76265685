"""A client's turn: the only local training loop, with its hooks, and the evaluation of a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from incofl.errors import ConfigError
from incofl.tensors import Tensors, empty

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains: the config section ``local``.

    Attributes:
        epochs: passes over the client's data in a round.
        batch_size: examples per step.
        optimizer: ``adam`` or ``sgd``, new in every round.
        lr: learning rate.
        momentum: of SGD.
        weight_decay: L2 penalty.
        drop_last: leave out the last, partial batch of an epoch, as the paper's code does.
    """

    epochs: int = 5
    batch_size: int = 64
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("epochs", self.epochs, 1), ("batch_size", self.batch_size, 2)):
            if not least <= value < 2**31:
                raise ConfigError(f"local.{name}: got {value}, expected a whole number >= {least}")
        if self.optimizer not in ("adam", "sgd"):
            raise ConfigError(f"local.optimizer: got {self.optimizer!r}, expected adam or sgd")
        if not self.lr > 0:
            raise ConfigError(f"local.lr: got {self.lr}, expected a number > 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"local.momentum: got {self.momentum}, expected a number in [0, 1)")
        if not self.weight_decay >= 0:
            raise ConfigError(f"local.weight_decay: got {self.weight_decay}, expected a number >= 0")

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimiser for every turn: clients keep no optimiser state between rounds."""
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.lr, weight_decay=self.weight_decay, fused=True)
        return torch.optim.SGD(
            parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=True
        )


@dataclass
class Local:
    """What a client rule may look at and change during one turn."""

    model: nn.Module
    received: Tensors
    settings: LocalSettings
    steps: int = 0


@dataclass(frozen=True)
class ClientRule:
    """The client half of a method. A method overrides the hooks it needs; the loop is the same for all.

    Rules hold hyper-parameters only: whatever changes during a turn lives in ``Local``.
    """

    def begin(self, local: Local) -> None:
        """Before the first step, with the received weights in place."""

    def loss(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one batch."""
        return functional.cross_entropy(local.model(x), y)

    def adjust(self, local: Local) -> None:
        """After the backward pass and before the optimiser's step: change gradients here."""


@dataclass(frozen=True)
class Trained:
    """What local training gives: the update of the parameters (new minus received) and the new buffers."""

    update: Tensors
    buffers: Tensors
    steps: int
    loss: float


def train(
    model: nn.Module,
    received: Tensors,
    batches: Iterable[Batch],
    rule: ClientRule,
    settings: LocalSettings,
    into: Tensors | None = None,
) -> Trained:
    """One client's local training, from the received weights, on batches it draws lazily.

    The update and the new buffers are written ``into`` the given tensors, or into new ones on the CPU.
    """
    # load_state_dict copies into the model, so `received` stays what was sent however the model moves.
    model.load_state_dict(received)
    model.train()
    optimizer = settings.make_optimizer(model.parameters())
    local = Local(model, received, settings)
    rule.begin(local)
    total, examples = torch.zeros(()), 0
    for x, y in batches:
        loss = rule.loss(local, x, y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rule.adjust(local)
        optimizer.step()
        local.steps += 1
        total += loss.detach() * len(y)
        examples += len(y)
    into = {name: empty(value.shape, value.dtype) for name, value in received.items()} if into is None else into
    update = {name: into[name] for name, _ in model.named_parameters()}
    buffers = {name: into[name] for name, _ in model.named_buffers()}
    for name, value in model.state_dict().items():
        into[name].copy_(value - received[name] if name in update else value)
    return Trained(update, buffers, local.steps, float(total) / max(examples, 1))


@dataclass(frozen=True)
class Score:
    """Right answers and summed cross-entropy of a model on test examples; scores of parts of a test set add up."""

    correct: int
    loss_sum: float
    examples: int

    def __add__(self, other: "Score") -> "Score":
        return Score(self.correct + other.correct, self.loss_sum + other.loss_sum, self.examples + other.examples)

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.correct / self.examples

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return self.loss_sum / self.examples


@torch.inference_mode()
def evaluate(model: nn.Module, state: Tensors, batches: Iterable[Batch]) -> Score:
    """Accuracy and mean cross-entropy over all examples; no partial batch is dropped."""
    model.load_state_dict(state)
    model.eval()
    correct, loss, examples = 0, 0.0, 0
    for x, y in batches:
        logits = model(x)
        correct += int((logits.argmax(1) == y).sum())
        loss += float(functional.cross_entropy(logits, y, reduction="sum"))
        examples += len(y)
    return Score(correct, loss, examples)
