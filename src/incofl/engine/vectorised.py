"""Clients side by side: those of one level train as one batched computation whose first dimension are the clients.

``torch.func.vmap`` makes of one client's forward pass that of a stack of models; the gradient of the sum of their
losses is every client's own gradient, and optimisers work element by element anyway. Clients are ordered by their
number of steps, so that those who still train are the first k of the stack. A shorter batch is padded with its first
example, which the loss and batch norm leave out. Draws are those of a turn: the same batches, and dropout from each
client's own seed. What cannot be done this way is ``Declined``, with the reason.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from incofl.client import ClientInput, ClientRule, Local, Trainee, changing_buffers, trained_parameters
from incofl.data.pipeline import as_target
from incofl.engine.federation import Federation, Job
from incofl.engine.stacked_batches import Declined, Step, count_labels, steps_of
from incofl.engine.stacked_layers import Side, draws, with_own_layers
from incofl.optimizers import FUSED, can_fuse
from incofl.seeds import Purpose, torch_rng
from incofl.task import TASKS, Task
from incofl.tensors import Inputs, Tensors, map_inputs, one_thread
from incofl.upload import UploadStack


@dataclass(frozen=True)
class StackJob:
    """The turns of clients of one level, side by side, those with the most steps first."""

    jobs: tuple[Job, ...]

    def __str__(self) -> str:
        return f"{len(self.jobs)} clients, level {self.jobs[0].level}"


def declined(federation: Federation) -> str | None:
    """Why the clients of a federation cannot train side by side, as far as that does not depend on the model."""
    f, method = federation, federation.method
    if not stackable(method.client):
        return f"{method.name} has a client rule that looks at single clients"
    if method.anchor.on:
        return f"{method.name} trains a second path in each model"
    if f.splitter.by_client:
        return f"{method.name} gives each client a slice of its own"
    if f.local.optimizer not in FUSED:
        return f"local.optimizer is {f.local.optimizer}, not one of {', '.join(FUSED)}"
    if f.compile or f.device != "cpu":
        return "engine.compile is on" if f.compile else f"engine.device is {f.device}"
    return None


def stackable(rule: ClientRule) -> bool:
    """Whether every class that says what a rule does says that its hooks take stacks, too."""
    hooks = {"begin", "loss", "adjust", "correct", "finish", "prepare", "nest"}
    return all(vars(kind).get("stacks", False) for kind in type(rule).__mro__ if hooks & vars(kind).keys())


class Vectorised:
    """The stacked training of a level's module."""

    def __init__(self, module: nn.Module, federation: Federation) -> None:
        """Tries two clients and declines the module if that fails, whatever it is that cannot be batched."""
        self._federation, self._side = federation, Side()
        self._module = Trainee(with_own_layers(module, self._side)).model
        self._trained = trained_parameters(self._module).keys()
        if not can_fuse(list(trained_parameters(self._module).values())):
            raise Declined("its parameters are of several types")
        self._try()

    def train(
        self, jobs: Sequence[Job], state: Tensors, extra: Tensors, memories: Sequence[Tensors] | None = None
    ) -> UploadStack:
        """The turns of some clients from what they received; what each remembers is empty in its first turn."""
        f, first = self._federation, jobs[0]
        parts = [f.partition[job.client] for job in jobs]
        drawing = jobs if draws(self._module) else ()
        self._side.generators = [torch_rng(f.seed, Purpose.LAYERS, job.round, job.client) for job in drawing]
        given = ClientInput(
            state={name: value.expand(len(jobs), *value.shape) for name, value in state.items()},
            extra={name: value.expand(len(jobs), *value.shape) for name, value in extra.items()},
            memory=stacked_memory(memories or []),
            labels=count_labels(f, parts),
            round=first.round,
        )
        with one_thread():
            return self._train(jobs, given, parts)

    def _parts(self, state: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Of stacked states: copies of the parameters and of the buffers that change, and what is the same for all."""
        stack = {name: state[name].clone(memory_format=torch.contiguous_format) for name in self._trained}
        buffers = {name: state[name].clone() for name in changing_buffers(self._module, state)}
        return stack, buffers, {n: x[0] for n, x in state.items() if n not in stack and n not in buffers}

    def _train(self, jobs: Sequence[Job], given: ClientInput, parts: Sequence[Tensor]) -> UploadStack:
        f, rule, state = self._federation, self._federation.method.client, given.state
        whole = Local(self._module, given, f.local.in_round(given.round), padded(f.task, self._side))
        stack, buffers, fixed = self._parts(state)
        clients = len(jobs)
        total, counted, steps = torch.zeros(clients), torch.zeros(clients), [0] * clients
        vars(whole)["parameters"] = stack
        rule.begin(whole)
        local, leaves = whole, dict[str, Tensor]()
        optimizer = FUSED[f.local.optimizer](list(stack.values()), padded=False)
        optimizer.begin(whole.settings.lr, f.local.momentum, f.local.nesterov, f.local.weight_decay)
        for number, step in enumerate(steps_of(f, jobs, parts)):
            active = len(step.sizes)
            if active != len(next(iter(leaves.values()), ())):
                local = part_of(whole, 0, active)
                leaves = {name: x.detach()[:active].requires_grad_() for name, x in stack.items()}
                vars(local)["parameters"] = leaves
                optimizer.narrow(list(leaves.values()))
            local.steps = number
            losses = self._losses(local, leaves, {n: x[:active] for n, x in buffers.items()}, fixed, step)
            optimizer.zero_grad()
            losses.sum().backward()  # type: ignore[no-untyped-call]
            rule.adjust(local)
            if f.local.max_grad_norm is not None:
                clip(leaves.values(), f.local.max_grad_norm)
            optimizer.step()
            rule.correct(local)
            total[:active] += losses.detach() * step.counts
            counted[:active] += step.counts
            steps[:active] = [number + 1] * active
        with torch.no_grad():
            update = {name: x.detach() - state[name] for name, x in stack.items()}
            extra, memory = self._finish(whole, update, steps)
        slice_ = f.slice(jobs[0].level, jobs[0].round, jobs[0].client)
        return UploadStack(
            clients=tuple(job.client for job in jobs),
            level=jobs[0].level,
            slice=slice_,
            update={name: x for name, x in update.items() if name not in slice_.given},
            buffers=buffers,
            examples=tuple(map(len, parts)),
            steps=steps,
            losses=(total / counted.clamp(min=1)).tolist(),
            extra=extra,
            memory=memory,
            labels=given.labels,
            normalisers=[rule.normaliser(f.local, number) for number in steps],
        )

    def _losses(self, local: Local, leaves: Tensors, buffers: Tensors, fixed: Tensors, step: Step) -> Tensor:
        """The loss of each client; buffers are changed in place."""
        mask, rule, given = step.mask, self._federation.method.client, local.given

        def loss(own: Tensors, changing: Tensors, x: Inputs, y: Tensor, mask: Tensor | None, labels: Any) -> Tensor:
            self._side.mask = mask
            model: Any = Functional(self._module, own | changing | fixed)
            one = ClientInput(state={}, labels=labels, round=given.round)
            return rule.loss(Local(model, one, local.settings, local.task, local.steps), x, y)

        self._side.sizes = step.sizes
        places = (0, 0, 0, 0, None if mask is None else 0, None if given.labels is None else 0)
        with (
            self._federation.computing(),
            sdpa_kernel(SDPBackend.MATH),
        ):  # the other ways to compute attention cannot be batched
            losses: Tensor = vmap(loss, places, randomness="error")(leaves, buffers, step.x, step.y, mask, given.labels)
        return losses

    def _finish(self, whole: Local, update: Tensors, steps: list[int]) -> tuple[Tensors, Tensors]:
        """What the rule makes of the turns, of clients with the same number of steps at a time."""
        found: list[tuple[Tensors, Tensors]] = []
        start = 0
        while start < len(steps):
            end = next((at for at in range(start, len(steps)) if steps[at] != steps[start]), len(steps))
            local = part_of(whole, start, end)
            local.steps = steps[start]
            found.append(self._federation.method.client.finish(local, {n: x[start:end] for n, x in update.items()}))
            start = end
        extra, memory = (
            {n: torch.cat([part[n] for part in parts]) for n in parts[0]} for parts in zip(*found, strict=True)
        )
        return extra, memory

    def _try(self) -> None:
        """Two clients with one batch each, once of two examples and once of two and one with padding."""
        f = self._federation
        state = {n: torch.ones_like(x, device="cpu").expand(2, *x.shape) for n, x in self._module.state_dict().items()}

        def example(tensor: Tensor) -> Tensor:
            return torch.zeros(
                2, *tensor.shape, dtype=torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype
            )

        y = as_target(f.data.train.y[:1]).expand(2, 2, *f.data.train.y.shape[1:])
        given = ClientInput(state=state, labels=count_labels(f, [torch.zeros(2, dtype=torch.long)] * 2))
        stack, buffers, fixed = self._parts(state)
        for value in stack.values():
            value.requires_grad_()
        self._side.generators = [Generator(), Generator()]
        local = Local(self._module, given, f.local, padded(f.task, self._side))
        try:
            with one_thread(), warnings.catch_warnings():
                warnings.filterwarnings("error", "There is a performance drop")  # a loop over the clients
                for sizes in ([2, 2], [2, 1]) if f.task in TASKS.values() else ([2, 2],):
                    step = Step(map_inputs(example, f.model.example(2)), y.contiguous(), sizes, torch.ones(2))
                    losses = self._losses(local, stack, buffers, fixed, step)
                    losses.sum().backward()  # type: ignore[no-untyped-call]
        except Exception as problem:  # whatever a user's module may raise
            reason = str(problem).strip().partition("\n")[0]
            raise Declined(f"its forward pass cannot be batched ({reason:.120})") from None


class Functional:
    """A module as a function of other tensors than its own."""

    def __init__(self, module: nn.Module, tensors: Tensors) -> None:
        self._module, self._tensors = module, tensors

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return functional_call(self._module, self._tensors, inputs, options)


def part_of(local: Local, start: int, end: int) -> Local:
    """What a rule sees of some of the clients: all stacks are cut, in the same memory."""
    clients = len(next(iter(local.given.state.values())))

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(inner) for key, inner in value.items()}
        return value[start:end] if isinstance(value, Tensor) and value.dim() and len(value) == clients else value

    given = dataclasses.replace(local.given, **{key: cut(value) for key, value in vars(local.given).items()})
    part = Local(local.model, given, local.settings, local.task, local.steps, cut(local.scratch))
    vars(part)["parameters"] = cut(local.parameters)
    return part


def stacked_memory(memories: Sequence[Tensors]) -> Tensors:
    """What clients remember; zeros for those that have had no turn yet, as rules that take stacks expect."""
    known = next((memory for memory in memories if memory), {})
    return {n: torch.stack([m[n] if m else torch.zeros_like(x) for m in memories]) for n, x in known.items()}


def padded(task: Task, side: Side) -> Task:
    """A task whose loss leaves out padding: as ignored targets, or where there are none, example by example."""
    if task.count is not len:
        return task

    def loss(output: Any, target: Tensor) -> Tensor:
        if side.mask is None:
            return task.loss(output, target)
        each: Tensor = vmap(lambda o, t: task.loss(o[None], t[None]))(output, target)
        return (each * side.mask).sum() / side.mask.sum()

    return dataclasses.replace(task, loss=loss)


@torch.no_grad()
def clip(parameters: Any, most: float) -> None:
    """Bounds the norm of each client's gradient, as ``clip_grad_norm_`` does that of one."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factor = (most / (norms + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))
