"""The covered mean: every scalar position is averaged over the clients that hold it, as their uploads arrive."""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from incofl.layout import Axes, Layout
from incofl.split import Slice
from incofl.split.slices import cuts
from incofl.tensors import Tensors, empty, one_thread, only

_CHUNK = 2**18  # elements of a sum that stay in a core's cache while several uploads are added to them


@dataclass(frozen=True)
class CoveredMean:
    """Means in server coordinates, each position over the clients that hold it; names that nobody held are absent."""

    values: Tensors  # exactly 0 where nobody held the position, which means nothing
    weight: Tensors  # summed weight of the holders of each position; size 1 along dimensions that are never cut

    def over(self, old: Mapping[str, Tensor]) -> Tensors:
        """The values where somebody held the position, those of ``old`` bit for bit elsewhere."""
        return {
            name: new if float(self.weight[name].min()) > 0 else torch.where(self.weight[name] > 0, new, old[name])
            for name, new in self.values.items()
        }


@dataclass(frozen=True)
class Contribution:
    """What one client adds: values at the positions that it holds, with its weight in the mean."""

    slice: Slice
    values: Mapping[str, Tensor]  # in the coordinates of the slice
    weight: float = 1.0
    normaliser: float = 1.0  # divides the values; the holders' mean normaliser multiplies the mean (FedNova)


# Of a contribution, the small tensors that are added to views of the sums, the views, those whose positions lists
# choose, and the large tensors.
Targets = tuple[list[str], list[Tensor], Set[str], list[str]]


class Accumulator:
    """Per-position sum and weight. Holds one server model, however many clients pass through."""

    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        self._layout = layout
        self._dtype = dtype
        self._sum: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}
        # Clients of a level share a slice: there are few, whose weights and weighted normalisers are added up first.
        self._weights: dict[tuple[int, frozenset[str]], tuple[Slice, float, float]] = {}
        self._targets: dict[tuple[int, frozenset[str]], Targets] = {}

    def add(self, *parts: Contribution) -> None:
        """Adds what some clients uploaded; the sums depend on the order of the clients, not on who comes together."""
        large: dict[str, list[Contribution]] = {}
        for part in parts:
            if not part.values:
                continue
            key = id(part.slice), frozenset(part.values)
            _, weight, normaliser = self._weights.get(key, (part.slice, 0.0, 0.0))
            self._weights[key] = part.slice, weight + part.weight, normaliser + part.weight * part.normaliser
            if key not in self._targets:
                self._targets[key] = self._find_targets(part)
            names, views, chosen, long = self._targets[key]
            if names:
                torch._foreach_add_(views, [part.values[n] for n in names], alpha=part.weight / part.normaliser)
            if chosen:
                part.slice.put(only(part.values, chosen), self._sum, part.weight / part.normaliser)
            for name in long:
                large.setdefault(name, []).append(part)
        for name, holders in large.items():
            # Neighbours that hold the same positions are added together; their order is kept.
            for _, same in itertools.groupby(holders, key=lambda p: None if name in p.slice.whole else id(p.slice)):
                self._add(name, list(same))

    def add_stack(
        self, slice_: Slice, values: Mapping[str, Tensor], weights: Sequence[float], normalisers: Sequence[float]
    ) -> None:
        """Adds what clients of one slice uploaded together, in one sum; always on one thread, for the same bits."""
        factors = [weight / normaliser for weight, normaliser in zip(weights, normalisers, strict=True)]
        factor = torch.tensor(factors, dtype=self._dtype) if set(factors) != {1.0} else None

        def total(stacked: Tensor) -> Tensor:
            wide = stacked.to(self._dtype if stacked.is_floating_point() else torch.float64)
            return (wide if factor is None else wide * factor.view(-1, *[1] * (wide.dim() - 1)).to(wide)).sum(0)

        with one_thread():
            summed = {name: total(value) for name, value in values.items()}
        for name, value in values.items():  # the type of what is averaged, not that of its sum
            self._sum_of(name, value)
        key = id(slice_), frozenset(values)
        _, weight, normaliser = self._weights.get(key, (slice_, 0.0, 0.0))
        products = (w * n for w, n in zip(weights, normalisers, strict=True))
        self._weights[key] = slice_, weight + sum(weights), normaliser + sum(products)
        slice_.put(summed, self._sum)

    def mean(self) -> CoveredMean:
        """Sum over weight where somebody held the position; the sums become the means, so it can be called once."""
        # The weights of a position follow from its channels and who holds them: many tensors share them.
        alike: dict[tuple[Axes, torch.dtype, tuple[bool, ...]], list[str]] = {}
        for name, total in self._sum.items():
            holders = tuple(name in names for _, names in self._weights)
            alike.setdefault((self._layout.axes[name], total.dtype, holders), []).append(name)
        weights: Tensors = {}
        for (_, dtype, _), names in alike.items():
            held = [part for (_, known), part in self._weights.items() if names[0] in known]
            weight = spread(self._layout, names[0], [(slice_, total) for slice_, total, _ in held]).to(dtype)
            weights |= dict.fromkeys(names, weight)
            divisor = torch.where(weight > 0, weight, 1)
            totals = [self._sum[name] for name in names]
            torch._foreach_div_(totals, float(divisor) if weight.numel() == 1 else [divisor] * len(totals))
            if any(total != n for _, total, n in held):
                normaliser = spread(self._layout, names[0], [(slice_, n) for slice_, _, n in held]).to(dtype) / divisor
                torch._foreach_mul_(totals, [normaliser] * len(totals))
        values = {name: total.to(self._dtypes[name]) for name, total in self._sum.items()}  # whole numbers truncated
        self._sum, self._targets = {}, {}
        return CoveredMean(values, weights)

    def _find_targets(self, part: Contribution) -> "Targets":
        """Where such a contribution goes, for all that hold the same."""
        long = [name for name in part.values if math.prod(self._layout.shapes[name]) > _CHUNK]
        short = [name for name in part.values if name not in long]
        views = {name: part.slice.view(name, self._sum_of(name, part.values[name])) for name in short}
        direct = {name: view for name, view in views.items() if view is not None}
        return list(direct), list(direct.values()), views.keys() - direct.keys(), long

    def _sum_of(self, name: str, value: Tensor) -> Tensor:
        if name not in self._sum:
            self._dtypes[name] = value.dtype
            # Whole numbers (counters of batch norm) are summed exactly, in float64.
            dtype = self._dtype if value.is_floating_point() else torch.float64
            self._sum[name] = empty(self._layout.shapes[name], dtype).zero_()
        return self._sum[name]

    def _add(self, name: str, parts: Sequence[Contribution]) -> None:
        """Adds parts that hold the same positions of a tensor: each piece of the sum is fetched from memory once."""
        target = parts[0].slice.view(name, self._sum_of(name, parts[0].values[name]))
        if target is None:
            for part in parts:
                part.slice.put({name: part.values[name]}, self._sum, part.weight / part.normaliser)
            return
        rows = max(1, _CHUNK * len(target) // target.numel())
        for start in range(0, len(target), rows):
            chunk = slice(start, start + rows)
            for part in parts:
                target[chunk].add_(part.values[name][chunk], alpha=part.weight / part.normaliser)


def spread(layout: Layout, name: str, holders: Sequence[tuple[Slice, float]]) -> Tensor:
    """Sums, at each position of a tensor, the numbers of those that hold it; size 1 along dimensions never cut."""
    shape = layout.shapes[name]
    cut = [any(cuts(slice_.index[name][dim]) for slice_, _ in holders) for dim in range(len(shape))]
    total = torch.zeros([n if is_cut else 1 for n, is_cut in zip(shape, cut, strict=True)], dtype=torch.float64)
    for slice_, number in holders:
        slice_.put({name: torch.ones((), dtype=torch.float64)}, {name: total}, number)
    return total


def pooled_by_width(
    means: Mapping[int, CoveredMean], slices: Mapping[int, Slice], names: Set[str]
) -> dict[int, CoveredMean]:
    """The means of each level, where those of some ``names`` are averaged over all levels of the same width.

    A level that nobody trained gets the mean of the others, too.
    """
    groups: list[list[int]] = []
    for level, slice_ in sorted(slices.items()):
        group = next((group for group in groups if _same_width(slices[group[0]], slice_)), None)
        if group is None:
            groups.append([level])
        else:
            group.append(level)
    found = {}
    for group in groups:
        known = [means[level] for level in group if level in means]
        pooled = {name: _pooled([mean for mean in known if name in mean.values], name) for name in names}
        for level in group:
            own = means.get(level, CoveredMean({}, {}))
            held = {name: pool for name, pool in pooled.items() if pool is not None and name in slices[level].index}
            values = {name: value.clone() for name, (value, _) in held.items()}
            if values or own.values:
                weights = {name: weight for name, (_, weight) in held.items()}
                found[level] = CoveredMean({**own.values, **values}, {**own.weight, **weights})
    return found


def _same_width(one: Slice, other: Slice) -> bool:
    return all(one.shapes[name] == other.shapes[name] for name in one.shapes.keys() & other.shapes.keys())


def _pooled(means: Sequence[CoveredMean], name: str) -> tuple[Tensor, Tensor] | None:
    """The mean of some means, and its weight."""
    if not means:
        return None
    weights, values = [mean.weight[name] for mean in means], [mean.values[name] for mean in means]
    total = torch.stack([weight.expand_as(values[0]) for weight in weights]).sum(0)
    summed = torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum(0)
    return (summed / torch.where(total > 0, total, 1)).to(values[0].dtype), total
