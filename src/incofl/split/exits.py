"""Depth and width together, for models with early exits: a level stops at its exit. As in ScaleFL."""

from dataclasses import dataclass

from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.split.depth import Depth, kept_blocks
from incofl.split.slice import Slice, cut
from incofl.split.width import kept_channels


def exit_positions(blocks: int, levels: int) -> tuple[int, ...]:
    """After how many blocks the exits of so many levels lie: evenly spread from two fifths of the model to its end.

    For the twelve blocks of ResNet26 and five levels: 5, 7, 8, 10, 12.
    """
    if levels == 1:
        return (blocks,)
    positions = tuple(round(blocks * (0.4 + 0.6 * level / (levels - 1))) for level in range(levels))
    if len(set(positions)) < levels or positions[0] < 1:
        raise LayoutError(f"split.levels: got {levels} levels, expected fewer: the model has only {blocks} blocks")
    return positions


def exit_ratios(levels: int) -> tuple[float, ...]:
    """The share of the channels of each level: 0.7, but 0.75 for the last but one and 1 for the last."""
    return (*[0.7] * (levels - 2), 0.75, 1.0) if levels > 1 else (1.0,)


@dataclass(frozen=True)
class ExitSplitter:
    """A client of level ``l`` keeps the blocks before exit ``l``, the exits up to it, and a share of the channels."""

    ratios: tuple[float, ...]
    depths: tuple[Depth, ...]
    moves: bool = False

    def slice(self, layout: Layout, level: int, round: int) -> Slice:
        """The slice of a level; the same in every round."""
        keep = {
            axis.name: kept_channels(axis.size, self.ratios[level])
            for axis in layout.named_axes.values()
            if not axis.fixed
        }
        return cut(layout, kept_blocks(layout, self.depths[level]) | set(list(layout.exits)[: level + 1]), keep)


def make_exit_splitter(layout: Layout, ratios: tuple[float, ...] | None = None) -> ExitSplitter:
    """The splitter for a model with exits, one level for each."""
    ratios = exit_ratios(len(layout.exits)) if ratios is None else ratios
    if len(ratios) != len(layout.exits):
        raise LayoutError(f"split.levels: got {len(ratios)} levels, expected {len(layout.exits)}, one per exit")
    splitter = ExitSplitter(ratios, tuple(_depth(layout, blocks) for blocks in layout.exits.values()))
    sizes = [splitter.slice(layout, level, 0).num_elements for level in range(len(ratios))]
    if sizes != sorted(sizes):
        raise LayoutError(f"split.levels: got sizes {sizes} in scalars, expected the levels from small to large")
    return splitter


def _depth(layout: Layout, blocks: int) -> Depth:
    """The first so many blocks of the whole model; later stages may be empty."""
    depth = []
    for size in layout.depth:
        depth.append(min(size, blocks))
        blocks -= depth[-1]
    return tuple(depth)
