"""A client's turn: the only local training loop, with its hooks."""

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from typing import Annotated, Any, ClassVar, Self

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from incofl.anchor import SmallestPath
from incofl.errors import ConfigError
from incofl.imports import load_attribute
from incofl.layout import Layout, frozen_entries, frozen_norms
from incofl.optimizers import FUSED, Fused, Stepping, can_fuse
from incofl.options import options
from incofl.schedule import Schedule
from incofl.split import Splitter
from incofl.task import CLASSIFICATION, Task
from incofl.tensors import Inputs, Tensors, call, clone, difference
from incofl.upload import Upload as Upload

Batch = tuple[Any, Tensor]  # inputs and targets
Computing = Callable[[], AbstractContextManager[Any]]  # makes the context of forward pass and loss: their precision
SMALL = 2**18  # parameters of a model whose optimiser is kept between turns
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@options("local")
class LocalSettings(Schedule):
    """How a client trains: the config section ``local``."""

    epochs: Annotated[int, Ge(1), Lt(2**31)] = 5  # passes over the client's data in a round
    batch_size: Annotated[int, Ge(2), Lt(2**31)] = 64  # examples per step
    # ``adam``, ``adamw``, ``sgd``, or your own as ``package.module:attribute``, which gets ``lr``, and those of
    # ``momentum``, ``nesterov`` and ``weight_decay`` that are not at their defaults here
    optimizer: str = "adam"
    lr: Annotated[float, Gt(0)] = 1e-3  # learning rate
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9  # momentum of SGD
    nesterov: bool = False  # whether the momentum of SGD is Nesterov's
    weight_decay: Annotated[float, Ge(0)] = 0.0  # L2 penalty; for AdamW the decoupled decay
    max_grad_norm: Annotated[float, Gt(0)] | None = None  # bound of the norm of a step's gradient, or none
    drop_last: bool = False  # leave out the last, partial batch of an epoch, as the paper's code does

    def __post_init__(self) -> None:
        if ":" not in self.optimizer and self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise ConfigError(f"local.optimizer: got {self.optimizer!r}, expected {known} or package.module:attribute")
        if self.nesterov and not self.momentum:
            raise ConfigError("local.nesterov: got true, expected local.momentum > 0 with it")

    def in_round(self, round: int) -> Self:
        """The settings with the learning rate of a round, which may be 0 at the end of a schedule."""
        scheduled = copy.copy(self)
        vars(scheduled).update(
            lr=self.lr * self.factor(round)
        )  # unchecked: 0 cannot be set, but is a turn all the same
        return scheduled

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimiser for every turn: clients keep no optimiser state between rounds."""
        built_in = OPTIMIZERS.get(self.optimizer)
        factory = built_in or load_attribute(self.optimizer, "local.optimizer")
        chosen = ["lr", "momentum", "nesterov", "weight_decay"]
        if not built_in:  # it has defaults of its own
            chosen = [key for key in chosen if key == "lr" or getattr(self, key) != getattr(LocalSettings, key)]
        known = inspect.signature(factory).parameters
        wanted = {key: getattr(self, key) for key in chosen if key in known}
        made = factory(parameters, **wanted, **({"fused": True} if built_in else {}))
        if not isinstance(made, torch.optim.Optimizer):
            kind = type(made).__name__
            raise ConfigError(f"local.optimizer: {self.optimizer} made a {kind}, expected a torch.optim.Optimizer")
        return made


@dataclass(frozen=True)
class ClientInput:
    """What a client starts a turn from, all in the coordinates of its slice."""

    state: Tensors  # the model that the server sent
    extra: Tensors = field(default_factory=dict)  # what the server sent in addition (Scaffold's variate)
    memory: Tensors = field(default_factory=dict)  # what the client kept from its last turn
    labels: Tensor | None = None  # number of its examples of each class; none for tasks without classes
    round: int = 0  # from 0 on


@dataclass
class Local:
    """What a client rule may look at and change during one turn."""

    model: nn.Module
    given: ClientInput
    settings: LocalSettings  # with the learning rate of this round
    task: Task = CLASSIFICATION
    steps: int = 0  # of the optimiser, so far
    scratch: dict[str, Any] = field(default_factory=dict)  # for the rule alone

    @property
    def received(self) -> Tensors:
        """The model that the server sent."""
        return self.given.state

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained."""
        return trained_parameters(self.model)


@dataclass(frozen=True)
class Setting:
    """What a method is about to be used for: its parts refuse what they cannot do."""

    model: nn.Module  # the server model, without values
    example: Inputs  # a batch for it, without values
    layout: Layout
    task: Task = CLASSIFICATION
    buffers: str = "per-level"  # the buffer policy
    compile: bool = False

    def need_classes(self, who: str, why: str, axis: bool = True) -> None:
        """Refuses a task without classes, and a layout without an ``axis`` of classes."""
        if not self.task.classes:
            raise ConfigError(f"{who}: needs a task with classes, because {why}; the task is {self.task.name}")
        if axis and "classes" not in self.layout.named_axes:
            raise ConfigError(f"{who}: needs an axis named 'classes' in the model's layout, because {why}")


@dataclass(frozen=True)
class ClientRule:
    """The client half of a method: hooks of the one loop, and hyper-parameters. What changes is in ``Local``."""

    # Whether the hooks that a class defines also take clients side by side (``engine.vectorise``): ``loss`` is then a
    # function of parameters and batch alone, and the others treat every element of a tensor by itself, whose first
    # dimension may be the clients; a memory that a client does not have yet may be zeros.
    stacks: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = False  # whether what it makes of an update depends on the number of steps

    def memory(self, layout: Layout) -> frozenset[str]:
        """The entries, by the server's names, that a client keeps from turn to turn."""
        return frozenset()

    def extra(self, layout: Layout) -> frozenset[str]:
        """The entries that a client uploads in addition to its update and buffers."""
        return frozenset()

    def held(self, layout: Layout) -> Sequence[frozenset[str]]:
        """The entries, once for each copy, that count in the estimate of a client's memory in addition to the usual."""
        return [self.memory(layout)]

    def check(self, setting: Setting) -> None:
        """Refuses a model or task that the method cannot train, with one clear line."""

    def extend(self, model: nn.Module, layout: Layout) -> Layout:
        """Called once with the new server model: adds layers to it and returns the layout that includes them."""
        return layout

    def prepare(self, model: nn.Module, layout: Layout) -> None:
        """Called once per sub-model, after it has been built: the place for hooks on layers."""

    def deliver(self, model: nn.Module, layout: Layout) -> None:
        """Called with a trained sub-model that leaves the run: the place for hooks that act in evaluation, too."""

    def nest(self, model: nn.Module, layout: Layout, splitter: Splitter, level: int) -> None:
        """Called once per sub-model with the splitter that cut it and its level: the place for models inside it."""

    def passes(self, level: int) -> Sequence[float]:
        """How often, on average, a step of a level computes the path of each level up to its own."""
        return [0.0] * level + [1.0]

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


class Trainee:
    """A module for many turns: what follows from it alone is found once."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, trained_parameters(model)
        self._plain, frozen = all(map(_loads_plainly, model.modules())), frozen_entries(model)
        state = model.state_dict()
        held = [(p, table) for p, m in model.named_modules() for table in (m._parameters, m._buffers)]
        # By name, the table of a layer that holds an entry: a layer may put another tensor there.
        self._tables = {n: (t, key) for p, t in held for key in t if (n := f"{p}.{key}".removeprefix(".")) in state}
        self._changing = [name for name, _ in model.named_buffers() if name in state and name not in frozen]
        self._fixed = list(frozen_norms(model).values())
        self._fused: Fused | None = None
        self._fits = can_fuse(list(self.parameters.values()))
        self._small = sum(parameter.numel() for parameter in self.parameters.values()) <= SMALL
        self._checked: Tensors | None = None  # the last state that fitted
        self._places: list[tuple[dict[str, Any], str]] = []  # where its values go
        self._train()

    def entry(self, name: str) -> Tensor:
        """A tensor of the state."""
        table, key = self._tables[name]
        value: Tensor = table[key]
        return value

    @torch.no_grad()
    def load(self, state: Tensors) -> None:
        """Copies, so what was sent stays as it was however the model moves."""
        if state is not self._checked:
            same = self._plain and state.keys() == self._tables.keys()
            fits = same and all(self.entry(name).shape == value.shape for name, value in state.items())
            self._checked = state if fits else None
            self._places = [self._tables[name] for name in state] if fits else []
        if self._checked is not None:
            torch._foreach_copy_([table[key] for table, key in self._places], list(state.values()))
        else:
            self.model.load_state_dict(state)
        if not self.model.training:  # it has been evaluated
            self._train()

    def optimizer(self, settings: LocalSettings) -> Stepping:
        """An optimiser without a past: clients keep none between rounds."""
        parameters = list(self.parameters.values())
        if settings.optimizer not in FUSED or not self._fits:
            return settings.make_optimizer(parameters)
        kind = FUSED[settings.optimizer]
        made = self._fused if type(self._fused) is kind else kind(parameters)
        made.begin(settings.lr, settings.momentum, settings.nesterov, settings.weight_decay)
        self._fused = made if self._small else None  # else its memory had better be free between turns
        return made

    def changing_buffers(self, state: Tensors) -> Tensors:
        """The buffers that are part of its state and not frozen."""
        return {name: self.entry(name) for name in self._changing if name in state}

    def _train(self) -> None:
        self.model.train()
        for norm in self._fixed:
            norm.eval()  # else its statistics would move


def _loads_plainly(module: nn.Module) -> bool:
    """Whether to load a state into a layer is to copy its tensors, and nothing else."""
    hooks = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    return not any(hooks) and type(module)._load_from_state_dict.__module__.startswith("torch.")


def train(
    model: nn.Module | Trainee,
    given: ClientInput,
    batches: Iterable[Batch],
    rule: ClientRule,
    settings: LocalSettings,
    task: Task = CLASSIFICATION,
    smallest: SmallestPath | None = None,
    computing: Computing = nullcontext,
    further: Iterable[Batch] = (),
) -> Upload:
    """One client's local training, of its model and perhaps of the ``smallest`` path in it.

    In ``further`` batches, after the others, the smallest path stays as it is.
    """
    trainee = model if isinstance(model, Trainee) else Trainee(model)
    model, parameters = trainee.model, trainee.parameters
    trainee.load(given.state)
    local = Local(model, given, settings.in_round(given.round), task)
    vars(local)["parameters"] = parameters
    optimizer = trainee.optimizer(local.settings)
    rule.begin(local)
    if smallest is not None:
        smallest.begin(given.extra)
    total, counted = torch.zeros(()), 0
    for (x, y), held in chain(zip(batches, repeat(None)), zip(further, repeat(smallest))):
        if held is not None:
            held.hold(model)  # as it is now
        if not (count := task.count(y)):
            continue  # nothing to learn from: the loss, a mean over nothing, would be NaN
        with computing():  # anew for every batch: inside, torch keeps weights that it has converted
            loss = rule.loss(local, x, y)
            added = None if smallest is None or held is not None else smallest.loss(model, task, x, y, local.steps)
        optimizer.zero_grad()
        if smallest is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        else:
            loss = smallest.backward(loss, added, model)
        rule.adjust(local)
        if (most := settings.max_grad_norm) is not None:
            nn.utils.clip_grad_norm_(parameters.values(), most) if smallest is None else smallest.clip(model, most)
        optimizer.step()
        rule.correct(local)
        if held is not None:
            held.hold(model)  # an optimiser's momentum may have moved it
        local.steps += 1
        total += loss.detach() * count
        counted += count
    with torch.no_grad():
        update = difference(parameters, given.state)
        extra, memory = (clone(values) for values in rule.finish(local, update))
    return Upload(
        update=update,
        buffers=clone(trainee.changing_buffers(given.state)),
        steps=local.steps,
        loss=float(total) / max(counted, 1),
        extra=extra,
        memory=memory,
        normaliser=rule.normaliser(settings, local.steps),
        smallest={} if smallest is None else clone(smallest.statistics),
    )


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def changing_buffers(model: nn.Module, state: Tensors) -> Tensors:
    """The buffers of a model that are part of its state and not frozen."""
    frozen = frozen_entries(model)
    return {name: buffer for name, buffer in model.named_buffers() if name in state and name not in frozen}
