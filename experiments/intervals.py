"""Two numbers of the tables: the half width of a 95 % interval, and the smallest effect that n seeds show."""

from functools import cache
from math import sqrt

from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as student

POWER = 0.8  # the probability with which an effect of the smallest visible size is found


def half_width(deviation: float, n: int) -> float:
    """Half width of the 95 % confidence interval of a mean of n values, by Student's t."""
    return float(student.ppf(0.975, n - 1)) * deviation / sqrt(n)


@cache
def visible_deviations(n: int) -> float:
    """Smallest effect, in standard deviations, that n values show: the 95 % interval excludes 0 in 80 % of cases."""
    critical = student.ppf(0.975, n - 1)
    # An interval on the wrong side of 0 is too improbable here to count.
    return float(brentq(lambda effect: nct.sf(critical, n - 1, effect * sqrt(n)) - POWER, 0, 10))


def visible_from(deviation: float, n: int) -> float:
    """Smallest effect that n paired differences with this standard deviation show with a probability of 80 %."""
    return visible_deviations(n) * deviation
