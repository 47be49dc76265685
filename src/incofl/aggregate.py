"""The covered mean: every scalar position is averaged over the clients that hold it, one upload at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from incofl.layout import Layout
from incofl.split import Slice
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
        self._weight: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, piece: Slice, part: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Adds a client's ``part``, which is in the coordinates of its slice."""
        for name in part.keys() - self._sum.keys():
            shape, axes = self._layout.shapes[name], self._layout.axes[name]
            # Whole numbers (counters of batch norm) are summed exactly, in float64.
            dtype = self._dtype if part[name].is_floating_point() else torch.float64
            self._sum[name] = torch.zeros(shape, dtype=dtype)
            cut = [1 if axis is None else n for axis, n in zip(axes, shape, strict=True)]
            self._weight[name] = torch.zeros(cut, dtype=dtype)
            self._dtypes[name] = part[name].dtype
        piece.put(part, self._sum, weight)
        piece.put({name: torch.ones((), dtype=self._dtype) for name in part}, self._weight, weight)

    def mean(self) -> Covered:
        """Sum over weight where somebody held the position, exactly 0 elsewhere. Whole numbers are truncated."""
        values = {}
        for name, total in self._sum.items():
            weight = self._weight[name]
            mean = total / torch.where(weight > 0, weight, 1)
            values[name] = mean.to(self._dtypes[name])
        return Covered(values, dict(self._weight))


def replace_covered(old: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    """``new`` where somebody held the position, ``old`` bit for bit elsewhere."""
    return torch.where(weight > 0, new, old)
