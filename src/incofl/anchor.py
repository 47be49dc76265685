"""Anchoring: clients of larger levels train the smallest level's path, too, so that it stays good by itself.

The sandwich of slimmable networks (Yu and Huang, "Universally Slimmable Networks", ICCV 2019), in a federation: in
every batch, or every few, the loss gets

    weight * loss(smallest path, y)  +  distil * t^2 KL(softmax(o / t) || softmax(o_0 / t)),

with o the logits of the client's model, which are not trained by it, and o_0 those of the smallest path. A ``share`` of
the gradient of the client's own loss reaches the parameters of the smallest path. With ``share = 0`` they learn for the
smallest path alone: the smallest level is trained exactly as if everybody trained the smallest model, whatever the
larger levels add. A step costs the smallest model's forward and backward pass more, and the statistics of the smallest
level, which all clients measure, travel with every model.

After that a larger client can go on for some epochs, ``beyond`` the smallest path: its parameters stay as they are, and
what the client holds in addition learns. Large clients take part in a round as seldom as all others, and may well have
the time to do more when they do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn import functional

from incofl.options import options
from incofl.path import Path
from incofl.split.slices import ALL
from incofl.task import Task
from incofl.tensors import Inputs, Tensors

SMALLEST = ALL + "smallest/"  # begins the names of the statistics of the smallest level that others receive


@options("anchor")
class Anchor:
    """How much clients of larger levels train the smallest path."""

    weight: Annotated[float, Ge(0)] = 1.0  # of its loss; 0 with distil = 0: no anchoring
    every: Annotated[int, Ge(1)] = 1  # batches
    distil: Annotated[float, Ge(0)] = 0.0  # weight of what it learns from the client's whole model; needs classes
    temperature: Annotated[float, Gt(0)] = 1.0  # of both softmaxes
    # share of the gradient of the client's own loss that reaches the parameters of the smallest path
    share: Annotated[float, Ge(0), Le(1)] = 1.0
    beyond: Annotated[int, Ge(0)] = 0  # further epochs, in which only what the smallest path does not hold learns

    def epochs(self, own: int, level: int) -> int:
        """The passes over its data that a client of a level makes in a turn, its ``own`` and further ones."""
        return own + (self.beyond if self.on and level else 0)

    @property
    def on(self) -> bool:
        """Whether it changes anything."""
        return bool(self.weight or self.distil)

    def added_to(self, method: Any) -> Any:
        """A method that is anchored."""
        return replace(method, anchor=self)


@dataclass
class SmallestPath:
    """The smallest level's model inside a larger one, in a turn."""

    anchor: Anchor
    path: Path
    output: list[Tensor] = field(default_factory=list)  # of the larger model in its last forward pass
    statistics: Tensors = field(default_factory=dict)  # of the smallest path, where levels have their own
    learned: Tensors | None = None  # the smallest path after the client's own epochs, in further ones
    drawn: Tensor | None = None  # where its own random numbers are

    def begin(self, extra: Tensors) -> None:
        """Takes over the statistics of the smallest level, if the server sent them, and draws from here on its own."""
        self.drawn = torch.default_generator.get_state()
        buffers = dict(self.path.module.named_buffers())
        sent = {name.removeprefix(SMALLEST): value for name, value in extra.items() if name.startswith(SMALLEST)}
        self.statistics = {name: buffers[name].copy_(value) for name, value in sent.items()}

    def watch(self, model: nn.Module) -> Any:
        """Notes what the larger model computes, until the returned handle is removed."""

        def note(_: nn.Module, inputs: Any, output: Any) -> None:
            self.output[:] = [_logits(output).detach()]

        return model.register_forward_hook(note)

    @torch.no_grad()
    def hold(self, model: nn.Module) -> None:
        """Keeps the smallest path as it is at the first call, whatever steps have been made since."""
        parameters: Tensors = {name: value for name, value in model.named_parameters() if name in self.path.part.index}
        if self.learned is None:
            self.learned = self.path.part.take(parameters)
        else:
            self.path.part.write(self.learned, parameters)

    def loss(self, model: nn.Module, task: Task, x: Inputs, y: Tensor, step: int) -> Tensor | None:
        """What the loss of a batch gets in addition; ``None`` in batches without."""
        if step % self.anchor.every:
            return None
        with self._own_draws():
            output = _logits(self.path(model, x))
        (teacher,) = self.output
        total = self.anchor.weight * task.loss(output, y)
        if self.anchor.distil:
            t = self.anchor.temperature
            log_p, q = functional.log_softmax(output / t, 1), functional.softmax(teacher / t, 1)
            total = total + self.anchor.distil * t**2 * functional.kl_div(log_p, q, reduction="batchmean")
        return total

    def clip(self, model: nn.Module, most: float) -> None:
        """Bounds the norm of the gradient: that of the smallest path by itself, and that of what is beyond it."""
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        held = self.path.own(gradients)
        leaves = {n: p.detach() for n, p in self.path.module.named_parameters() if n in held}
        for name, leaf in leaves.items():
            leaf.grad = held[name]
        self.path.part.write({name: torch.zeros_like(value) for name, value in held.items()}, gradients)
        for part in (leaves, dict(model.named_parameters())):
            nn.utils.clip_grad_norm_(part.values(), most)
        self.path.part.write(held, gradients)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Inside, dropout draws what it draws where the smallest model stands alone; on a CPU."""
        larger = torch.default_generator.get_state()
        if self.drawn is not None:
            torch.default_generator.set_state(self.drawn)
        yield
        self.drawn = torch.default_generator.get_state()
        torch.default_generator.set_state(larger)

    def backward(self, loss: Tensor, added: Tensor | None, model: nn.Module) -> Tensor:
        """Computes the gradients of the loss of a batch and of the smallest path's, and returns the sum of both."""
        if self.anchor.share < 1:
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            parameters = dict(model.named_parameters())
            held = {name: p.grad for name in self.path.part.index if (p := parameters.get(name)) is not None}
            gradients = {name: gradient for name, gradient in held.items() if gradient is not None}
            self.path.part.put(self.path.part.look(gradients), gradients, self.anchor.share - 1)
            loss = loss.detach()
        total = loss if added is None else loss + added
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        return total


def _logits(output: Any) -> Tensor:
    """The logits of an output that has them, or it all; of a model with early exits, that of the last."""
    output = getattr(output, "logits", output)
    last: Tensor = output[-1] if isinstance(output, list | tuple) else output
    return last
