"""What was found in a model, in words, and what a user should know before a run starts."""

import itertools
import math
import re
from collections.abc import Iterable

from incofl.inco import InCo
from incofl.layout import Layout
from incofl.method import Method
from incofl.split import Kind, Splitter

LEAST = 0.1  # the share of its parameters by which a level should exceed the one below it


def describe(layout: Layout) -> list[str]:
    """The blocks, the widths that can be narrowed, the pairs of InCo, and what is held whole and why; a line each."""
    blocks = ", ".join(f"{stage[0]} to {stage[-1]}" if len(stage) > 1 else stage[0] for stage in layout.stages)
    none = 'none found, so the depth cannot be split; model.blocks = "PATH" names a list of blocks'
    widths = _grouped((axis.name, f"of {axis.size}") for axis in layout.narrow_axes)
    lines = [f"blocks: {blocks or none}", f"widths: {', '.join(widths) or 'none can be narrowed'}"]
    lines.append(f"InCo mixes {len(layout.shallow)} tensors")
    return lines + _grouped((axis, f"is held whole: {reason}") for axis, reason in layout.kept_whole.items())


def _grouped(items: Iterable[tuple[str, str]]) -> list[str]:
    """Names, with something said about each; those that differ in the numbers of blocks only, as one."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for item in items:
        name, said = (re.sub(r"(?<=\.)\d+(?=\.)|\b\d+(?=\.)", "*", words) for words in item)
        groups.setdefault((name, said), []).append(item)
    return [
        " ".join(same[0]) if len(same) == 1 else f"{name} ({len(same)} times) {said}"
        for (name, said), same in groups.items()
    ]


def warnings(method: Method, layout: Layout, kind: Kind, splitter: Splitter) -> list[str]:
    """What makes a run pointless or weaker than it looks."""
    found = []
    slices = [splitter.slice(layout, level) for level in range(len(splitter.depths))]
    sizes = [sum(math.prod(s.shapes[name]) for name in s.shapes if name in layout.parameters) for s in slices]
    if len(sizes) == 1:
        other = "stage or layer" if kind == "hetero" else "hetero"
        found.append(f"there is one level, so every client trains the whole model; try split.kind = {other}")
    if splitter.window == "largest":
        found.append("levels differ in which entries are zero: every client sends, holds and computes the whole model")
        sizes = []
    for level, (small, large) in enumerate(itertools.pairwise(sizes)):
        if (more := large / max(small, 1) - 1) < LEAST:
            pair = f"levels {level} and {level + 1} differ by {more:.1%} of their parameters"
            found.append(f"{pair}; fewer levels, or another split.kind, may serve clients better")
    if any(isinstance(transform, InCo) and not transform.pairs(layout) for transform in method.transforms):
        why = "no deep tensor of its blocks has a shallow one of its shape" if layout.stages else "it has no blocks"
        found.append(f"InCo has nothing to mix in this model, for {why}: {method.name} does the same without it")
    return found
