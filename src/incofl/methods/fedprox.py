"""FedProx: a term that holds a client near the model it received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. Local objective:

    F_i(w) + mu/2 ||w - w_received||^2

1. The anchor is the sub-model as it was just received, in every turn anew.
2. The term covers all trained parameters, batch norm's scale and shift too, and no buffers.
3. Its gradient, mu (w - w_received), is added to the loss's before the optimiser's step: the same as differentiating
   the term, without its square root at zero. With Adam it is rescaled like the rest of the gradient.

Differences: mu = 0.1 as in the InCo paper (NIID-Bench's default is 0.001). The paper's inexact local solutions of
unequal accuracy are not modelled: every client trains the same number of epochs.
"""

from typing import Annotated

from annotated_types import Ge

from incofl.client import ClientRule, Local
from incofl.method import Method, ServerRule
from incofl.options import options


@options("prox")
class FedProx(ClientRule):
    """The client half: the config section ``prox``.

    Attributes:
        mu: strength of the proximal term; 0 is FedAvg.
    """

    mu: Annotated[float, Ge(0)] = 0.1

    def adjust(self, local: Local) -> None:
        """Adds mu (w - w_received) to the gradient."""
        if self.mu:
            for name, parameter in local.parameters.items():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - local.received[name], alpha=self.mu)


fedprox = Method("fedprox", FedProx(), ServerRule(separate=True))
heteroprox = Method("heteroprox", FedProx())
