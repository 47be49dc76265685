"""The covered mean: every scalar position is averaged over the clients that hold it, one upload at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from incofl.layout import Layout
from incofl.split import Slice
from incofl.split.slice import cuts
from incofl.tensors import Tensors


@dataclass(frozen=True)
class Covered:
    """Values in server coordinates, with the summed weight of the clients that hold each position.

    ``weight`` broadcasts over ``values`` (its size is 1 along dimensions that are never cut). Where it is zero nobody
    held the position: the value there is exactly 0 and means nothing. Names that nobody held are absent.
    """

    values: Tensors = field(default_factory=dict)
    weight: Tensors = field(default_factory=dict)


class Accumulator:
    """Per-position sum and weight. Holds one server model, however many clients pass through."""

    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        self._layout = layout
        self._dtype = dtype
        self._sum: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}
        # Clients of a level share a slice, so a tensor has few distinct index maps: their weights are added up first.
        self._weights: dict[str, dict[int, tuple[Slice, float]]] = {}

    def add(self, piece: Slice, part: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Adds a client's ``part``, which is in the coordinates of its slice."""
        for name in [name for name in part if name not in self._sum]:
            # Whole numbers (counters of batch norm) are summed exactly, in float64.
            dtype = self._dtype if part[name].is_floating_point() else torch.float64
            self._sum[name] = torch.zeros(self._layout.shapes[name], dtype=dtype)
            self._dtypes[name] = part[name].dtype
            self._weights[name] = {}
        piece.put(part, self._sum, weight)
        for name in part:
            _, before = self._weights[name].get(id(piece), (piece, 0.0))
            self._weights[name][id(piece)] = piece, before + weight

    def mean(self) -> Covered:
        """Sum over weight where somebody held the position, exactly 0 elsewhere. Whole numbers are truncated.

        The sums become the means: an accumulator has one mean.
        """
        weights = {name: self._weight(name) for name in self._sum}
        values = {}
        for name, total in self._sum.items():
            mean = total.div_(torch.where(weights[name] > 0, weights[name], 1))
            values[name] = mean.to(self._dtypes[name])
        self._sum = {}
        return Covered(values, weights)

    def _weight(self, name: str) -> Tensor:
        """The summed weight of each position, of size 1 along dimensions that nobody cut."""
        shape, held = self._layout.shapes[name], self._weights[name].values()
        cut = [any(cuts(piece.index[name][dim]) for piece, _ in held) for dim in range(len(shape))]
        total = torch.zeros([n if is_cut else 1 for n, is_cut in zip(shape, cut, strict=True)], dtype=torch.float64)
        for piece, weight in held:
            piece.put({name: torch.ones((), dtype=torch.float64)}, {name: total}, weight)
        return total.to(self._sum[name].dtype)


def replace_covered(old: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    """``new`` where somebody held the position, ``old`` bit for bit elsewhere."""
    covered = weight > 0
    return new if bool(covered.all()) else torch.where(covered, new, old)
