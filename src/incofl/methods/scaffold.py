"""Scaffold: control variates against the drift of clients whose data differ.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, with option II. The
server keeps a variate c, client i a variate c_i. With K local steps of learning rate eta in directions d:

    w <- w - eta (d + c - c_i),     c_i+ = c_i - c + (w_received - w) / (K eta),     c <- c + sum_i (c_i+ - c_i) / N

The correction comes after the optimiser's step, so that c and c_i are mean directions of any optimiser, Adam too. N is,
for each position, the number of clients in the population that hold it: c is at all times the mean of their c_i.

Differences: option I is left out; the server's learning rate is ``server.lr``. NIID-Bench starts the variates at the
weights of a random network, corrects batch-norm statistics and counters too, divides by the number of all clients
(``scaffold.population = "all"``), and weighs clients by examples (``aggregate.weighting = "samples"``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from incofl.aggregate import CoveredMean
from incofl.client import ClientRule, Local
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.options import options
from incofl.server import Changes, Server
from incofl.tensors import Tensors
from incofl.transform import SHARED


@options("scaffold")
class Scaffold(ClientRule):
    """The client half, which keeps c_i and uploads its change."""

    stacks: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = True
    # factor of c - c_i; smaller where variates are stale, because clients are drawn rarely
    correction_scale: Annotated[float, Ge(0), Le(1)] = 1.0
    # what N is: the clients that hold a position (``holders``), or ``all``, as in NIID-Bench
    population: Literal["holders", "all"] = "holders"

    def memory(self, layout: Layout) -> frozenset[str]:
        return layout.parameters

    extra = memory  # c_i is kept, its change is uploaded

    def held(self, layout: Layout) -> Sequence[frozenset[str]]:
        return [layout.parameters] * 2  # the correction, which takes the place of c, and c_i

    def begin(self, local: Local) -> None:
        c, c_i = local.given.extra, local.given.memory
        local.scratch["correction"] = {
            name: self.correction_scale * (c[name] - c_i[name] if c_i else c[name]) for name in local.parameters
        }

    @torch.no_grad()
    def correct(self, local: Local) -> None:
        for name, parameter in local.parameters.items():
            parameter.sub_(local.scratch["correction"][name], alpha=local.settings.lr)

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        """c_i+ is the mean direction of the steps without their correction."""
        path = local.steps * local.settings.lr
        if not path:  # the end of a schedule: c_i stays
            still = {name: torch.zeros_like(moved) for name, moved in update.items()}
            return still, local.given.memory or still
        new, change = Tensors(), Tensors()
        for name, moved in update.items():
            mean = -moved.to(local.given.extra[name].device) / path
            new[name] = mean - local.scratch["correction"][name]
            change[name] = new[name] - local.given.memory[name] if local.given.memory else new[name]
        return change, new


@dataclass(frozen=True)
class ScaffoldServer(ServerRule):
    """The server half: keeps c, one for all or one per level where levels are separate."""

    options: Scaffold = field(default_factory=Scaffold)

    def start(self, server: Server) -> Server:
        names = [name for name in server.shared if name in server.layout.parameters]
        groups = server.population if self.separate else (SHARED,)
        zero = {table(group): {name: torch.zeros_like(server.shared[name]) for name in names} for group in groups}
        return replace(server, extra=zero)

    def extra_for_client(self, server: Server, level: int) -> Tensors:
        return server.extra[table(level if self.separate else SHARED)]

    def update_state(self, server: Server, changes: Changes, extra: Mapping[int, CoveredMean]) -> Mapping[str, Tensors]:
        new = dict(server.extra)
        everybody = sum(count for _, count in server.population.values())
        for group, mean in extra.items():
            c = dict(new[table(group)])
            for name, value in mean.values.items():
                population = server.holders(name, group)
                if self.options.population == "all":
                    population.fill_(everybody)
                c[name] = c[name] + value * (mean.weight[name] / population).to(value.dtype)
            new[table(group)] = c
        return new


def table(group: int) -> str:
    """Where a group's variate is in ``server.extra``."""
    return "variate" if group == SHARED else f"variate-{group}"


scaffold = Method("scaffold", Scaffold(), ScaffoldServer(separate=True))
heteroscaffold = Method("heteroscaffold", Scaffold(), ScaffoldServer())
