"""The splitter: which blocks and which channels of the server model a client of a level holds. Level 0 is the smallest.

Every axis that can be narrowed keeps ``ceil(share * size)`` of its channels, as in HeteroFL. They are the first ones
(``prefix``), or a window that moves by one channel a round: forwards (``rolling``, as in FedRolex's paper) or backwards
(``rolling-back``, as in its code). A level of a model with early exits keeps the exits up to its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.split.depth import Depth, check_depth, kept_blocks, layer_depth, layer_depths, stage_depths
from incofl.split.slice import Index, Slice, cut

Kind = Literal["stage", "layer", "hetero"]
Window = Literal["prefix", "rolling", "rolling-back"]
Levels = int | Sequence[int | float | Sequence[int]]
Depths = Literal["full", "scaled"] | Sequence[int | Sequence[int]]


@dataclass(frozen=True)
class Splitter:
    """Cuts the slices of all levels.

    Attributes:
        shares: for each level, the share of the channels kept of each axis.
        depths: for each level, the number of blocks kept in each stage.
        window: where these channels lie.
    """

    shares: tuple[float, ...]
    depths: tuple[Depth, ...]
    window: Window = "prefix"

    @property
    def moves(self) -> bool:
        """Whether the slice of a level depends on the round."""
        return self.window != "prefix"

    @property
    def by_client(self) -> bool:
        """Whether the slice of a level depends on the client."""
        return False

    def slice(self, layout: Layout, level: int, round: int = 0, client: int | None = None) -> Slice:
        """The slice of a client of a level in a round; without a client, the one on which the level is evaluated."""
        start = {"prefix": 0, "rolling": round, "rolling-back": -round}[self.window]
        keep = {axis.name: kept_channels(axis.size, self.shares[level], start) for axis in layout.narrow_axes}
        exits = list(layout.exits)[: level + 1]
        return cut(layout, kept_blocks(layout, self.depths[level]) | set(exits), keep)

    def check_sizes(self, layout: Layout) -> None:
        """Refuses levels that are not ordered by their size."""
        sizes = [self.slice(layout, level).num_elements for level in range(len(self.depths))]
        if sizes != sorted(sizes):
            raise LayoutError(f"split.levels: got sizes {sizes} in scalars, expected the levels from small to large")


@dataclass(frozen=True)
class SplitRule:
    """The splitting half of a method: what it adds to the model, and which splitter it uses."""

    kind: ClassVar[Kind | None] = None  # the only kind of splitting that the method works with; None: any

    @property
    def window(self) -> Window:
        """Where the channels of a level lie."""
        return "prefix"

    def extend(self, model: nn.Module, layout: Layout, levels: Levels) -> Layout:
        """Adds layers to the new server model, in place, and returns the layout that includes them."""
        return layout

    def splitter(self, layout: Layout, kind: Kind, levels: Levels, depth: Depths = "full") -> Splitter:
        """The splitter that a config describes, checked against the model."""
        return make_splitter(layout, kind, levels, depth, self.window)


class WidthRule(SplitRule):
    """Width splitting only."""

    kind = "hetero"


def kept(size: int, share: float) -> int:
    """``ceil(share * size)``, at least 1; 0.07 * 100 is a hair above 7 in floating point and means 7."""
    return max(1, math.ceil(share * size - 1e-9))


def kept_channels(size: int, share: float, start: int = 0) -> Index:
    """``ceil(share * size)`` neighbouring channels from ``start`` on, wrapping at the end."""
    width = kept(size, share)
    if width == size:
        return slice(None)
    start %= size
    if start + width <= size:
        return slice(start, start + width)
    return (torch.arange(width) + start) % size


def make_splitter(
    layout: Layout, kind: Kind, levels: Levels = 5, depth: Depths = "full", window: Window = "prefix"
) -> Splitter:
    """The splitter that a config describes.

    Args:
        layout: the server model.
        kind: ``stage`` (the first blocks of each stage), ``layer`` (the first blocks of the model), ``hetero`` (width).
        levels: the number of levels, evenly spread, or one entry per level from small to large: blocks per stage for
            ``stage`` (``[1, 1, 2, 2]``, or one number for all stages), a number of blocks for ``layer``, the share of
            the channels for ``hetero``.
        depth: for ``hetero``: ``full`` (width only, as in the paper's tables), ``scaled`` (the same share of the
            blocks of each stage), or one entry per level as for ``stage``.
        window: for ``hetero``: where the channels lie.
    """
    if not isinstance(levels, int) and not levels:
        raise LayoutError("split.levels: got an empty list, expected one entry per level")
    if kind == "hetero":
        splitter = _width_splitter(layout, shares_of(levels), depth, window)
    else:
        if depth != "full":
            raise LayoutError(f"split.depth: got {depth!r} with split.kind={kind}, expected it with split.kind=hetero")
        if not layout.stages:
            raise LayoutError(f"split.kind: got {kind!r}, expected 'hetero': the model has no repeated blocks")
        depths = _stage_depths(layout, levels, "split.levels") if kind == "stage" else _layer_depths(layout, levels)
        splitter = Splitter((1.0,) * len(depths), depths)
    splitter.check_sizes(layout)
    return splitter


def _width_splitter(layout: Layout, shares: tuple[float, ...], depth: Depths, window: Window) -> Splitter:
    if min(shares) < 1 and not layout.narrow_axes:
        raise LayoutError(f"split.kind: got 'hetero', expected 'stage' or 'layer': {layout.why_whole}")
    if depth == "full":
        depths = (layout.depth,) * len(shares)
    elif depth == "scaled":
        depths = tuple(tuple(kept(n, share) for n in layout.depth) for share in shares)
    else:
        depths = _stage_depths(layout, depth, "split.depth")
    if len(depths) != len(shares):
        raise LayoutError(f"split.depth: got {len(depths)} entries, expected {len(shares)}, one per level")
    return Splitter(shares, depths, window)


def shares_of(levels: Levels) -> tuple[float, ...]:
    """The share of the channels of each level; for a number of levels, repeated halves."""
    if isinstance(levels, int):
        return tuple(2.0**-exponent for exponent in reversed(range(levels)))
    for level, share in enumerate(levels):
        if isinstance(share, Sequence) or not 0 < share <= 1:
            raise LayoutError(f"split.levels: level {level} is {share!r}, expected a share of the channels in (0, 1]")
    return tuple(float(share) for share in levels if not isinstance(share, Sequence))


def _stage_depths(layout: Layout, levels: Levels, key: str) -> tuple[Depth, ...]:
    if isinstance(levels, int):
        return tuple(stage_depths(layout, levels))
    stages = len(layout.depth)
    return tuple(
        check_depth(layout, entry if isinstance(entry, Sequence) else [_blocks(entry, level)] * stages, level, key)
        for level, entry in enumerate(levels)
    )


def _layer_depths(layout: Layout, levels: Levels) -> tuple[Depth, ...]:
    if isinstance(levels, int):
        return tuple(layer_depths(layout, levels))
    return tuple(layer_depth(layout, _blocks(entry, level), level) for level, entry in enumerate(levels))


def _blocks(entry: int | float | Sequence[int], level: int) -> int:
    if not isinstance(entry, int):
        raise LayoutError(f"split.levels: level {level} is {entry!r}, expected a whole number of blocks")
    return entry
