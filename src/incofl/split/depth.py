"""Depth: which blocks a client keeps. Stage splitting (ResNets) and layer splitting (transformers), section 3.1.

A depth is written as the number of blocks kept in each stage, always the first ones: ``(1, 1, 2, 2)``.
"""

from collections.abc import Sequence

from incofl.errors import LayoutError
from incofl.layout import Layout

Depth = tuple[int, ...]


def kept_blocks(layout: Layout, depth: Depth) -> frozenset[str]:
    """The prefixes of the first ``depth[s]`` blocks of each stage ``s``."""
    return frozenset(block for stage, keep in zip(layout.stages, depth, strict=True) for block in stage[:keep])


def check_depth(layout: Layout, depth: Sequence[int], level: int, key: str = "split.levels") -> Depth:
    """Refuses a depth that the model does not have, or that leaves a stage empty (its first block sets the shape)."""
    if len(depth) != len(layout.depth) or any(not 1 <= d <= n for d, n in zip(depth, layout.depth, strict=False)):
        raise LayoutError(
            f"{key}: level {level} keeps {list(depth)} blocks, expected {len(layout.depth)} numbers "
            f"from 1 to {list(layout.depth)}, the model's blocks per stage"
        )
    return tuple(depth)


def spread(chain: Sequence[Depth], count: int) -> list[Depth]:
    """``count`` entries of a chain of ever larger depths, evenly spaced, the smallest and the largest included."""
    if not 1 <= count <= len(chain):
        raise LayoutError(
            f"split.levels: got {count} levels, expected 1 to {len(chain)}: this model has no more depths"
        )
    if count == 1:
        return [chain[-1]]
    return [chain[round(i * (len(chain) - 1) / (count - 1))] for i in range(count)]


def stage_depths(layout: Layout, count: int) -> list[Depth]:
    """``count`` depths from one block per stage to all, adding blocks to the deepest stages first.

    For ResNet26 and five levels these are the paper's ResNet10, 14, 18, 22 and 26.
    """
    depth = [1] * len(layout.depth)
    chain = [tuple(depth)]
    for blocks in range(2, max(layout.depth) + 1):
        for stage in reversed(range(len(depth))):
            if layout.depth[stage] >= blocks:
                depth[stage] = blocks
                chain.append(tuple(depth))
    return spread(chain, count)


def layer_depth(layout: Layout, layers: int, level: int) -> Depth:
    """The first ``layers`` blocks of the whole model, counted through all stages."""
    depth = []
    for size in layout.depth:
        depth.append(min(size, max(layers, 0)))
        layers -= size
    if layers > 0 or 0 in depth:
        raise LayoutError(
            f"split.levels: level {level} keeps the first {sum(depth) + max(layers, 0)} blocks, expected "
            f"{sum(layout.depth) - layout.depth[-1] + 1} to {sum(layout.depth)}; layer splitting cannot leave a stage "
            "empty (for ResNets use split.kind=stage)"
        )
    return tuple(depth)


def layer_depths(layout: Layout, count: int) -> list[Depth]:
    """``count`` depths that end with the whole model and start at two thirds of it, as 8 to 12 blocks of a ViT."""
    total = sum(layout.depth)
    if count > layout.depth[-1]:
        raise LayoutError(
            f"split.levels: got {count} levels, expected 1 to {layout.depth[-1]}: layer splitting keeps the first "
            "blocks and cannot leave a stage empty (for ResNets use split.kind=stage)"
        )
    least = max(total - layout.depth[-1] + 1, min(-(-2 * total // 3), total - count + 1))
    return spread([layer_depth(layout, n, 0) for n in range(least, total + 1)], count)


def num_depths(layout: Layout, kind: str) -> int:
    """Largest number of levels that stage or layer splitting can give a model."""
    if not layout.depth:
        return 1
    return layout.depth[-1] if kind == "layer" else 1 + sum(size - 1 for size in layout.depth)
