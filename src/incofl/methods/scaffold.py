"""Scaffold: control variates against the drift of clients whose data differ.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, with option II. The
server keeps a variate c, client i a variate c_i. A local step of learning rate eta in direction d becomes

    w <- w - eta (d + c - c_i),        and after K steps        c_i+ = c_i - c + (w_received - w) / (K eta).

The client uploads c_i+ - c_i in addition to its update; the server adds their sum over N to c.

1. Both variates start at zero, cover the parameters only, and live in the server's coordinates.
2. The correction is applied after the optimiser's step, with the optimiser's learning rate. So it is right for any
   optimiser whose step is eta d: c and c_i are mean directions (of Adam, of momentum SGD), in the same units as d.
3. N is, for each position, the number of clients in the population that hold it. Then c is at all times the mean of the
   c_i over those clients; a global N would shrink the variates of deep layers.
4. A client's variate is kept between its turns, also where a run is interrupted and resumed.
5. With InCo, weights are mixed and variates are not.

Differences: the paper's option I, a gradient at the received model instead of the mean direction, is left out; the
server's learning rate is ``server.lr``. NIID-Bench and ports of it start the variates at the weights of a
random network, correct batch-norm statistics and counters too, divide by the number of all clients
(``scaffold.population = "all"``), and weigh clients by examples (``aggregate.weighting = "samples"``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le

from incofl.aggregate import CoveredMean, spread
from incofl.client import ClientRule, Local
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.options import options
from incofl.server import Changes, Server
from incofl.tensors import Tensors, empty
from incofl.transform import SHARED


@options("scaffold")
class Scaffold(ClientRule):
    """The client half: the config section ``scaffold``.

    Attributes:
        correction_scale: factor of c - c_i; smaller where variates are stale, because clients are drawn rarely.
        population: what N is: the clients that hold a position (``holders``), or ``all``, as in NIID-Bench.
    """

    correction_scale: Annotated[float, Ge(0), Le(1)] = 1.0
    population: Literal["holders", "all"] = "holders"

    def memory(self, layout: Layout) -> frozenset[str]:
        """c_i."""
        return layout.parameters

    def extra(self, layout: Layout) -> frozenset[str]:
        """c_i+ - c_i."""
        return layout.parameters

    def held(self, layout: Layout) -> Sequence[frozenset[str]]:
        """The correction, which takes the place of c, and c_i."""
        return [layout.parameters] * 2

    def begin(self, local: Local) -> None:
        """The correction is the same in every step of a turn."""
        c, c_i = local.given.extra, local.given.memory
        local.scratch["correction"] = {
            name: self.correction_scale * (c[name] - c_i[name] if c_i else c[name]) for name in local.parameters
        }

    @torch.no_grad()
    def correct(self, local: Local) -> None:
        """w <- w - eta (c - c_i)."""
        for name, parameter in local.parameters.items():
            parameter.sub_(local.scratch["correction"][name], alpha=local.settings.lr)

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        """c_i+ is the mean direction of the steps without their correction."""
        path = local.steps * local.settings.lr
        new, change = Tensors(), Tensors()
        for name, moved in update.items():
            mean = -moved.to(local.given.extra[name].device) / path if local.steps else torch.zeros_like(moved)
            new[name] = mean - local.scratch["correction"][name]
            change[name] = new[name] - local.given.memory[name] if local.given.memory else new[name]
        return change, new


@dataclass(frozen=True)
class ScaffoldServer(ServerRule):
    """The server half: keeps c, one for all or one per level where levels are separate."""

    options: Scaffold = field(default_factory=Scaffold)

    def start(self, server: Server) -> Server:
        """c = 0."""
        groups = server.population if self.separate else (SHARED,)
        layout = server.layout
        zero = {
            table(group): {
                name: empty(layout.shapes[name], server.shared[name].dtype).zero_()
                for name in server.shared
                if name in layout.parameters
            }
            for group in groups
        }
        return replace(server, extra=zero)

    def extra_for_client(self, server: Server, level: int) -> Tensors:
        """c."""
        return server.extra[table(level if self.separate else SHARED)]

    def update_state(self, server: Server, changes: Changes, extra: Mapping[int, CoveredMean]) -> Mapping[str, Tensors]:
        """c <- c + (1/N) sum of the changes of c_i, with N the clients in the population that hold a position."""
        new = dict(server.extra)
        for group, mean in extra.items():
            holders = [held for level, held in server.population.items() if group in (SHARED, level)]
            c = dict(new[table(group)])
            for name, value in mean.values.items():
                having = [(slice_, float(count)) for slice_, count in holders if name in slice_.index]
                population = spread(server.layout, name, having).clamp(min=1)
                if self.options.population == "all":
                    population = torch.full_like(population, sum(count for _, count in server.population.values()))
                c[name] = c[name] + value * (mean.weight[name] / population).to(value.dtype)
            new[table(group)] = c
        return new


def table(group: int) -> str:
    """Where a group's variate is in ``server.extra``."""
    return "variate" if group == SHARED else f"variate-{group}"


scaffold = Method("scaffold", Scaffold(), ScaffoldServer(separate=True))
heteroscaffold = Method("heteroscaffold", Scaffold(), ScaffoldServer())
