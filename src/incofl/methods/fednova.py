"""FedNova: clients that take more steps do not pull harder.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020. With
a_i the length of client i's path (its number of steps, for plain SGD) and p_i its share of the examples:

    U = (sum_i p_i a_i) (sum_i p_i Delta_i / a_i)

1. Sums run over the clients that hold a position, and so do the shares p_i: at every position FedNova with equal a_i is
   FedAvg weighted by examples.
2. a_i = tau_i steps for Adam, whose first moment is a mean of gradients, and for plain SGD; for SGD with momentum rho,
   which adds gradients up, a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho), and with Nesterov's momentum
   tau_i + rho times that. An optimiser of your own counts like Adam.
3. Parameters only; buffers follow the buffer policy.
4. With InCo, the update is mixed after it has been scaled: the clip bounds the real step.

Differences: the paper also treats proximal local steps and momentum on the server, which are left out. NIID-Bench
ignores the choice of optimiser and always trains with SGD; it also normalises batch-norm statistics and counters.
Weight decay is not corrected for, as there.
"""

from dataclasses import dataclass

from incofl.client import ClientRule, LocalSettings
from incofl.method import Method, ServerRule


@dataclass(frozen=True)
class FedNova(ClientRule):
    """The client half: says how long its path was."""

    def normaliser(self, settings: LocalSettings, steps: int) -> float:
        """a_i, the sum of the weights that its gradients have in the update."""
        rho = settings.momentum if settings.optimizer == "sgd" else 0.0
        heavy_ball = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return steps + rho * heavy_ball if settings.nesterov else heavy_ball


fednova = Method("fednova", FedNova(), ServerRule("samples", separate=True))
heteronova = Method("heteronova", FedNova(), ServerRule("samples"))
