"""How smooth the distribution of an update's elements is, as numbers; docs/analysis-updates.md gives the reasons.

**Roughness** is how much the density goes up and down beyond one rise and one fall,

    TV(p) / (2 max p) - 1,        TV(p) = sum_j |p_{j+1} - p_j|

with p the histogram of the n standardised elements z = (x - median) / (IQR / 1.349) over [-4, 4], in 2 n^(1/3) bins
(Rice's rule), and 0 beyond both ends. It is 0 for one peak, and m - 1 for m separate peaks of one height. A kernel
estimate would smooth away what is measured. **Step** is the Wasserstein-1 distance between the standardised
distributions of consecutive rounds.

Elements that are exactly 0 are left out: a position that nobody trained in a round keeps its value bit for bit.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from incofl.analysis.layers import Array

REACH = 4.0  # standard deviations to both sides; what lies beyond is left out, as end bins would be peaks
LEAST = 64  # elements below which a histogram says nothing
NORMAL_IQR = 1.3489795003921634  # interquartile range of the normal distribution, in standard deviations
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Shape:
    """The distribution of an update."""

    elements: int  # that moved
    roughness: float  # extra peaks, by height
    kurtosis: float  # excess kurtosis: 0 for a bell, above for a needle with heavy tails, below for a box
    mean: float
    deviation: float
    quantiles: tuple[float, ...]  # as QUANTILES
    scale: float  # width of a standard unit
    counts: Array  # histogram in standard units around the median, over REACH to both sides

    def edges(self) -> Array:
        """Returns the edges of the histogram's bins, as values of elements."""
        edges: Array = np.linspace(-REACH, REACH, len(self.counts) + 1) * self.scale + self.quantiles[2]
        return edges


def describe(values: ArrayLike) -> tuple[Shape, Array] | None:
    """Returns the shape of an update and its standardised elements.

    Returns ``None`` where fewer than ``LEAST`` elements moved, or half of them by the same amount.
    """
    x = np.asarray(values, dtype=np.float64).ravel()
    x = x[x != 0]
    if len(x) < LEAST:
        return None
    marks = np.quantile(x, QUANTILES)
    # Quartiles, not the standard deviation: a few large elements would squeeze the rest into one bin.
    scale = float(marks[3] - marks[1]) / NORMAL_IQR
    if not scale > 0:
        return None
    z, mean, deviation = (x - marks[2]) / scale, float(x.mean()), float(x.std())
    counts, kurtosis = histogram(z), float(np.mean((x - mean) ** 4)) / deviation**4 - 3
    return Shape(len(x), roughness(counts), kurtosis, mean, deviation, tuple(marks.tolist()), scale, counts), z


def histogram(z: Array) -> Array:
    """Returns the histogram of standardised elements; the number of bins grows with theirs."""
    bins = max(8, math.ceil(2 * len(z) ** (1 / 3)))
    return np.histogram(z, bins, (-REACH, REACH))[0].astype(np.float64)


def roughness(counts: Array) -> float:
    """Returns the total variation of a histogram beyond that of one peak, in peaks."""
    return float(np.abs(np.diff(counts, prepend=0, append=0)).sum() / (2 * counts.max()) - 1)


def quantiles(z: Array, points: int = 1000) -> Array:
    """Returns evenly spaced quantiles of standardised elements, within ``REACH``."""
    ordered: Array = np.sort(z.clip(-REACH, REACH))
    return ordered.take(((np.arange(points) + 0.5) / points * len(z)).astype(int))


def step(one: Array, other: Array) -> float:
    """Returns the Wasserstein-1 distance of two distributions, given as ``quantiles``: their mean distance."""
    return float(np.abs(one - other).mean())


@cache
def floor(elements: int, draws: int = 20) -> float:
    """Returns the roughness that ``elements`` normal numbers have by chance, mean of a few draws."""
    rng = np.random.default_rng(0)
    return float(np.mean([roughness(histogram(rng.standard_normal(elements))) for _ in range(draws)]))
