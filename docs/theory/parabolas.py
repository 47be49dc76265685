"""A federation of noisy parabolas, on which the bounds of ``bounds.py`` are checked against exact expectations.

A client has L_i(w) = (w - a_i)' H_i (w - a_i) / 2 for w = (w_0, w_k), a shallow and a deep layer of one shape, and
stochastic gradients H_i (w - a_i) + xi with Gaussian xi of covariance C. Steps are linear in w, so mean and covariance
of w, and with them every expected loss, follow without sampling. All constants are known: L is the largest eigenvalue
of H_i, sigma^2 the trace of C, Gamma the trace of its block between the layers. rho^2 is the largest mean square of a
stochastic gradient on the way.

Run ``python docs/theory/parabolas.py`` to print the table of docs/theory.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from bounds import Assumptions, largest_lr, round_drift
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Where the weights are, before the dice are thrown."""

    mean: Array
    covariance: Array


@dataclass(frozen=True)
class Parabola:
    """The objective of one client.

    Attributes:
        curvature: H, symmetric and positive definite.
        optimum: a.
        noise: C, the covariance of a stochastic gradient.
    """

    curvature: Array
    optimum: Array
    noise: Array

    def loss(self, at: Spread) -> float:
        """E[L]."""
        off = at.mean - self.optimum
        return float(off @ self.curvature @ off + np.trace(self.curvature @ at.covariance)) / 2

    def square(self, at: Spread) -> float:
        """E||grad L||^2."""
        off = self.curvature @ (at.mean - self.optimum)
        return float(off @ off + np.trace(self.curvature @ at.covariance @ self.curvature))

    def step(self, at: Spread, lr: float, along: Array | None = None) -> Spread:
        """One step of SGD, w - lr M g; ``along`` is M, by which layers get gradients of others (none: their own)."""
        mix = np.eye(len(self.optimum)) if along is None else along
        keep = np.eye(len(self.optimum)) - lr * mix @ self.curvature
        noise = lr**2 * mix @ self.noise @ mix.T
        mean = at.mean - lr * mix @ self.curvature @ (at.mean - self.optimum)
        return Spread(mean, keep @ at.covariance @ keep.T + noise)

    def walk(self, at: Spread, lr: float, steps: int) -> list[Spread]:
        """Where it is before the first step and after each."""
        path = [at]
        for _ in range(steps):
            path.append(self.step(path[-1], lr))
        return path

    def given(self, path: Sequence[Spread]) -> Assumptions:
        """The constants, as small as this path lets them be."""
        half = len(self.optimum) // 2
        sigma2 = float(np.trace(self.noise))
        return Assumptions(
            smoothness=float(np.linalg.eigvalsh(self.curvature)[-1]),
            sigma=sigma2**0.5,
            rho=(max(map(self.square, path)) + sigma2) ** 0.5,
            gamma=abs(float(np.trace(self.noise[:half, half:]))),
        )


def cross_layer(size: int) -> Array:
    """M of the last step of a round in the analysis: the deep layer moves by g_0 + g_k, the shallow one rests."""
    half = np.eye(size // 2)
    return np.block([[0 * half, 0 * half], [half, half]])


def mixed(size: int) -> Array:
    """What InCo without normalisation and optimisation does to an update: U_k becomes U_0 + U_k."""
    half = np.eye(size // 2)
    return np.block([[half, 0 * half], [half, half]])


@dataclass(frozen=True)
class Checked:
    """One round: the expected loss before and after it, the bound, and what the bound was made of."""

    before: float
    after: float
    bound: float
    squares: list[float]
    given: Assumptions

    @property
    def largest(self) -> tuple[float | None, float | None]:
        """The largest learning rate, as derived and as printed."""
        derived, printed = (largest_lr(squares=self.squares, given=self.given, derived=d) for d in (True, False))
        return derived, printed


Round = Literal["analysis", "ascent", "averaged", "inco"]


def check(clients: Sequence[Parabola], start: Array, *, lr: float, steps: int, round: Round = "analysis") -> Checked:
    """Holds the bound for the first client against its expected loss after one round from ``start``.

    Args:
        clients: of whom the first is looked at.
        start: the weights that all clients receive.
        lr: eta.
        steps: E.
        round: how it ends. ``analysis``: the first client alone makes one more step, -eta (g_0 + g_k): what the paper
            analyses. ``ascent``: +eta (g_0 + g_k), as its equations have the sign. ``averaged``: the server takes the
            mean of all clients. ``inco``: and adds the mean update of the shallow layer to that of the deep one.
    """
    me, size = clients[0], len(start)
    at = Spread(start, np.zeros((size, size)))
    path = me.walk(at, lr, steps)
    if round in ("analysis", "ascent"):
        end = me.step(path[-1], lr if round == "analysis" else -lr, cross_layer(size))
    else:
        ends = [client.walk(at, lr, steps)[-1] for client in clients]
        mix = mixed(size) if round == "inco" else np.eye(size)
        update = np.mean([e.mean for e in ends], axis=0) - start
        covariance = np.sum([e.covariance for e in ends], axis=0) / len(clients) ** 2  # they are independent
        end = Spread(start + mix @ update, mix @ covariance @ mix.T)
    squares, given = [me.square(e) for e in path[:-1]], me.given(path)
    bound = round_drift(loss=me.loss(at), squares=squares, lr=lr, given=given)
    return Checked(me.loss(at), me.loss(end), bound, squares, given)


def federation(
    clients: int = 5, layer: int = 3, apart: float = 1.0, noise: float = 0.1, seed: int = 0
) -> list[Parabola]:
    """Clients with eigenvalues of H from 0.1 to 1, whose optima lie ``apart`` standard deviations from a common one."""
    rng = np.random.default_rng(seed)
    size, common = 2 * layer, rng.standard_normal(2 * layer)

    def one() -> Parabola:
        turn = np.linalg.qr(rng.standard_normal((size, size)))[0]
        root = rng.standard_normal((size, size))
        covariance = root @ root.T
        return Parabola(
            turn @ np.diag(np.linspace(0.1, 1.0, size)) @ turn.T,
            common + apart * rng.standard_normal(size),
            noise**2 * covariance / np.trace(covariance),
        )

    return [one() for _ in range(clients)]


def main() -> None:
    """Prints, for numbers of local steps, what one round does and what the bound says."""
    clients, start = federation(), np.zeros(6)
    print(f"{'E':>4} {'change':>8} {'bound':>8} {'averaged':>9} {'inco':>8} {'eta <':>8} {'printed':>8}")
    for steps in (1, 2, 3, 5, 10, 20, 50, 100):
        one = check(clients, start, lr=0.01, steps=steps)
        others = [check(clients, start, lr=0.01, steps=steps, round=kind) for kind in ("averaged", "inco")]
        changes = [one.after - one.before, one.bound - one.before, *(c.after - c.before for c in others)]
        rates = ["nothing" if rate is None else f"{rate:.4f}" for rate in one.largest]
        print(
            f"{steps:>4}",
            *(f"{c:+8.4f}" for c in changes[:2]),
            f"{changes[2]:+9.4f} {changes[3]:+8.4f}",
            *(f"{r:>8}" for r in rates),
        )


if __name__ == "__main__":
    main()
