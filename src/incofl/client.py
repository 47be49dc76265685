"""A client's turn: the only local training loop, with its hooks, and the evaluation of a model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from incofl.errors import ConfigError
from incofl.inputs import Inputs
from incofl.layout import Layout
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


@dataclass(frozen=True)
class Given:
    """What a client starts a turn from, all in the coordinates of its slice.

    Attributes:
        state: the model that the server sent.
        sent: what the server sent besides, if the method sends something (Scaffold's variate).
        memory: what the client kept from its last turn, if the method keeps something; empty in its first turn.
        labels: how many examples of each class it has.
        round: the 0-based number of the round.
    """

    state: Tensors
    sent: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    labels: Tensor | None = None
    round: int = 0


@dataclass
class Local:
    """What a client rule may look at and change during one turn.

    Attributes:
        model: the module that is trained.
        given: what the turn started from.
        settings: how it trains.
        steps: optimiser's steps so far.
        scratch: for the rule alone.
    """

    model: nn.Module
    given: Given
    settings: LocalSettings
    steps: int = 0
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def received(self) -> Tensors:
        """The model that the server sent."""
        return self.given.state


@dataclass(frozen=True)
class ClientRule:
    """The client half of a method. A method overrides the hooks it needs; the loop is the same for all.

    Rules hold hyper-parameters only: whatever changes during a turn lives in ``Local``.
    """

    def memory(self, layout: Layout) -> frozenset[str]:
        """The entries, by the server's names, that a client keeps from turn to turn."""
        return frozenset()

    def extra(self, layout: Layout) -> frozenset[str]:
        """The entries that a client uploads besides its update and buffers."""
        return frozenset()

    def held(self, layout: Layout) -> Sequence[frozenset[str]]:
        """The entries, once for each copy, that a client holds during its turn besides what every method needs.

        For the estimate of its memory alone.
        """
        return [self.memory(layout)]

    def check(self, model: nn.Module, example: Inputs) -> None:
        """Refuses a model that the method cannot train, with one clear line; ``example`` is a batch without values."""

    def extend(self, model: nn.Module, layout: Layout) -> Layout:
        """Once, on the new server model: the place for layers of the method's own; the layout with them in it."""
        return layout

    def prepare(self, model: nn.Module, layout: Layout) -> None:
        """Once per sub-model, after it has been built: the place for hooks on layers."""

    def begin(self, local: Local) -> None:
        """Before the first step, with the received weights in place."""

    def loss(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one batch."""
        return functional.cross_entropy(local.model(x), y)

    def adjust(self, local: Local) -> None:
        """After the backward pass and before the optimiser's step: change gradients here."""

    def correct(self, local: Local) -> None:
        """After the optimiser's step: change parameters here."""

    def finish(self, local: Local, trained: "Trained") -> tuple[Tensors, Tensors]:
        """After the last step, with update and buffers in place: what is uploaded besides, and what is remembered."""
        return {}, {}

    def length(self, settings: LocalSettings, steps: int) -> float:
        """By what the update is normalised (FedNova); 1: not at all."""
        return 1.0


@dataclass
class Trained:
    """What local training gives.

    Attributes:
        update: of the parameters, new minus received.
        buffers: their new values.
        steps: of the optimiser.
        loss: mean over the examples of all epochs.
        extra: what the method uploads besides.
        memory: what the client keeps for its next turn.
        length: see ``ClientRule.length``.
    """

    update: Tensors
    buffers: Tensors
    steps: int = 0
    loss: float = 0.0
    extra: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    length: float = 1.0


def train(
    model: nn.Module,
    given: Given,
    batches: Iterable[Batch],
    rule: ClientRule,
    settings: LocalSettings,
    into: Trained | None = None,
) -> Trained:
    """One client's local training, from the received weights, on batches it draws lazily.

    What it gives is written ``into`` the tensors of an earlier result, or into new ones on the CPU.
    """
    # load_state_dict copies into the model, so what was sent stays as it was however the model moves.
    model.load_state_dict(given.state)
    model.train()
    optimizer = settings.make_optimizer(model.parameters())
    local = Local(model, given, settings)
    rule.begin(local)
    total, examples = torch.zeros(()), 0
    for x, y in batches:
        loss = rule.loss(local, x, y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rule.adjust(local)
        optimizer.step()
        rule.correct(local)
        local.steps += 1
        total += loss.detach() * len(y)
        examples += len(y)
    parameters = dict(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in given.state}
    trained = Trained(like(parameters), like(buffers)) if into is None else into
    with torch.no_grad():
        for name, parameter in parameters.items():
            trained.update[name].copy_(parameter).sub_(given.state[name].cpu())
        for name, buffer in buffers.items():
            trained.buffers[name].copy_(buffer)
        trained.steps, trained.loss = local.steps, float(total) / max(examples, 1)
        trained.length = rule.length(settings, local.steps)
        for place, values in zip((trained.extra, trained.memory), rule.finish(local, trained), strict=True):
            for name, value in values.items():
                place[name] = value.cpu() if into is None else place[name].copy_(value)
    return trained


def like(tensors: Mapping[str, Tensor]) -> Tensors:
    """New tensors of undefined values on the CPU, of the same shapes."""
    return {name: empty(value.shape, value.dtype) for name, value in tensors.items()}


@dataclass(frozen=True)
class Score:
    """Right answers and summed cross-entropy of a model on test examples; scores of parts of a test set add up.

    Where every position of a text has a class of its own, positions are counted.
    """

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
        examples += y.numel()
    return Score(correct, loss, examples)


@torch.no_grad()
def measure_buffers(model: nn.Module, state: Tensors, batches: Iterable[Tensor]) -> Tensors:
    """Batch-norm statistics of a model as it is evaluated: plain means over the batches."""
    model.load_state_dict(state)
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for x in batches:
        model(x)
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
    return {name: buffer.cpu().clone() for name, buffer in model.named_buffers() if name in state}
