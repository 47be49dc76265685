"""Small tests of a claim over many trials."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest, pearsonr, spearmanr


@dataclass(frozen=True)
class SignTest:
    """How often a difference is above 0, and how likely that or more is if both signs are equally likely.

    Attributes:
        wins: differences above 0.
        losses: differences below 0; ties count for neither.
        share: of wins among both; none if there is neither.
        p_value: two-sided; supposes independent trials.
    """

    wins: int
    losses: int
    share: float | None
    p_value: float


def sign_test(differences: Sequence[float]) -> SignTest:
    """The two-sided sign test."""
    signs = np.sign(np.asarray(differences, dtype=np.float64))
    wins, losses = int((signs > 0).sum()), int((signs < 0).sum())
    trials = wins + losses
    p = float(binomtest(wins, trials).pvalue) if trials else 1.0
    return SignTest(wins, losses, wins / trials if trials else None, p)


@dataclass(frozen=True)
class Correlation:
    """Pearson's and Spearman's coefficients over so many points; none where they are undefined."""

    points: int
    pearson: float | None
    spearman: float | None


def correlation(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Of two rows of numbers; undefined below 3 points, or if one row is constant."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(len(x), None, None)
    return Correlation(len(x), float(pearsonr(x, y).statistic), float(spearmanr(x, y).statistic))
