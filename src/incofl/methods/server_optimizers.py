"""Optimisers on the server: update transforms that take the aggregated update for a negative gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (FedOpt). With U the aggregated update, at every position,

    momentum:   m <- beta m + U                                               w <- w + lr m
    Adam:       m <- b1 m + (1 - b1) U,   v <- b2 v + (1 - b2) U^2            w <- w + lr m / (sqrt(v) + tau)
    Yogi:       as Adam, with             v <- v - (1 - b2) U^2 sign(v - U^2)

There is no bias correction, as in the paper; moments start at zero. ``fedavgm``, ``fedadam`` and ``fedyogi`` are FedAvg
with one of them.

Differences: a position that no client of the cohort held keeps its moments and its value, of which the paper, where all
clients hold all, has none. Its Adam and Yogi start v at tau^2. Buffers are not touched.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import Annotated, Literal, Self

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.options import options
from incofl.schedule import Schedule
from incofl.tensors import Tensors
from incofl.transform import Context, Record, Stateless

Share = Annotated[float, Ge(0), Lt(1)]
Rate = Annotated[float, Gt(0), Le(100)]


@options("server")
class ServerSchedule(Schedule, Stateless):
    """Multiplies the aggregated update by ``lr``, which the fields of ``Schedule`` change over the rounds."""

    lr: Rate | Literal["1/epochs"] = 1.0  # step size of the server; ``1/epochs``: as the paper's code does for ViTs
    name = "schedule"

    def for_run(self, rounds: int, epochs: int) -> Self:
        rate = 1 / epochs if self.lr == "1/epochs" else self.lr
        return dataclasses.replace(super().for_run(rounds, epochs), lr=rate)

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        if isinstance(self.lr, str):
            raise ConfigError(f"server.lr: got {self.lr!r}, expected a number outside of a config")
        step = self.lr * self.factor(context.round)
        if step != 1 and update:
            torch._foreach_mul_(list(update.values()), step)
        return update, state, {}


@options("")
class _Optimizer(Schedule, ABC):
    """What the optimisers share: their moments are named ``m/NAME`` and ``v/NAME``, their step follows a schedule."""

    def init(self, layout: Layout) -> Tensors:
        return {}  # moments appear when a tensor is first updated

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        new, steps = dict(state), Tensors()
        for name, u in update.items():
            before = {k: state.get(f"{k}/{name}", torch.zeros_like(u)) for k in ("m", "v")}
            moments, step = self.step(u, before["m"], before["v"])
            steps[name] = step * self.factor(context.round)
            for k, moment in moments.items():
                new[f"{k}/{name}"] = context.where_held(name, moment, before[k])
        return steps, new, {}

    @abstractmethod
    def step(self, u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensors, Tensor]:
        """The new moments, and the step."""


@options("server-momentum")
class ServerMomentum(_Optimizer):
    """FedAvgM: momentum on the server; the fields of ``Schedule`` change its step over the rounds."""

    lr: Rate = 1.0  # step size
    beta: Share = 0.9  # momentum
    name = "momentum"

    def step(self, u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensors, Tensor]:
        m = self.beta * m + u
        return {"m": m}, self.lr * m


@options("server-adam")
class ServerAdam(_Optimizer):
    """FedAdam; the fields of ``Schedule`` change its step over the rounds."""

    lr: Rate = 0.01  # step size
    beta1: Share = 0.9  # decay of the first moment
    beta2: Share = 0.99  # decay of the second moment
    tau: Annotated[float, Gt(0)] = 1e-3  # added to the root of the second moment: the degree of adaptivity
    name = "adam"

    def step(self, u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensors, Tensor]:
        m, v = self.beta1 * m + (1 - self.beta1) * u, self.second(u.square(), v)
        return {"m": m, "v": v}, self.lr * m / (v.sqrt() + self.tau)

    def second(self, square: Tensor, v: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@options("server-yogi")
class ServerYogi(ServerAdam):
    """FedYogi: Adam whose second moment changes by at most the new square."""

    name = "yogi"

    def second(self, square: Tensor, v: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
