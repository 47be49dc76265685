"""FedProx: a term that holds a client near the model it received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. Local objective, over all trained parameters:

    F_i(w) + mu/2 ||w - w_received||^2

Differences: mu = 0.1 as in the InCo paper (0.001 in NIID-Bench). Local solutions of unequal accuracy are not modelled.
"""

from typing import Annotated, ClassVar

from annotated_types import Ge

from incofl.client import ClientRule, Local
from incofl.method import Method, ServerRule
from incofl.options import options


@options("prox")
class FedProx(ClientRule):
    """The proximal term in a client's loss."""

    stacks: ClassVar[bool] = True
    mu: Annotated[float, Ge(0)] = 0.1  # strength of the proximal term; 0 is FedAvg

    def adjust(self, local: Local) -> None:
        if self.mu:
            for name, parameter in local.parameters.items():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - local.received[name], alpha=self.mu)


fedprox = Method("fedprox", FedProx(), ServerRule(separate=True))
heteroprox = Method("heteroprox", FedProx())
