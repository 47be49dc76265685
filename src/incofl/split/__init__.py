"""Component 1 of the paper: model splitting. Every client trains the part of the server model that fits it."""

from collections.abc import Sequence
from typing import Literal, Protocol

from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.split.depth import Depth, DepthSplitter, check_depth, layer_depth, layer_depths, num_depths, stage_depths
from incofl.split.exits import ExitSplitter, exit_positions, make_exit_splitter
from incofl.split.slice import Slice, cut
from incofl.split.submodel import submodel
from incofl.split.width import WidthSplitter, Window, kept

__all__ = [
    "DepthSplitter",
    "ExitSplitter",
    "Kind",
    "Slice",
    "Splitter",
    "WidthSplitter",
    "Window",
    "check_ratios",
    "cut",
    "exit_positions",
    "make_exit_splitter",
    "make_splitter",
    "num_depths",
    "submodel",
]

Kind = Literal["stage", "layer", "hetero"]


class Splitter(Protocol):
    """Says which part of the model a client of a level holds in a round. Level 0 is the smallest."""

    def slice(self, layout: Layout, level: int, round: int) -> Slice:
        """The slice of a level in a round."""
        ...

    @property
    def moves(self) -> bool:
        """Whether the slice of a level depends on the round."""
        ...

    @property
    def depths(self) -> tuple[Depth, ...]:
        """Blocks kept per stage, for each level; its length is the number of levels."""
        ...


def make_splitter(
    layout: Layout,
    kind: Kind,
    levels: int | Sequence[int | float | Sequence[int]] = 5,
    depth: Literal["full", "scaled"] | Sequence[int | Sequence[int]] = "full",
    window: Window = "prefix",
) -> Splitter:
    """The splitter that a config describes.

    Args:
        layout: the server model.
        kind: ``stage`` (the first blocks of each stage), ``layer`` (the first blocks of the model), ``hetero`` (width).
        levels: how many levels, evenly spread, or one entry per level from small to large: blocks per stage for
            ``stage`` (``[1, 1, 2, 2]``, or one number for all stages), a number of blocks for ``layer``, the share of
            the channels for ``hetero``.
        depth: for ``hetero``: ``full`` (width only, as in the paper's tables), ``scaled`` (the same share of the
            blocks of each stage), or one entry per level as for ``stage``.
        window: for ``hetero``: which channels.
    """
    if not isinstance(levels, int) and not levels:
        raise LayoutError("split.levels: got an empty list, expected one entry per level")
    if kind != "hetero" and depth != "full":
        raise LayoutError(f"split.depth: got {depth!r} with split.kind={kind}, expected it only with split.kind=hetero")
    if kind != "hetero" and not layout.stages:
        raise LayoutError(f"split.kind: got {kind!r}, expected 'hetero': the model has no repeated blocks to leave out")
    splitter = _make_splitter(layout, kind, levels, depth, window)
    sizes = [splitter.slice(layout, level, 0).num_elements for level in range(len(splitter.depths))]
    if sizes != sorted(sizes):
        raise LayoutError(f"split.levels: got sizes {sizes} in scalars, expected the levels from small to large")
    return splitter


def _make_splitter(
    layout: Layout,
    kind: Kind,
    levels: int | Sequence[int | float | Sequence[int]],
    depth: Literal["full", "scaled"] | Sequence[int | Sequence[int]],
    window: Window,
) -> Splitter:
    match kind:
        case "stage":
            return DepthSplitter(tuple(_depths(layout, levels, "split.levels")))
        case "layer":
            if isinstance(levels, int):
                return DepthSplitter(tuple(layer_depths(layout, levels)))
            counts = [_whole(entry, level) for level, entry in enumerate(levels)]
            return DepthSplitter(tuple(layer_depth(layout, count, level) for level, count in enumerate(counts)))
        case "hetero":
            ratios = check_ratios(levels)
            if min(ratios) < 1 and not layout.narrow_axes:
                raise LayoutError(f"split.kind: got 'hetero', expected 'stage' or 'layer': {layout.why_whole}")
            if depth == "full":
                depths = [layout.depth] * len(ratios)
            elif depth == "scaled":
                depths = [tuple(kept(n, ratio) for n in layout.depth) for ratio in ratios]
            else:
                depths = _depths(layout, depth, "split.depth")
            if len(depths) != len(ratios):
                raise LayoutError(f"split.depth: got {len(depths)} entries for {len(ratios)} levels, expected as many")
            return WidthSplitter(ratios, tuple(depths), window)


def _depths(layout: Layout, levels: int | Sequence[int | float | Sequence[int]], key: str) -> list[Depth]:
    if isinstance(levels, int):
        return stage_depths(layout, levels)
    stages = len(layout.depth)
    return [
        check_depth(layout, entry if isinstance(entry, Sequence) else [_whole(entry, level)] * stages, level, key)
        for level, entry in enumerate(levels)
    ]


def check_ratios(levels: int | Sequence[int | float | Sequence[int]]) -> tuple[float, ...]:
    """The share of the channels of each level; of a number of levels, halves."""
    if isinstance(levels, int):
        return tuple(2.0**-exponent for exponent in reversed(range(levels)))
    ratios = []
    for level, ratio in enumerate(levels):
        if isinstance(ratio, Sequence) or not 0 < ratio <= 1:
            raise LayoutError(f"split.levels: level {level} is {ratio!r}, expected a share of the channels in (0, 1]")
        ratios.append(float(ratio))
    return tuple(ratios)


def _whole(entry: int | float | Sequence[int], level: int) -> int:
    if not isinstance(entry, int):
        raise LayoutError(f"split.levels: level {level} is {entry!r}, expected a whole number of blocks")
    return entry
