"""The bounds of the paper's convergence analysis, as printed and as they follow from their own derivation.

The analysis looks at one client in one round: E local steps of SGD, then one more step along the cross-layer gradient
g_0 + g_k. With S = sum_e ||grad L_{t,e}||^2 over the local steps, and L, sigma, rho, Gamma as in ``Assumptions``,

    E[L_{t+1,0}] <= E[L_{t,0}] - (eta - L eta^2 / 2) S + L E eta^2 sigma^2 / 2        local steps (Lemma 1)
                    + 2 eta (Gamma + rho^2)                                           first order of the last step
                    + L eta^2 (2 rho^2 + sigma^2 + Gamma)                             second order of it (Lemma 2)

Two printed results do not follow from this line; the functions have both forms:

1. The largest learning rate has E rho^2 in its denominator. Solving the line for eta gives E sigma^2.
2. The rate divides a telescoped sum over T rounds by T E, but leaves the terms that occur once a round undivided by E.
   The printed number of rounds is then larger than needed, and the condition on eta that comes with it mixes both: it
   follows from neither.

``docs/theory.md`` says what the bounds assume, what of InCo they leave out, and when they say nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The constants of the four assumptions.

    Attributes:
        smoothness: L: ||grad L(x) - grad L(y)|| <= L ||x - y||.
        sigma: E||g - grad L||^2 <= sigma^2, for the stochastic gradient g, whose mean is grad L.
        rho: E||g|| <= rho; so ||grad L|| <= rho everywhere, which makes some of the theorems say nothing.
        gamma: the covariance of the stochastic gradients of two layers is at most Gamma. By Cauchy and Schwarz
            Gamma = sigma^2 always does.
    """

    smoothness: float
    sigma: float
    rho: float
    gamma: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"{name} is {value}, expected a number >= 0")

    @property
    def first_order(self) -> float:
        """Gamma + rho^2: by how much a gradient and a cross-layer gradient can point apart, half of it each."""
        return self.gamma + self.rho**2

    @property
    def second_order(self) -> float:
        """2 rho^2 + sigma^2 + Gamma: half the mean square of a cross-layer gradient."""
        return 2 * self.rho**2 + self.sigma**2 + self.gamma


def local_progress(*, loss: float, squares: Sequence[float], lr: float, given: Assumptions) -> float:
    """Lemma 1: a bound of the expected loss of a client after its local steps.

        E[L_{t,0}] - (eta - L eta^2 / 2) sum_e ||grad L_{t,e}||^2 + L E eta^2 sigma^2 / 2.

    The paper calls the left side L_{t,E-1}; its sum has E terms, so it is the loss after E steps.

    Args:
        loss: E[L_{t,0}], before the first step.
        squares: ||grad L_{t,e}||^2 (or its expectation) before each of the E steps.
        lr: eta.
        given: the constants.
    """
    L = given.smoothness
    return loss - (lr - L * lr**2 / 2) * sum(squares) + L * len(squares) * lr**2 / 2 * given.sigma**2


def client_drift(*, lr: float, given: Assumptions) -> float:
    """Lemma 2: the expected square of a cross-layer step is at most 2 eta^2 (2 rho^2 + sigma^2 + Gamma)."""
    return 2 * lr**2 * given.second_order


def round_drift(*, loss: float, squares: Sequence[float], lr: float, given: Assumptions) -> float:
    """Theorem "per round drift": a bound of the expected loss after a round, from Lemma 1 and the cross-layer step.

    The arguments are those of ``local_progress``.
    """
    local = local_progress(loss=loss, squares=squares, lr=lr, given=given)
    return local + 2 * lr * given.first_order + given.smoothness / 2 * client_drift(lr=lr, given=given)


def largest_lr(*, squares: Sequence[float], given: Assumptions, derived: bool = True) -> float | None:
    """Theorem "non-convex convergence": the learning rate below which ``round_drift`` promises a decrease.

        (2 S - 4 (Gamma + rho^2)) / (L (S + E sigma^2 + 2 (2 rho^2 + sigma^2 + Gamma))),  S = sum_e ||grad L_{t,e}||^2.

    Args:
        squares: ||grad L_{t,e}||^2 before each of the E steps.
        given: the constants.
        derived: false: as printed, with E rho^2 for E sigma^2. For sigma > rho that is too large: the bound then does
            not decrease at every learning rate below it.

    Returns:
        None if the numerator is not positive: then no learning rate makes the bound decrease, which says nothing
        about the loss. As S <= E rho^2, that is always so for E <= 2.
    """
    total, steps = sum(squares), len(squares)
    noise = given.sigma if derived else given.rho
    numerator = 2 * total - 4 * given.first_order
    return _ratio(numerator, given.smoothness * (total + steps * noise**2 + 2 * given.second_order))


def rounds_to(
    epsilon: float, *, gap: float, steps: int, lr: float, given: Assumptions, derived: bool = True
) -> float | None:
    """Theorem "non-convex convergence rate": rounds until the mean of ||grad L_{t,e}||^2 is at most epsilon.

        T = 2 kappa / (eta (E ((2 - L eta) epsilon - L eta sigma^2) - 4 (Gamma + rho^2)
                            - 2 L eta (2 rho^2 + sigma^2 + Gamma))).

    Args:
        epsilon: what the mean over all steps of all rounds has to reach.
        gap: kappa = L_0 - L^*, the loss at the start above its smallest value.
        steps: E, local steps a round.
        lr: eta.
        given: the constants.
        derived: false: as printed, with the terms of the cross-layer step once for every local step,
            T = 2 kappa / (E eta ((2 - L eta) epsilon - 3 L eta sigma^2 - 2 (2 + L eta) Gamma - 4 (1 + L eta) rho^2)).

    Returns:
        None if the denominator is not positive: epsilon is below what the bound can reach at this learning rate.
    """
    local, cross = _per_step(epsilon, lr=lr, given=given)
    return _ratio(2 * gap, lr * (steps * local - cross if derived else steps * (local - cross)))


def lr_condition(epsilon: float, *, steps: int, given: Assumptions, derived: bool = True) -> float | None:
    """The learning rate below which ``rounds_to`` has an answer.

        (2 E epsilon - 4 (Gamma + rho^2)) / (L (E epsilon + E sigma^2 + 2 (2 rho^2 + sigma^2 + Gamma))).

    It is ``largest_lr`` for steps whose squares are epsilon each.

    Args:
        epsilon: as in ``rounds_to``.
        steps: E.
        given: the constants.
        derived: false: as printed, (2 epsilon - 4 (Gamma + rho^2)) / (L (epsilon + E rho^2 + 2 (...))). The printed T
            asks for sigma^2 in place of E rho^2; for sigma^2 > E rho^2 the printed T is negative at some learning
            rates that the printed condition admits.

    Returns:
        None if no learning rate will do. The printed one needs epsilon > 2 (Gamma + rho^2), but epsilon = rho^2 is
        reached without training, so that it never says anything.
    """
    if derived:
        return largest_lr(squares=[epsilon] * steps, given=given)
    denominator = epsilon + steps * given.rho**2 + 2 * given.second_order
    return _ratio(2 * epsilon - 4 * given.first_order, given.smoothness * denominator)


def smallest_epsilon(*, steps: int, lr: float, given: Assumptions, derived: bool = True) -> float | None:
    """What the mean square gradient stays above in the bound however many rounds there are; None if eta >= 2 / L.

    Compare it with rho^2, which holds without any training: above that the theorem says nothing.

    Args:
        steps: E.
        lr: eta.
        given: the constants.
        derived: as in ``rounds_to``.
    """
    local, cross = _per_step(0.0, lr=lr, given=given)
    return _ratio(cross / (steps if derived else 1) - local, 2 - given.smoothness * lr)


def _per_step(epsilon: float, *, lr: float, given: Assumptions) -> tuple[float, float]:
    """Twice the decrease of a local step, and twice the increase by the cross-layer step, both over eta."""
    L = given.smoothness
    local = (2 - L * lr) * epsilon - L * lr * given.sigma**2
    return local, 4 * given.first_order + 2 * L * lr * given.second_order


def _ratio(numerator: float, denominator: float) -> float | None:
    """None where the bound is empty."""
    return numerator / denominator if numerator > 0 and denominator > 0 else None
