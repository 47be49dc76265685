"""A client's turn: the only local training loop, with its hooks, and the evaluation of a model."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from incofl.errors import ConfigError
from incofl.imports import load_attribute
from incofl.inputs import Inputs, call
from incofl.layout import Layout, frozen_entries, frozen_norms
from incofl.options import options
from incofl.schedule import Schedule
from incofl.split import Slice
from incofl.task import CLASSIFICATION, Score, Task
from incofl.tensors import Tensors, empty

Batch = tuple[Any, Tensor]  # inputs and targets


@options("local")
class LocalSettings(Schedule):
    """How a client trains: the config section ``local``.

    Attributes:
        schedule: of the learning rate over the rounds: ``constant``, ``step`` (times ``decay`` after every
            ``decay_every`` rounds) or ``cosine`` (from ``lr`` to ``decay_to`` times ``lr`` over ``decay_rounds``).
        decay: factor of a step of the learning rate.
        decay_every: number of rounds between two steps.
        decay_to: last value of the cosine, as a share of ``lr``.
        decay_rounds: number of rounds of the cosine; left out, those of the run.
        epochs: passes over the client's data in a round.
        batch_size: examples per step.
        optimizer: ``adam``, ``adamw``, ``sgd``, or your own as ``package.module:attribute``; new in every round.
        lr: learning rate.
        momentum: momentum of SGD.
        nesterov: whether the momentum of SGD is Nesterov's.
        weight_decay: L2 penalty; for AdamW the decoupled decay.
        max_grad_norm: bound of the norm of a step's gradient, or none.
        drop_last: leave out the last, partial batch of an epoch, as the paper's code does.
    """

    epochs: Annotated[int, Ge(1), Lt(2**31)] = 5
    batch_size: Annotated[int, Ge(2), Lt(2**31)] = 64
    optimizer: str = "adam"
    lr: Annotated[float, Gt(0)] = 1e-3
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    nesterov: bool = False
    weight_decay: Annotated[float, Ge(0)] = 0.0
    max_grad_norm: Annotated[float, Gt(0)] | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if ":" not in self.optimizer and self.optimizer not in ("adam", "adamw", "sgd"):
            raise ConfigError(
                f"local.optimizer: got {self.optimizer!r}, expected adam, adamw, sgd or package.module:attribute"
            )
        if self.nesterov and not self.momentum:
            raise ConfigError("local.nesterov: got true, expected local.momentum > 0 with it")

    def in_round(self, round: int) -> Self:
        """The settings with the learning rate of a round."""
        factor = self.factor(round)
        return self if factor == 1 else dataclasses.replace(self, lr=self.lr * factor)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimiser for every turn: clients keep no optimiser state between rounds."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov, fused=True
            )
        if self.optimizer in ("adam", "adamw"):
            kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
            return kind(parameters, lr=self.lr, weight_decay=self.weight_decay, fused=True)
        factory = load_attribute(self.optimizer, "local.optimizer")
        known = inspect.signature(factory).parameters
        wanted = {key: getattr(self, key) for key in ("lr", "momentum", "nesterov", "weight_decay") if key in known}
        made = factory(parameters, **wanted)
        if not isinstance(made, torch.optim.Optimizer):
            kind_name = type(made).__name__
            raise ConfigError(f"local.optimizer: {self.optimizer} made a {kind_name}, expected a torch.optim.Optimizer")
        return made


@dataclass(frozen=True)
class ClientInput:
    """What a client starts a turn from, all in the coordinates of its slice.

    Attributes:
        state: the model that the server sent.
        extra: what the server sent in addition, if the method sends something (Scaffold's variate).
        memory: what the client kept from its last turn, if the method keeps something; empty in its first turn.
        labels: number of its examples of each class; ``None`` for tasks without classes.
        round: number of the round, from 0 on.
    """

    state: Tensors
    extra: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    labels: Tensor | None = None
    round: int = 0


@dataclass(frozen=True)
class Upload:
    """What comes of a client's turn, in the coordinates of its slice.

    Attributes:
        client: the number of the client.
        level: its size.
        slice: the part of the server model that it holds.
        update: of the trained parameters, new minus received.
        buffers: their new values.
        examples: number of its examples.
        steps: number of optimiser steps.
        loss: mean over the examples of all epochs.
        extra: what the method uploads in addition.
        memory: what the client keeps for its next turn: it stays with the client, and no server rule may look at it.
        labels: number of its examples of each class; ``None`` for tasks without classes.
        normaliser: what the update is divided by in the mean; see ``ClientRule.normaliser``.
    """

    client: int = 0
    level: int = 0
    slice: Slice = field(default_factory=lambda: Slice({}, {}))
    update: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    examples: int = 0
    steps: int = 0
    loss: float = 0.0
    extra: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    labels: Tensor | None = None
    normaliser: float = 1.0


@dataclass
class Local:
    """What a client rule may look at and change during one turn.

    Attributes:
        model: the module that is trained.
        given: what the turn started from.
        settings: how it trains, with the learning rate of this round.
        task: what it trains for.
        steps: number of optimiser steps so far.
        scratch: for the rule alone.
    """

    model: nn.Module
    given: ClientInput
    settings: LocalSettings
    task: Task = CLASSIFICATION
    steps: int = 0
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def received(self) -> Tensors:
        """The model that the server sent."""
        return self.given.state

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True)
class Setting:
    """What a method is about to be used for: its parts refuse here what they cannot do.

    Attributes:
        model: the server model, without values.
        example: a batch for it, without values.
        layout: its structure.
        task: what it is trained for.
        buffers: the buffer policy.
        compile: whether clients train compiled models.
    """

    model: nn.Module
    example: Inputs
    layout: Layout
    task: Task = CLASSIFICATION
    buffers: str = "per-level"
    compile: bool = False

    def need_classes(self, who: str, why: str, axis: bool = True) -> None:
        """Refuses a task without classes, and a layout without an ``axis`` of classes."""
        if not self.task.classes:
            raise ConfigError(f"{who}: needs a task with classes, because {why}; the task is {self.task.name}")
        if axis and "classes" not in self.layout.named_axes:
            raise ConfigError(f"{who}: needs an axis named 'classes' in the model's layout, because {why}")


@dataclass(frozen=True)
class ClientRule:
    """The client half of a method. A method overrides the hooks it needs; the loop is the same for all.

    Rules hold hyper-parameters only: whatever changes during a turn lives in ``Local``.
    """

    def memory(self, layout: Layout) -> frozenset[str]:
        """The entries, by the server's names, that a client keeps from turn to turn."""
        return frozenset()

    def extra(self, layout: Layout) -> frozenset[str]:
        """The entries that a client uploads in addition to its update and buffers."""
        return frozenset()

    def held(self, layout: Layout) -> Sequence[frozenset[str]]:
        """The entries, once for each copy, that a client holds in addition to what every method needs.

        Only the estimate of its memory uses them.
        """
        return [self.memory(layout)]

    def check(self, setting: Setting) -> None:
        """Refuses a model or task that the method cannot train, with one clear line."""

    def extend(self, model: nn.Module, layout: Layout) -> Layout:
        """Called once with the new server model: adds layers to it and returns the layout that includes them."""
        return layout

    def prepare(self, model: nn.Module, layout: Layout) -> None:
        """Called once per sub-model, after it has been built: the place for hooks on layers."""

    def begin(self, local: Local) -> None:
        """Called before the first step, with the received weights in place."""

    def loss(self, local: Local, x: Any, y: Tensor) -> Tensor:
        """The loss of one batch; ``x`` is a tensor, a tuple or a dict of tensors, as the data have it."""
        return local.task.loss(call(local.model, x), y)

    def adjust(self, local: Local) -> None:
        """Called after the backward pass and before the optimiser's step: change gradients here."""

    def correct(self, local: Local) -> None:
        """Called after the optimiser's step: change parameters here."""

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        """Called after the last step: returns what is uploaded in addition to the update, and what is remembered."""
        return {}, {}

    def normaliser(self, settings: LocalSettings, steps: int) -> float:
        """What the update is divided by before it is averaged (FedNova's a_i); 1: the plain mean."""
        return 1.0


def train(
    model: nn.Module,
    given: ClientInput,
    batches: Iterable[Batch],
    rule: ClientRule,
    settings: LocalSettings,
    task: Task = CLASSIFICATION,
    into: Upload | None = None,
) -> Upload:
    """One client's local training, from the received weights, on batches that it draws lazily.

    The result is written into the tensors of ``into``, or into new ones on the CPU.
    """
    model.load_state_dict(given.state)  # copies, so what was sent stays as it was however the model moves
    model.train()
    for norm in frozen_norms(model).values():
        norm.eval()  # else its statistics would move
    local = Local(model, given, settings.in_round(given.round), task)
    parameters = local.parameters
    optimizer = local.settings.make_optimizer(parameters.values())
    rule.begin(local)
    total, examples = torch.zeros(()), 0
    for x, y in batches:
        loss = rule.loss(local, x, y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rule.adjust(local)
        if settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters.values(), settings.max_grad_norm)
        optimizer.step()
        rule.correct(local)
        local.steps += 1
        total += loss.detach() * len(y)
        examples += len(y)
    buffers = changing_buffers(model, given.state)
    upload = Upload(update=like(parameters), buffers=like(buffers)) if into is None else into
    with torch.no_grad():
        for name, parameter in parameters.items():
            upload.update[name].copy_(parameter).sub_(given.state[name].cpu())
        for name, buffer in buffers.items():
            upload.buffers[name].copy_(buffer)
        for place, values in zip((upload.extra, upload.memory), rule.finish(local, upload.update), strict=True):
            for name, value in values.items():
                place[name] = value.cpu() if into is None else place[name].copy_(value)
    return dataclasses.replace(
        upload,
        steps=local.steps,
        loss=float(total) / max(examples, 1),
        normaliser=rule.normaliser(settings, local.steps),
    )


def like(tensors: Mapping[str, Tensor]) -> Tensors:
    """New tensors of undefined values on the CPU, of the same shapes."""
    return {name: empty(value.shape, value.dtype) for name, value in tensors.items()}


@torch.inference_mode()
def evaluate(model: nn.Module, state: Tensors, batches: Iterable[Batch], task: Task = CLASSIFICATION) -> Score:
    """The totals of the task's metrics over all examples; no partial batch is dropped."""
    model.load_state_dict(state)
    model.eval()
    score = Score()
    for x, y in batches:
        score += task.score(call(model, x), y)
    return score


@torch.no_grad()
def measure_buffers(model: nn.Module, state: Tensors, batches: Iterable[Inputs]) -> Tensors:
    """Batch-norm statistics of a model as it is evaluated: plain means over the batches."""
    model.load_state_dict(state)
    model.eval()
    fixed = frozen_norms(model).values()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m not in fixed]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for x in batches:
        call(model, x)
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
    return {name: buffer.cpu().clone() for name, buffer in changing_buffers(model, state).items()}


def changing_buffers(model: nn.Module, state: Tensors) -> Tensors:
    """The buffers of a model that are part of its state and not frozen."""
    frozen = frozen_entries(model)
    return {name: buffer for name, buffer in model.named_buffers() if name in state and name not in frozen}
