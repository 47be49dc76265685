"""The safety net: what was found is tried out, on tensors without values, before anybody relies on it."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from incofl.infer.dims import Atom, Dims, leaves, length
from incofl.infer.trace import Trace, export, first_line, shapes_of, where
from incofl.layout import Layout
from incofl.split.slice import cut
from incofl.split.submodel import Skip, submodel
from incofl.split.width import kept

SHARE = 0.5  # of the units that a trial keeps


def without(module: nn.Module, blocks: Iterable[str]) -> nn.Module:
    """The module with some blocks left out."""
    model = copy.deepcopy(module)
    for block in blocks:
        parent, _, child = block.rpartition(".")
        setattr(model.get_submodule(parent), child, Skip())
    return model


def problem_with(module: nn.Module, example: Tensor, shape: torch.Size) -> str | None:
    """Why a module cannot take the place of the one whose output has this shape; ``None`` if it can."""
    try:
        output = module(example)
    except Exception as problem:  # whatever a user's module may raise
        return first_line(problem)
    if not isinstance(output, Tensor) or output.shape != shape:
        return f"its output is no longer of shape {tuple(shape)}"
    return None


def narrowed(module: nn.Module, layout: Layout, axes: Iterable[str]) -> nn.Module:
    """The module with half of the units of some axes."""
    keep = {name: slice(0, kept(layout.named_axes[name].size, SHARE)) for name in axes}
    piece = cut(layout, layout.blocks, keep)
    with torch.device("meta"):
        return submodel(module, layout, piece)


def rigid_axes(
    module: nn.Module, example: Tensor, layout: Layout, atoms: Mapping[str, Atom], trace: Trace
) -> dict[str, str]:
    """The axes that cannot be narrowed after all, and why.

    First the module must run with narrower axes: sizes that it remembers show here. Then every tensor on the way must
    have the shape that the axes foretell: a view that divides fewer channels among as many heads shows here.
    """
    shape = torch.Size(length(leaves(dim)) for dim in trace.output)
    fine: list[str] = []
    rigid: dict[str, str] = {}

    def sift(names: Sequence[str]) -> None:
        problem = problem_with(narrowed(module, layout, [*fine, *names]), example, shape)
        if problem is None:
            fine.extend(names)
        elif len(names) == 1:
            size = layout.named_axes[names[0]].size
            rigid[names[0]] = f"with {kept(size, SHARE)} of {size} the model fails: {problem}"
        else:
            sift(names[: len(names) // 2])
            sift(names[len(names) // 2 :])

    sift(list(atoms))
    while fine:
        wrong = _surprise(export(narrowed(module, layout, fine), example).graph, trace, {atoms[n]: n for n in fine})
        if not wrong:
            return rigid
        rigid |= wrong
        fine = [name for name in fine if name not in wrong]
    return rigid


def _surprise(graph: torch.fx.Graph, trace: Trace, narrow: Mapping[Atom, str]) -> dict[str, str]:
    """The axes along the first tensor that is not as foretold."""

    def foretold(dims: Dims) -> tuple[int, ...]:
        sizes = [[kept(a.size, SHARE) if a in narrow else a.size for a in leaves(dim)] for dim in dims]
        return tuple(map(math.prod, sizes))

    if len(graph.nodes) != len(trace.graph.nodes):
        return dict.fromkeys(narrow.values(), "the model takes other steps when it is narrowed")
    for expected, node in zip(trace.graph.nodes, graph.nodes, strict=True):
        if expected.op == "output":
            continue
        all_dims = trace.values[expected]
        if tuple(map(foretold, all_dims)) != shapes_of(node)[: len(all_dims)]:
            sources = [dims for source in expected.all_input_nodes for dims in trace.values[source]]
            along = {narrow[a] for dims in (*all_dims, *sources) for dim in dims for a in leaves(dim) if a in narrow}
            return dict.fromkeys(along or narrow.values(), f"{expected.target} in {where(expected)} has a fixed size")
    return {}
