"""Component 1 of the paper, model splitting: the blocks and channels of the server model that a client holds.

Level 0 is the smallest. A level keeps the first blocks of each stage (section 3.1), and ``ceil(share * size)`` channels
of every axis that can be narrowed, as in HeteroFL; of low-rank adapters, so many ranks. They are the first ones
(``prefix``), or a window that moves by one channel a round: forwards (``rolling``, as in FedRolex's paper) or backwards
(``rolling-back``, as in its code), or some that are drawn for each client and round (``random``); or not
channels but the entries of largest magnitude (``largest``).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.split.slices import Index
from incofl.split.slices import Slice as Slice
from incofl.split.slices import cut as cut
from incofl.split.submodel import end_at as end_at
from incofl.split.submodel import submodel as submodel

Kind = Literal["stage", "layer", "hetero", "rank"]
Window = Literal["prefix", "rolling", "rolling-back", "random", "largest"]
Levels = int | Sequence[int | float | Sequence[int]]
Drawn = tuple[int, ...]  # the channels of a turn that were drawn, axis after axis
Depth = tuple[int, ...]  # number of blocks kept in each stage, always the first ones: (1, 1, 2, 2)
Start = Literal["random", "identity", "identity-if-possible"]
RANK = "rank"  # the axis of the ranks of low-rank adapters
COUNTS = "drawn"  # the table of a server's extra state that says how often each channel was drawn
Depths = Literal["full", "scaled"] | Sequence[int | Sequence[int]]

NO_EMPTY_STAGE = "layer splitting cannot leave a stage empty (for ResNets use split.kind=stage)"


@dataclass(frozen=True)
class Splitter:
    """Cuts the slices of all levels."""

    shares: tuple[float, ...]  # for each level, the share of the channels kept of each axis
    depths: tuple[Depth, ...]  # for each level, the number of blocks kept in each stage
    window: Window = "prefix"  # where these channels lie
    seed: int = 0  # of windows that are drawn
    round_down: bool = False  # keep ``int(share * size)`` channels instead of ``ceil(share * size)``
    by_client: ClassVar[bool] = False  # whether the slice of a level depends on the client

    @property
    def moves(self) -> bool:
        """Whether the slice of a level depends on the round."""
        return self.window != "prefix"

    def slice(self, layout: Layout, level: int, round: int = 0, client: int | None = None, drawn: Drawn = ()) -> Slice:
        """The slice of a client of a level in a round; without a client, the one on which the level is evaluated.

        ``drawn`` is what ``draw`` gave. A level of a model with early exits keeps the exits up to its own.
        """
        start = {"rolling": round, "rolling-back": -round}.get(self.window, 0)
        keep = {axis.name: self.channels(axis.size, level, start) for axis in layout.narrow_axes}
        return cut(layout, self.blocks(layout, level), keep)

    def draw(
        self, layout: Layout, counts: Mapping[str, Tensor], level: int, round: int, client: int
    ) -> tuple[Drawn, Mapping[str, Tensor]]:
        """The channels of a turn where they depend on what was drawn before, and what is drawn with them.

        ``counts`` says, for each axis, how often each of its channels was drawn.
        """
        return (), counts

    def blocks(self, layout: Layout, level: int) -> set[str]:
        """The blocks and exits of a level."""
        stages = zip(layout.stages, self.depths[level], strict=True)
        blocks = {block for stage, count in stages for block in stage[:count]}
        own = sorted(set(layout.exits.values()))[: level + 1]
        return blocks | {head for head, position in layout.exits.items() if position in own}

    def width(self, size: int, level: int) -> int:
        """The number of channels that a level keeps of an axis of some size."""
        return kept(size, self.shares[level], self.round_down)

    def channels(self, size: int, level: int, start: int = 0) -> Index:
        """The neighbouring channels from ``start`` on that a level keeps of an axis, wrapping at the end."""
        return kept_channels(size, self.shares[level], start, self.round_down)

    def check_sizes(self, layout: Layout) -> None:
        """Refuses levels that are not ordered by their size."""
        sizes = [self.slice(layout, level).num_elements for level in range(len(self.depths))]
        if sizes != sorted(sizes):
            raise LayoutError(f"split.levels: got sizes {sizes} in scalars, expected the levels from small to large")


@dataclass(frozen=True)
class SplitRule:
    """The splitting half of a method: what it adds to the model, and which splitter it uses."""

    kind: ClassVar[Kind | None] = None  # the only kind of splitting that the method works with; None: any
    start: Start = "random"  # whether what not every level holds begins without effect
    grow: Literal["plateau"] | tuple[float, ...] | None = None  # when larger levels open, as ``split.grow`` has it

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


def kept(size: int, share: float, round_down: bool = False) -> int:
    """``ceil(share * size)``, at least 1; 0.07 * 100 is a hair above 7 in floating point and means 7."""
    return max(1, int(share * size + 1e-9) if round_down else math.ceil(share * size - 1e-9))


def kept_channels(size: int, share: float, start: int = 0, round_down: bool = False) -> Index:
    """``ceil(share * size)`` neighbouring channels from ``start`` on, wrapping at the end."""
    width, start = kept(size, share, round_down), start % size
    if width == size:
        return slice(None)
    return slice(start, start + width) if start + width <= size else (torch.arange(width) + start) % size


def make_splitter(
    layout: Layout, kind: Kind, levels: Levels = 5, depth: Depths = "full", window: Window = "prefix"
) -> Splitter:
    """The splitter that a config describes.

    ``levels`` is a number of levels, evenly spread, or one entry per level from small to large: for ``stage`` blocks
    per stage (``[1, 1, 2, 2]``, or one number for all), for ``layer`` a number of blocks, for ``hetero`` the share of
    the channels, for ``rank`` the ranks of adapters. With these two, ``depth`` is ``full`` (the width or rank only, as
    in the paper's tables), ``scaled`` (the same share of the blocks of each stage), or one entry per level as for
    ``stage``.
    """
    if not isinstance(levels, int) and not levels:
        raise LayoutError("split.levels: got an empty list, expected one entry per level")
    if kind == "rank" and RANK not in layout.named_axes:
        raise LayoutError("split.kind: got 'rank', expected another: the method adds no adapters to the model")
    if kind in ("hetero", "rank"):
        shares = shares_of(levels) if kind == "hetero" else shares_of_ranks(levels, layout.named_axes[RANK].size)
        if min(shares) < 1 and not layout.narrow_axes:
            raise LayoutError(f"split.kind: got 'hetero', expected 'stage' or 'layer': {layout.why_whole}")
        if isinstance(depth, str):
            depths = [tuple(n if depth == "full" else kept(n, share) for n in layout.depth) for share in shares]
        else:
            depths = [_depth(layout, "stage", entry, f"split.depth: level {at}") for at, entry in enumerate(depth)]
        if len(depths) != len(shares):
            raise LayoutError(f"split.depth: got {len(depths)} entries, expected {len(shares)}, one per level")
    else:
        if depth != "full":
            raise LayoutError(
                f"split.depth: got {depth!r} with split.kind={kind}, expected it with split.kind=hetero or rank"
            )
        if not layout.stages:
            raise LayoutError(f"split.kind: got {kind!r}, expected 'hetero': the model has no repeated blocks")
        if isinstance(levels, int):
            depths = _spread(layout, kind, levels)
        else:
            depths = [_depth(layout, kind, entry, f"split.levels: level {at}") for at, entry in enumerate(levels)]
        shares, window = (1.0,) * len(depths), "prefix"
    splitter = Splitter(shares, tuple(depths), window)
    splitter.check_sizes(layout)
    return splitter


def shares_of(levels: Levels) -> tuple[float, ...]:
    """The share of the channels of each level; for a number of levels, repeated halves."""
    if isinstance(levels, int):
        return tuple(2.0**-exponent for exponent in reversed(range(levels)))
    for level, share in enumerate(levels):
        if isinstance(share, Sequence) or not 0 < share <= 1:
            raise LayoutError(f"split.levels: level {level} is {share!r}, expected a share of the channels in (0, 1]")
    return tuple(float(share) for share in levels if not isinstance(share, Sequence))


def shares_of_ranks(levels: Levels, largest: int) -> tuple[float, ...]:
    """The share of the server model's ranks of each level; for a number of levels, repeated halves."""
    if isinstance(levels, int):
        return tuple(kept(largest, share) / largest for share in shares_of(levels))
    for level, rank in enumerate(levels):
        if not isinstance(rank, int) or not 1 <= rank <= largest:
            raise LayoutError(f"split.levels: level {level} is {rank!r}, expected a rank from 1 to {largest}")
    return tuple(rank / largest for rank in levels if isinstance(rank, int))


def num_depths(layout: Layout, kind: Kind) -> int:
    """Largest number of levels that stage or layer splitting can give a model."""
    return len(_all_depths(layout, kind)) if layout.stages else 1


def _all_depths(layout: Layout, kind: Kind) -> list[Depth]:
    """All depths from small to large. Stage splitting gives one block more to the deepest stages first."""
    full = layout.depth
    if kind == "layer":
        return [(*full[:-1], last) for last in range(1, full[-1] + 1)]
    steps = itertools.product(range(1, max(full) + 1), reversed(range(len(full) + 1)))
    grown = (tuple(min(size, least + (at >= first)) for at, size in enumerate(full)) for least, first in steps)
    return list(dict.fromkeys(grown))


def _spread(layout: Layout, kind: Kind, count: int) -> list[Depth]:
    """Evenly spaced depths, with the smallest and the largest: of ResNet26 the paper's ResNet10, 14, 18, 22 and 26.

    Layer splitting starts at two thirds of the model if that gives enough levels: 8 to 12 blocks of a ViT.
    """
    depths = _all_depths(layout, kind)
    if not 1 <= count <= len(depths):
        why = NO_EMPTY_STAGE if kind == "layer" else "this model has no more depths"
        raise LayoutError(f"split.levels: got {count} levels, expected 1 to {len(depths)}: {why}")
    if kind == "layer":
        total = len(layout.blocks)
        least = min(math.ceil(2 * total / 3), total - count + 1)
        depths = [depth for depth in depths if sum(depth) >= least]
    return [depths[round(i * (len(depths) - 1) / (count - 1))] for i in range(count)] if count > 1 else depths[-1:]


def _depth(layout: Layout, kind: Kind, entry: int | float | Sequence[int], level: str) -> Depth:
    """The depth of an entry of a list of levels; every stage keeps its first block, which sets the shape."""
    full, before = layout.depth, sum(layout.depth[:-1])
    if isinstance(entry, int):
        depth = (*full[:-1], entry - before) if kind == "layer" else (entry,) * len(full)
    elif isinstance(entry, Sequence) and kind == "stage":
        depth = tuple(entry)
    else:
        raise LayoutError(f"{level} is {entry!r}, expected a whole number of blocks")
    if len(depth) != len(full) or any(not 1 <= kept <= size for kept, size in zip(depth, full, strict=True)):
        keeps, expected = f"{list(depth)} blocks", f"{len(full)} numbers from 1 to {list(full)}, the blocks per stage"
        if kind == "layer":
            keeps, expected = f"the first {entry} blocks", f"{before + 1} to {sum(full)}; {NO_EMPTY_STAGE}"
        raise LayoutError(f"{level} keeps {keeps}, expected {expected}")
    return depth
