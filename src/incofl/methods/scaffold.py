"""Scaffold: control variates against the drift of clients whose data differ.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, with option II. The
server keeps a variate c, client i a variate c_i. A local step of learning rate eta in direction d becomes

    w <- w - eta (d + c - c_i),        and after K steps        c_i+ = c_i - c + (w_received - w) / (K eta).

The client uploads c_i+ - c_i besides its update; the server adds their sum over N to c.

1. Both variates start at zero, cover the parameters only, and live in the server's coordinates.
2. The correction is applied after the optimiser's step, with the optimiser's learning rate. So it is right for any
   optimiser whose step is eta d: c and c_i are mean directions (of Adam, of momentum SGD), in the same units as d.
3. N is, for each position, the number of clients in the population that hold it. Then c is at all times the mean of the
   c_i over those clients; a global N would shrink the variates of deep layers.
4. A client's variate is kept between its turns, also where a run is interrupted and resumed.
5. With InCo, weights are mixed and variates are not.

Differences: the paper's option I, a gradient at the received model instead of the mean direction, is left out; the
server's learning rate is ``aggregate.server_lr``. NIID-Bench and ports of it start the variates at the weights of a
random network, correct batch-norm statistics and counters too, divide by the number of all clients
(``scaffold.population = "all"``), and weigh clients by examples (``aggregate.weighting = "samples"``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from incofl.aggregate import Covered, spread
from incofl.client import ClientRule, Local, Trained
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import SHARED, Method, ServerRule
from incofl.server import Changes, Server
from incofl.tensors import Tensors, empty


@dataclass(frozen=True)
class Scaffold(ClientRule):
    """The client half: the config section ``scaffold``.

    Attributes:
        correction_scale: of c - c_i; smaller where variates are stale, because clients are drawn rarely.
        population: what N is: the clients that hold a position (``holders``), or ``all``, as NIID-Bench has it.
    """

    correction_scale: float = 1.0
    population: Literal["holders", "all"] = "holders"

    def __post_init__(self) -> None:
        if not 0 <= self.correction_scale <= 1:
            raise ConfigError(f"scaffold.correction_scale: got {self.correction_scale}, expected a number in [0, 1]")

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
        c, c_i = local.given.sent, local.given.memory
        local.scratch["correction"] = {
            name: self.correction_scale * (c[name] - c_i[name] if c_i else c[name])
            for name, _ in local.model.named_parameters()
        }

    @torch.no_grad()
    def correct(self, local: Local) -> None:
        """W <- w - eta (c - c_i)."""
        for name, parameter in local.model.named_parameters():
            parameter.sub_(local.scratch["correction"][name], alpha=local.settings.lr)

    def finish(self, local: Local, trained: Trained) -> tuple[Tensors, Tensors]:
        """c_i+ is the mean direction of the steps without their correction."""
        path = local.steps * local.settings.lr
        new, change = Tensors(), Tensors()
        for name, update in trained.update.items():
            mean = -update.to(local.given.sent[name].device) / path if local.steps else torch.zeros_like(update)
            new[name] = mean - local.scratch["correction"][name]
            change[name] = new[name] - local.given.memory[name] if local.given.memory else new[name]
        return change, new


@dataclass(frozen=True)
class ScaffoldServer(ServerRule):
    """The server half: keeps c, one for all or one per level where levels are separate."""

    options: Scaffold = field(default_factory=Scaffold)

    def start(self, server: Server) -> Server:
        """C = 0."""
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

    def sent(self, server: Server, level: int) -> Tensors:
        """C."""
        return server.extra[table(level if self.separate else SHARED)]

    def learn(self, server: Server, changes: Changes, extra: Mapping[int, Covered]) -> Mapping[str, Tensors]:
        """C <- c + (1/N) sum of the changes of c_i, with N the clients in the population that hold a position."""
        new = dict(server.extra)
        for group, mean in extra.items():
            holders = [held for level, held in server.population.items() if group in (SHARED, level)]
            c = dict(new[table(group)])
            for name, value in mean.values.items():
                having = [(piece, float(count)) for piece, count in holders if name in piece.index]
                population = spread(server.layout, name, having).clamp(min=1)
                if self.options.population == "all":
                    population = torch.full_like(population, sum(count for _, count in server.population.values()))
                c[name] = c[name] + value * (mean.weight[name] / population).to(value.dtype)
            new[table(group)] = c
        return new


def table(group: int) -> str:
    """Where a group's variate is in ``server.extra``."""
    return "variate" if group == SHARED else f"variate-{group}"


scaffold = Method("scaffold", "Scaffold: each size with itself only", Scaffold(), ScaffoldServer(separate=True))
heteroscaffold = Method(
    "heteroscaffold", "Scaffold over slices of one server model", Scaffold(), ScaffoldServer(), extensible=True
)
