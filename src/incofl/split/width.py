"""Width: which channels a client keeps. Hetero splitting, section 3.1, as in HeteroFL and FedRolex.

Each narrowable axis keeps ``ceil(ratio * size)`` of its channels: the first ones (``prefix``), or a window that moves
by one channel a round, forwards (``rolling``, as FedRolex's paper words it) or backwards (``rolling-back``, as its code
does).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from incofl.layout import Layout
from incofl.split.depth import Depth, kept_blocks
from incofl.split.slice import Index, Slice, cut

Window = Literal["prefix", "rolling", "rolling-back"]


def kept(size: int, ratio: float) -> int:
    """``ceil(ratio * size)``, at least 1; 0.07 * 100 is a hair above 7 in floating point, and means 7."""
    return max(1, math.ceil(ratio * size - 1e-9))


def kept_channels(size: int, ratio: float, start: int = 0) -> Index:
    """``ceil(ratio * size)`` neighbouring channels from ``start`` on, wrapping at the end."""
    width = kept(size, ratio)
    if width == size:
        return slice(None)
    start %= size
    if start + width <= size:
        return slice(start, start + width)
    return (torch.arange(width) + start) % size


@dataclass(frozen=True)
class WidthSplitter:
    """A client of level ``l`` keeps ``ratios[l]`` of the channels of each axis and the blocks of ``depths[l]``."""

    ratios: tuple[float, ...]
    depths: tuple[Depth, ...]
    window: Window = "prefix"

    @property
    def moves(self) -> bool:
        """Whether the slice of a level depends on the round."""
        return self.window != "prefix"

    def slice(self, layout: Layout, level: int, round: int) -> Slice:
        """The slice of a level; with a rolling window it depends on the round."""
        start = {"prefix": 0, "rolling": round, "rolling-back": -round}[self.window]
        keep = {
            axis.name: kept_channels(axis.size, self.ratios[level], start)
            for axis in layout.named_axes.values()
            if not axis.fixed
        }
        return cut(layout, kept_blocks(layout, self.depths[level]), keep)
