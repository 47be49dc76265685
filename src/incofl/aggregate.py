"""The covered mean: every scalar position is averaged over the clients that hold it, as their uploads arrive."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from incofl.layout import Axes, Layout
from incofl.split import Slice
from incofl.split.slices import cuts
from incofl.tensors import Tensors, empty

_CHUNK = 2**18  # elements of a sum that stay in a core's cache while several uploads are added to them


@dataclass(frozen=True)
class CoveredMean:
    """Values in server coordinates, with the summed weight of the clients that hold each position.

    ``weight`` broadcasts over ``values`` (its size is 1 along dimensions that are never cut). Where it is zero nobody
    held the position: the value there is exactly 0 and means nothing. Names that nobody held are absent.
    """

    values: Tensors = field(default_factory=dict)
    weight: Tensors = field(default_factory=dict)

    @cached_property
    def gaps(self) -> frozenset[str]:
        """The tensors with positions that nobody held."""
        distinct = {id(weight): weight for weight in self.weight.values()}  # many tensors share one
        open_ = {number for number, weight in distinct.items() if float(weight.min()) == 0}
        return frozenset(name for name, weight in self.weight.items() if id(weight) in open_)

    def replace(self, name: str, old: Tensor, new: Tensor) -> Tensor:
        """``new`` where somebody held the position, ``old`` bit for bit elsewhere."""
        return torch.where(self.weight[name] > 0, new, old) if name in self.gaps else new


@dataclass(frozen=True)
class Contribution:
    """What one client adds.

    Attributes:
        slice: the positions that it holds.
        values: its values, in the coordinates of the slice.
        weight: its weight in the mean.
        normaliser: the values are divided by it, and the mean is multiplied by the mean normaliser of the clients that
            hold a position (FedNova). With 1 for all it is the plain mean.
    """

    slice: Slice
    values: Mapping[str, Tensor]
    weight: float = 1.0
    normaliser: float = 1.0


class Accumulator:
    """Per-position sum and weight. Holds one server model, however many clients pass through."""

    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        self._layout = layout
        self._dtype = dtype
        self._sum: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}
        # Clients of a level share a slice: there are few, whose weights and weighted normalisers are added up first.
        self._weights: dict[tuple[int, frozenset[str]], tuple[Slice, float, float]] = {}
        self._normalised = False

    def add(self, *parts: Contribution) -> None:
        """Adds what some clients uploaded. The sums depend on the order of the clients, not on who comes together.

        For parts that come together, each piece of a sum is fetched from memory once, not once per part.
        """
        large: dict[str, list[Contribution]] = {}
        for part in parts:
            key = id(part.slice), frozenset(part.values)
            _, weight, normaliser = self._weights.get(key, (part.slice, 0.0, 0.0))
            self._weights[key] = part.slice, weight + part.weight, normaliser + part.weight * part.normaliser
            self._normalised |= part.normaliser != 1.0
            small: Tensors = {}
            for name, value in part.values.items():
                if math.prod(self._layout.shapes[name]) > _CHUNK:
                    large.setdefault(name, []).append(part)
                    continue
                if name not in self._sum:
                    self._sum[name] = self._new(name, value).zero_()
                small[name] = value
            part.slice.put(small, self._sum, part.weight / part.normaliser)
        for name, holders in large.items():
            # Neighbours that hold the same positions are added chunk by chunk; their order is kept.
            for _, same in itertools.groupby(holders, key=lambda p: None if name in p.slice.whole else id(p.slice)):
                self._add(name, list(same))

    def mean(self) -> CoveredMean:
        """Sum over weight where somebody held the position, exactly 0 elsewhere. Whole numbers are truncated.

        The sums become the means: an accumulator has one mean.
        """
        # The weights of a position follow from its channels and who holds them: many tensors share them.
        alike: dict[tuple[Axes, torch.dtype, tuple[bool, ...]], list[str]] = {}
        for name, total in self._sum.items():
            holders = tuple(name in names for _, names in self._weights)
            alike.setdefault((self._layout.axes[name], total.dtype, holders), []).append(name)
        weights: Tensors = {}
        for names in alike.values():
            held = [part for (_, known), part in self._weights.items() if names[0] in known]
            weight = self._spread(names[0], [(slice_, total) for slice_, total, _ in held])
            weights |= dict.fromkeys(names, weight)
            divisor = torch.where(weight > 0, weight, 1)
            totals = [self._sum[name] for name in names]
            torch._foreach_div_(totals, float(divisor) if weight.numel() == 1 else [divisor] * len(totals))
            if self._normalised:
                normaliser = self._spread(names[0], [(slice_, total) for slice_, _, total in held]) / divisor
                torch._foreach_mul_(totals, [normaliser] * len(totals))
        values = {name: total.to(self._dtypes[name]) for name, total in self._sum.items()}
        self._sum = {}
        return CoveredMean(values, weights)

    def _new(self, name: str, value: Tensor) -> Tensor:
        self._dtypes[name] = value.dtype
        # Whole numbers (counters of batch norm) are summed exactly, in float64.
        return empty(self._layout.shapes[name], self._dtype if value.is_floating_point() else torch.float64)

    def _add(self, name: str, parts: Sequence[Contribution]) -> None:
        """Adds parts that hold the same positions of a tensor."""
        slice_, fresh = parts[0].slice, name not in self._sum
        if fresh:
            self._sum[name] = self._new(name, parts[0].values[name])
            if name not in slice_.whole:
                self._sum[name].zero_()
        target = slice_.view(name, self._sum[name])
        if target is None:
            for part in parts:
                slice_.put({name: part.values[name]}, self._sum, part.weight / part.normaliser)
            return
        rows = max(1, _CHUNK * len(target) // target.numel())
        for start in range(0, len(target), rows):
            chunk = target[start : start + rows]
            if fresh and name in slice_.whole:
                chunk.zero_()  # here it is in the cache when the first part is added
            for part in parts:
                chunk.add_(part.values[name][start : start + rows], alpha=part.weight / part.normaliser)

    def _spread(self, name: str, holders: Sequence[tuple[Slice, float]]) -> Tensor:
        return spread(self._layout, name, holders).to(self._sum[name].dtype)


def spread(layout: Layout, name: str, holders: Sequence[tuple[Slice, float]]) -> Tensor:
    """Sums, at each position of a tensor, the numbers of those that hold it; size 1 along dimensions never cut."""
    shape = layout.shapes[name]
    if all(name in slice_.whole for slice_, _ in holders):
        return torch.full([1] * len(shape), sum(number for _, number in holders), dtype=torch.float64)
    cut = [any(cuts(slice_.index[name][dim]) for slice_, _ in holders) for dim in range(len(shape))]
    total = torch.zeros([n if is_cut else 1 for n, is_cut in zip(shape, cut, strict=True)], dtype=torch.float64)
    for slice_, number in holders:
        slice_.put({name: torch.ones((), dtype=torch.float64)}, {name: total}, number)
    return total
