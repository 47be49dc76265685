"""FedDyn: clients are pulled towards what all of them would agree on, so that steps settle at the common optimum.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. Client i keeps h_i, the server h. With w
the model that was received and w_i what the client makes of it,

    client:   F_i(w_i) - <h_i, w_i> + alpha/2 ||w_i - w||^2,        h_i <- h_i - alpha (w_i - w)
    server:   h <- h - alpha/N sum_i (w_i - w),                     w <- mean of w_i - h / alpha

N is, for each position, the number of clients in the population that hold it, so h is at all times the mean of their
h_i. Where nothing moves any more, h_i is the gradient of client i, and h = 0: their sum is zero.

Differences: DepthFL's code divides by the number of all clients (``feddyn.population = "all"``). The gradient of the
client's terms is added before the optimiser's step, whichever that is; the original trains with SGD. Batch-norm
statistics follow the buffer policy. InCo mixes the mean, not h / alpha, and h_i and h do not see what it does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from incofl.aggregate import CoveredMean
from incofl.client import ClientRule, Local, Upload
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.options import options
from incofl.server import Changes, Server
from incofl.tensors import Tensors, only
from incofl.transform import SHARED


@options("feddyn")
class FedDyn(ClientRule):
    """The client half, which keeps h_i."""

    stacks: ClassVar[bool] = True
    alpha: Annotated[float, Gt(0)] = 0.1  # strength of the regularisation
    # what N is: the clients that hold a position (``holders``), or ``all``
    population: Literal["holders", "all"] = "holders"

    def memory(self, layout: Layout) -> frozenset[str]:
        return layout.parameters

    def adjust(self, local: Local) -> None:
        for name, parameter in local.parameters.items():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - local.received[name], alpha=self.alpha)
                if local.given.memory:
                    parameter.grad.sub_(local.given.memory[name])

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        known = local.given.memory
        moved = {name: -self.alpha * value for name, value in update.items()}
        return {}, {name: known[name].cpu() + value if known else value for name, value in moved.items()}


@dataclass(frozen=True)
class FedDynServer(ServerRule):
    """The server half: keeps h, one for all or one per level where levels are separate."""

    options: FedDyn = field(default_factory=FedDyn)

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        changes = super().aggregate(server, arrivals)
        correction = {
            group: {name: h / -self.options.alpha for name, h in changes.extra[table(group)].items()}
            for group in self._means(changes)
        }
        return replace(changes, correction=correction)

    def update_state(self, server: Server, changes: Changes, extra: Mapping[int, CoveredMean]) -> Mapping[str, Tensors]:
        new = dict(server.extra)
        everybody = sum(count for _, count in server.population.values())
        for group, change in self._means(changes).items():
            h = dict(new.get(table(group), {}))
            for name, mean in only(change.values, server.layout.parameters).items():
                holders = change.weight[name] / changes.unit  # in the cohort
                population = server.holders(name, group) if self.options.population == "holders" else everybody
                moved = -self.options.alpha * mean * (holders / population).to(mean.dtype)
                h[name] = h[name] + moved if name in h else moved
            new[table(group)] = h
        return new

    def _means(self, changes: Changes) -> Mapping[int, CoveredMean]:
        """The mean updates of this round: one for all, or by level."""
        return changes.private if self.separate else {SHARED: changes.shared}


def table(group: int) -> str:
    """Where a group's h is in ``server.extra``."""
    return "h" if group == SHARED else f"h-{group}"


feddyn = Method("feddyn", FedDyn(), FedDynServer(separate=True))
heterodyn = Method("heterodyn", FedDyn(), FedDynServer())
