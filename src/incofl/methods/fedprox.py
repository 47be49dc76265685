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

from dataclasses import dataclass

from incofl.client import ClientRule, Local
from incofl.errors import ConfigError
from incofl.method import Method, ServerRule


@dataclass(frozen=True)
class FedProx(ClientRule):
    """The client half: the config section ``prox``.

    Attributes:
        mu: strength of the proximal term; 0 is FedAvg.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"prox.mu: got {self.mu}, expected a number >= 0")

    def adjust(self, local: Local) -> None:
        """Adds mu (w - w_received) to the gradient."""
        if self.mu:
            for name, parameter in local.model.named_parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - local.received[name], alpha=self.mu)


fedprox = Method("fedprox", "FedProx: each size with itself only", FedProx(), ServerRule(separate=True))
heteroprox = Method("heteroprox", "FedProx over slices of one server model", FedProx(), extensible=True)
