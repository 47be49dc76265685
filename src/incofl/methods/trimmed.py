"""Means of each position without its extremes: ``NAME+trimmed`` and ``NAME+median``.

Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018. At a position with h holders, the f smallest and the f
largest of their values are left out, and the others are averaged:

    f = min(ceil(share h), ceil(h / 2) - 1)

so that one value is left, or two: with a share of one half this is the median. Where one or two clients hold a position
there is nothing to leave out, and the result is their mean; ``NAME+holders`` says what becomes of such positions.

Every holder counts once. The values of all clients of a round are kept until the last has come: as much memory as their
uploads, and that of the largest tensor once more for each client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from incofl.aggregate import Accumulator, Contribution, CoveredMean, spread
from incofl.layout import Layout
from incofl.mean import Mean
from incofl.options import options
from incofl.split import Slice
from incofl.tensors import Tensors, one_thread

_CHUNK = 2**14  # positions that are sorted at a time: their values fit into a core's cache


@options("trimmed")
class Trimmed(Mean):
    """The mean of the values of a position without its extremes."""

    share: Annotated[float, Ge(0), Le(0.5)] = 0.2  # of the holders of a position, left out at either end

    robust: ClassVar[bool] = True
    keeps_uploads: ClassVar[bool] = True
    by_position: ClassVar[bool] = True

    def accumulator(self, layout: Layout, dtype: torch.dtype) -> Accumulator:
        return SortedValues(layout, dtype, self.share)


@dataclass(frozen=True)
class Median(Mean):
    """The median of the values of a position; of an even number, the mean of the two in the middle."""

    robust: ClassVar[bool] = True
    keeps_uploads: ClassVar[bool] = True
    by_position: ClassVar[bool] = True

    def accumulator(self, layout: Layout, dtype: torch.dtype) -> Accumulator:
        return SortedValues(layout, dtype, 0.5)


class SortedValues(Accumulator):
    """Keeps the values of all clients, and averages those of each position without its extremes."""

    def __init__(self, layout: Layout, dtype: torch.dtype, share: float) -> None:
        super().__init__(layout, dtype)
        self._share = share
        self._values: dict[str, list[tuple[Slice, Tensor, float]]] = {}

    def add(self, *parts: Contribution) -> None:
        for part in parts:
            for name, value in part.values.items():
                self._values.setdefault(name, []).append((part.slice, value.clone(), part.normaliser))

    def add_stack(
        self, slice_: Slice, values: Mapping[str, Tensor], weights: Sequence[float], normalisers: Sequence[float]
    ) -> None:
        for at, (weight, normaliser) in enumerate(zip(weights, normalisers, strict=True)):
            self.add(Contribution(slice_, {n: v[at] for n, v in values.items()}, weight, normaliser))

    def mean(self) -> CoveredMean:
        values, weights = Tensors(), Tensors()
        with one_thread():  # the same bits however many there are
            for name, parts in self._values.items():
                wide = self._dtype if parts[0][1].is_floating_point() else torch.float64
                holders = spread(self._layout, name, [(slice_, 1.0) for slice_, _, _ in parts])
                mean = trimmed_mean(self._stacked(name, parts, wide), holders, self._share)
                if any(normaliser != 1 for _, _, normaliser in parts):  # FedNova
                    total = spread(self._layout, name, [(slice_, n) for slice_, _, n in parts])
                    mean *= (total / holders.clamp(min=1)).to(wide)
                values[name], weights[name] = mean.to(parts[0][1].dtype), holders.to(wide)
        self._values = {}
        return CoveredMean(values, weights)

    def _stacked(self, name: str, parts: Sequence[tuple[Slice, Tensor, float]], dtype: torch.dtype) -> Tensor:
        """The values of each client in server coordinates, infinite where it holds none."""
        full = torch.full((len(parts), *self._layout.shapes[name]), torch.inf, dtype=dtype)
        for row, (slice_, value, normaliser) in zip(full, parts, strict=True):
            slice_.write({name: value if normaliser == 1 else value / normaliser}, {name: row})
        return full


def trimmed_mean(values: Tensor, holders: Tensor, share: float) -> Tensor:
    """The mean over the first dimension without extremes; values that are not held are infinite, and not counted.

    ``holders`` has the number of values of each position, and size 1 along dimensions in which all have the same.
    """
    left_out = torch.minimum((share * holders - 1e-9).ceil(), ((holders + 1) / 2).floor() - 1).clamp(min=0)
    first, last = (x.expand(values.shape[1:]).flatten() for x in (left_out, holders - left_out))
    rows, flat = torch.arange(len(values))[:, None], values.reshape(len(values), -1)
    found = torch.empty_like(flat[0])
    for start in range(0, flat.shape[1], _CHUNK):
        at = slice(start, start + _CHUNK)
        ordered = torch.stack(sort_rows(list(flat[:, at])))
        counted = (rows >= first[at]) & (rows < last[at])
        total = torch.where(counted, ordered, 0).sum(0)
        found[at] = total / (last[at] - first[at]).clamp(min=1).to(total)
    return found.view(values.shape[1:])


def sort_rows(rows: list[Tensor]) -> list[Tensor]:
    """The smallest of some tensors at each position, the second smallest, and so on: a network of comparisons.

    Batcher's odd-even merge sort: for a few dozen rows it is many times faster than to sort each position by itself.
    """
    n, step = len(rows), 1
    while step < n:
        gap = step
        while gap >= 1:
            for low in range(gap % step, n - gap, 2 * gap):
                for at in range(low, min(low + gap, n - gap)):
                    if at // (2 * step) == (at + gap) // (2 * step):
                        one, other = rows[at], rows[at + gap]
                        rows[at], rows[at + gap] = torch.minimum(one, other), torch.maximum(one, other)
            gap //= 2
        step *= 2
    return rows
