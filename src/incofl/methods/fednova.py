"""FedNova: clients that take more steps do not pull harder.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020. With
p_i the share of the examples and a_i the sum of the weights that the gradients of client i have in its update,

    U = (sum_i p_i a_i) (sum_i p_i Delta_i / a_i)        at every position over the clients that hold it.

For tau steps of plain SGD, and of Adam, whose first moment is a mean, a_i = tau. SGD with momentum rho adds gradients
up: a_i = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho), and tau + rho times that for Nesterov's momentum.

Differences: the paper's proximal steps and server momentum are left out. NIID-Bench always trains with SGD, and
normalises batch-norm statistics and counters too. Weight decay is not corrected for, as there.
"""

from typing import ClassVar

from incofl.client import ClientRule, LocalSettings
from incofl.method import Method, ServerRule


class FedNova(ClientRule):
    """The client half."""

    counts_steps: ClassVar[bool] = True

    def normaliser(self, settings: LocalSettings, steps: int) -> float:
        rho = settings.momentum if settings.optimizer == "sgd" else 0.0
        heavy_ball = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return steps + rho * heavy_ball if settings.nesterov else heavy_ball


fednova = Method("fednova", FedNova(), ServerRule("samples", separate=True))
heteronova = Method("heteronova", FedNova(), ServerRule("samples"))
