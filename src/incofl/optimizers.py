"""The built-in optimisers: torch's fused kernels on lists of tensors, ``torch.optim`` without its objects.

To build an optimiser of ``torch.optim`` and to call it takes longer than the step of a small model itself.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam and AdamW, the defaults of torch.optim


class Stepping(Protocol):
    """What the training loop needs of an optimiser."""

    def zero_grad(self) -> None: ...
    def step(self) -> Any: ...


# Numbers of the widest registers. Kernels round the last ones of a tensor, which fill no register, in another way: a
# slice of a tensor would not move as it does within the whole.
REGISTER = 16


class Padded:
    """A parameter in memory that is as long as whole registers, and such memory for its gradient."""

    def __init__(self, parameter: Tensor) -> None:
        length = -(-parameter.numel() // REGISTER) * REGISTER
        self.values, self.gradient = parameter.new_zeros(length), parameter.new_zeros(length)
        shape, strides = parameter.shape, parameter.stride()
        parameter.data = self.values.as_strided(shape, strides).copy_(parameter.data)
        self.place = self.gradient.as_strided(shape, strides)  # of the gradient itself

    @staticmethod
    def wanted(parameter: Tensor) -> bool:
        """Whether a parameter ends within a register; one with gaps in its memory is left alone."""
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        return parameter.numel() % REGISTER > 0 and last + 1 == parameter.numel()


class Fused:
    """An optimiser whose tensors are made once and used for many turns; parameters without a gradient stay."""

    def __init__(self, parameters: Sequence[Tensor], padded: bool = True) -> None:
        self._parameters = list(parameters)
        wanted = [at for at, one in enumerate(self._parameters) if padded and Padded.wanted(one)]
        self._padded = {at: Padded(self._parameters[at]) for at in wanted}
        # What the kernels move.
        self._moved = [self._padded[at].values if at in self._padded else p for at, p in enumerate(self._parameters)]

    def begin(self, lr: float, momentum: float, nesterov: bool, weight_decay: float) -> None:
        """Forgets all earlier steps."""
        self._lr, self._momentum, self._nesterov, self._decay = lr, momentum, nesterov, weight_decay

    def step(self) -> None:
        """Moves the parameters."""
        raise NotImplementedError

    def narrow(self, parameters: Sequence[Tensor]) -> None:
        """Goes on with the first rows of all parameters, of which none is padded."""
        self._parameters = self._moved = list(parameters)

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _moving(self) -> list[int]:
        return [at for at, parameter in enumerate(self._parameters) if parameter.grad is not None]

    def _gradients(self, moving: Sequence[int]) -> list[Tensor]:
        """The gradients of what the kernels move."""
        found = {at: gradient for at in moving if (gradient := self._parameters[at].grad) is not None}
        if padded := [at for at in moving if at in self._padded]:
            torch._foreach_copy_([self._padded[at].place for at in padded], [found[at] for at in padded])
        return [self._padded[at].gradient if at in self._padded else found[at] for at in moving]


class FusedAdam(Fused):
    """Adam; weight decay is a part of the gradient."""

    _kernel: Callable[..., None] = staticmethod(torch._fused_adam_)

    def __init__(self, parameters: Sequence[Tensor], padded: bool = True) -> None:
        super().__init__(parameters, padded)
        sizes, like = [p.numel() for p in self._moved], [torch.empty_like(p) for p in self._moved]
        self._moments = like[0].new_empty(2 * sum(sizes))  # all in one, to be cleared at once
        parts = zip(self._moments.split(sizes * 2), like * 2, strict=True)  # type: ignore[no-untyped-call]
        both = [part.as_strided(own.shape, own.stride(), part.storage_offset()) for part, own in parts]
        self._means, self._squares = both[: len(sizes)], both[len(sizes) :]

    def begin(self, lr: float, momentum: float, nesterov: bool, weight_decay: float) -> None:
        super().begin(lr, momentum, nesterov, weight_decay)
        self._moments.zero_()
        self._steps = [torch.zeros(())] * len(self._parameters)  # one for all, as long as all move

    def narrow(self, parameters: Sequence[Tensor]) -> None:
        super().narrow(parameters)
        for state in (self._means, self._squares):
            state[:] = [value[: len(own)] for value, own in zip(state, parameters, strict=True)]

    @torch.no_grad()
    def step(self) -> None:
        """Moves the parameters."""
        moving = self._moving()
        if not moving:
            return
        if len(moving) < len(self._parameters):
            self._steps = [step.clone() for step in self._steps]
        states = [self._moved, self._means, self._squares, self._steps]
        parameters, means, squares, steps = ([state[at] for at in moving] for state in states)
        torch._foreach_add_(list({id(step): step for step in steps}.values()), 1)
        self._kernel(
            parameters,
            self._gradients(moving),
            means,
            squares,
            [],
            steps,
            lr=self._lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=self._decay,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )


class FusedAdamW(FusedAdam):
    """Adam with decoupled weight decay."""

    _kernel = staticmethod(torch._fused_adamw_)


class FusedSGD(Fused):
    """SGD, with heavy-ball or Nesterov's momentum; the first step of a parameter fills its momentum."""

    def begin(self, lr: float, momentum: float, nesterov: bool, weight_decay: float) -> None:
        super().begin(lr, momentum, nesterov, weight_decay)
        self._velocity: list[Tensor | None] = [None] * len(self._parameters)

    def narrow(self, parameters: Sequence[Tensor]) -> None:
        super().narrow(parameters)
        moved = zip(self._velocity, parameters, strict=True)
        self._velocity = [None if value is None else value[: len(own)] for value, own in moved]

    @torch.no_grad()
    def step(self) -> None:
        """Moves the parameters."""
        for first, moving in groupby(self._moving(), key=lambda at: self._velocity[at] is None):
            self._apply(list(moving), first and self._momentum != 0)

    def _apply(self, moving: list[int], first: bool) -> None:
        parameters = [self._moved[at] for at in moving]
        for at in moving if first else ():
            self._velocity[at] = torch.empty_like(self._moved[at])
        apply: Callable[..., None] = torch._fused_sgd_
        apply(
            parameters,
            self._gradients(moving),
            [self._velocity[at] for at in moving] if self._momentum else [],
            weight_decay=self._decay,
            momentum=self._momentum,
            lr=self._lr,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
            is_first_step=first,
        )


FUSED: dict[str, type[Fused]] = {"adam": FusedAdam, "adamw": FusedAdamW, "sgd": FusedSGD}


def can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Whether the kernels take these parameters in one list: of one type of floats, in the memory of the processor."""
    kinds = {(parameter.dtype, parameter.device.type, parameter.layout) for parameter in parameters}
    return len(kinds) == 1 and all(d in (torch.float32, torch.float64) and p == "cpu" for d, p, _ in kinds)
