"""Means over seeds, always ± half width of the 95 % confidence interval (Student's t), and tests of differences."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, TypeVar

import numpy as np

Row = TypeVar("Row", bound=Mapping[str, Any])
FEWEST_POINTS = 3  # two points always correlate perfectly


@cache
def student_quantile(df: int) -> float:
    """Half width, exact to about 1e-12, of the interval with 95 % of Student's t with ``df`` degrees of freedom."""
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, df) < 0.95 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _within(angle: float, df: int) -> float:
    """P(|T| <= sqrt(df) tan(angle)) as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd, cosine = df % 2, math.cos(angle)
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, df, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with the half width of its 95 % confidence interval, which is unknown for one seed."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float], **more: Any) -> Self:
        mean, count = float(np.mean(values)), len(values)
        error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else None
        return cls(mean, None if error is None else student_quantile(count - 1) * error, **more)


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The mean of those values that are known; ``None`` if there are none."""
    known = [value for value in values if value is not None]
    return Estimate.of(known) if known else None


def plus_minus(found: Estimate, spec: str = ".1f", scale: float = 1) -> str:
    """Writes a mean and the half width of its interval."""
    half = "" if found.half_width is None else f" ± {format(scale * found.half_width, spec.lstrip('+'))}"
    return format(scale * found.mean, spec) + half


@dataclass(frozen=True)
class Difference(Estimate):
    """A difference between two methods, paired by seed."""

    wins: int  # number of seeds in which the first method is better
    visible_from: float | None = None  # smallest true difference that these seeds find with 80 % power
    p_value: float | None = None  # of a paired t test, two-sided; none for one seed


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Compares two methods seed by seed: the values at the same position have the same seed."""
    gaps = [one - other for one, other in zip(ours, theirs, strict=True)]
    visible = visible_effect(len(gaps)) * float(np.std(gaps, ddof=1)) if len(gaps) > 1 else None
    return Difference.of(gaps, wins=sum(gap > 0 for gap in gaps), visible_from=visible, p_value=p_value(gaps))


def p_value(values: Sequence[float]) -> float | None:
    """How likely a mean at least as far from 0 is if the true mean is 0: Student's t, two-sided."""
    df, mean = len(values) - 1, float(np.mean(values))
    if not df:
        return None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return 1 - _within(math.atan2(abs(mean), error * math.sqrt(df)), df) if mean else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number (Holm 1979): the chance of one false finding among all stays below 5 %."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = largest
    return corrected


@cache
def visible_effect(pairs: int, power: float = 0.8) -> float:
    """The effect, in standard deviations, that a two-sided paired t test at 5 % finds with some power."""
    df, critical = pairs - 1, student_quantile(pairs - 1)
    # T exceeds the critical value if (Z + effect sqrt(n)) / s does, where s is the estimated over the true deviation.
    s = np.linspace(0.001, 8, 8000)
    density = np.exp((df - 1) * np.log(s) - df * (s**2 - 1) / 2)

    def found(effect: float) -> float:
        shift = effect * math.sqrt(pairs)
        return float(np.average([math.erfc((critical * x - shift) / math.sqrt(2)) / 2 for x in s], weights=density))

    low, high = 0.0, 100.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < power else (low, middle)
    return high


@dataclass(frozen=True)
class SignTest:
    """How often a difference is above 0, and how likely that is if both signs are equally likely."""

    wins: int  # differences above 0
    losses: int  # differences below 0; ties count for neither
    share: float | None  # of wins among both; none if there is neither
    p_value: float  # two-sided; assumes independent trials


def sign_test(differences: Sequence[float]) -> SignTest:
    """The exact two-sided sign test."""
    wins, losses = sum(gap > 0 for gap in differences), sum(gap < 0 for gap in differences)
    trials = wins + losses
    tail = sum(math.comb(trials, count) for count in range(min(wins, losses) + 1))
    return SignTest(wins, losses, wins / trials if trials else None, min(1.0, 2 * tail / 2**trials))


@dataclass(frozen=True)
class Correlation:
    """Pearson's and Spearman's coefficients of some points; ``None`` where they are undefined."""

    points: int
    pearson: float | None
    spearman: float | None


def correlation(x: Sequence[float | None], y: Sequence[float | None]) -> Correlation:
    """Correlates the pairs in which both are known; undefined below 3 pairs, or if one series is constant."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a is not None and b is not None]
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    if len(pairs) < FEWEST_POINTS or np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return Correlation(len(pairs), None, None)
    pearson, spearman = (np.corrcoef(*both)[0, 1] for both in ((ours, theirs), (_ranks(ours), _ranks(theirs))))
    return Correlation(len(pairs), float(pearson), float(spearman))


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal values share the mean of their ranks."""
    array = np.asarray(values, dtype=np.float64)
    return [float((array < value).sum() + (array <= value).sum()) / 2 for value in array]


def tail(evaluated: Sequence[Row], rounds: int | None = None) -> list[Row]:
    """The evaluations that judge a run: those in the last ``rounds``, or in the last ten but at most a fifth of all."""
    last = [row for row in evaluated if row["round"] > evaluated[-1]["round"] - (rounds or 10)]
    return last if rounds else last[-max(1, len(evaluated) // 5) :]


def tail_mean(evaluated: Sequence[Mapping[str, Any]], rounds: int | None = None) -> float:
    """The mean accuracy of those evaluations."""
    return float(np.mean([row["accuracy"] for row in tail(evaluated, rounds)]))


def tail_name(judged: Sequence[Mapping[str, Any]]) -> str:
    """Names what ``tail`` selected, for headings: ``mean of rounds 41-50``."""
    rounds = [row["round"] for row in judged]
    all_between = rounds == list(range(rounds[0], rounds[-1] + 1))
    span = f"{rounds[0]}-{rounds[-1]}" if all_between else ", ".join(map(str, rounds))
    return f"mean of rounds {span}" if len(rounds) > 1 else f"round {rounds[0]}"
