"""How smooth the distribution of an update's elements is, as numbers.

The paper says "smooth" of pictures. Here it is the following, for the elements of one tensor in one round.

**Roughness** (the headline): how much the density goes up and down beyond one rise and one fall,

    TV(p) / (2 max p) - 1,        TV(p) = sum_j |p_{j+1} - p_j|

with p the histogram of the n standardised elements z = (x - median) / (IQR / 1.349) over [-4, 4], in 2 n^(1/3) bins
(Rice's rule), and 0 beyond both ends. It is 0 for a density with one peak, whatever its width or its tails, and m - 1
for m separate peaks of one height: the number of extra peaks, each counted by its height. A kernel estimate would
smooth away what is to be measured. Shift and scale do not change it. A histogram of n numbers is ragged by chance
alone; ``floor`` says how much for n normal numbers. A shallow layer and the deep layers that belong to it have one
shape, so the same n and the same bins unless clients train only parts of them.

Three more numbers look at other meanings of the word. **Excess kurtosis**, by its size: 0 for a normal distribution,
above 0 for a needle with heavy tails, below for a box. **Step**: the Wasserstein-1 distance between the standardised
distributions of consecutive rounds: small if the shape changes smoothly from round to round. **Width**: the size of
log2 of the ratio of their widths.

Elements that are exactly 0 are left out: a position that nobody trained in a round keeps its value bit for bit.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

REACH = 4.0  # standard deviations to both sides; what lies beyond is left out, as end bins would be peaks
LEAST = 64  # elements below which a histogram tells nothing
NORMAL_IQR = 1.3489795003921634  # of the normal distribution, in standard deviations


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Shape:
    """What the distribution of an update looks like.

    Attributes:
        elements: that moved.
        roughness: extra peaks, by height.
        kurtosis: excess kurtosis.
        mean: of the elements.
        deviation: their standard deviation.
        quantiles: 5, 25, 50, 75 and 95 percent.
        scale: of an element in standard units.
        counts: histogram in standard units around the median, over ``REACH`` to both sides.
    """

    elements: int
    roughness: float
    kurtosis: float
    mean: float
    deviation: float
    quantiles: tuple[float, ...]
    scale: float
    counts: Array

    def edges(self) -> Array:
        """Of the histogram's bins, as values of elements."""
        edges: Array = np.linspace(-REACH, REACH, len(self.counts) + 1) * self.scale + self.quantiles[2]
        return edges


def describe(values: ArrayLike) -> tuple[Shape, Array] | None:
    """The shape of an update's elements, and the standardised elements.

    None where fewer than ``LEAST`` elements moved, or half of them by the same amount.
    """
    x = np.asarray(values, dtype=np.float64).ravel()
    x = x[x != 0]
    if len(x) < LEAST:
        return None
    quantiles = np.quantile(x, QUANTILES)
    # Quartiles, not the standard deviation: a few large elements would squeeze the rest into one bin.
    scale = float(quantiles[3] - quantiles[1]) / NORMAL_IQR
    if not scale > 0:
        return None
    z = (x - quantiles[2]) / scale
    counts, deviation = histogram(z), float(x.std())
    found = Shape(
        elements=len(x),
        roughness=roughness(counts),
        kurtosis=float(np.mean((x - x.mean()) ** 4)) / deviation**4 - 3,
        mean=float(x.mean()),
        deviation=deviation,
        quantiles=tuple(quantiles.tolist()),
        scale=scale,
        counts=counts,
    )
    return found, z


def histogram(z: Array) -> Array:
    """Of standardised elements, with as many bins as their number asks for."""
    bins = max(8, math.ceil(2 * len(z) ** (1 / 3)))
    return np.histogram(z, bins, (-REACH, REACH))[0].astype(np.float64)


def roughness(counts: Array) -> float:
    """Of a histogram: its total variation beyond that of one peak, in peaks."""
    return float(np.abs(np.diff(counts, prepend=0, append=0)).sum() / (2 * counts.max()) - 1)


def quantiles(z: Array, points: int = 1000) -> Array:
    """Evenly spaced quantiles of standardised elements, within ``REACH``."""
    ordered: Array = np.sort(z.clip(-REACH, REACH))
    return ordered.take(((np.arange(points) + 0.5) / points * len(z)).astype(int))


def step(one: Array, other: Array) -> float:
    """Wasserstein-1 distance of two distributions, given as ``quantiles``: their mean distance."""
    return float(np.abs(one - other).mean())


@cache
def floor(elements: int, draws: int = 20) -> float:
    """The roughness that so many normal numbers have by chance, mean of a few draws."""
    rng = np.random.default_rng(0)
    return float(np.mean([roughness(histogram(rng.standard_normal(elements))) for _ in range(draws)]))
