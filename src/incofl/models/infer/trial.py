"""The safety net: what was found is tried out before anything relies on it."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from incofl.inputs import Inputs, call
from incofl.layout import Layout
from incofl.models.infer.dims import Atom, Dims, leaves, length
from incofl.models.infer.trace import Trace, export, first_line, shapes_of, where
from incofl.split import kept
from incofl.split.slices import cut
from incofl.split.submodel import Skip, submodel

SHARE = 0.5  # of the units that a trial keeps


def without(module: nn.Module, blocks: Iterable[str]) -> nn.Module:
    """A copy of a module with some blocks left out."""
    model = copy.deepcopy(module)
    for block in blocks:
        model.set_submodule(block, Skip())
    return model


def problem_with(module: nn.Module, example: Inputs, shape: Sequence[int]) -> str | None:
    """Why a module cannot replace one whose output has this shape; ``None`` if it can."""
    try:
        output = call(module, example)
    except Exception as problem:  # whatever a user's module may raise
        return first_line(problem)
    if not isinstance(output, Tensor) or output.shape != tuple(shape):
        return f"its output is no longer of shape {tuple(shape)}"
    return None


def narrowed(module: nn.Module, layout: Layout, axes: Iterable[str]) -> nn.Module:
    """A copy of a module with half of the units of some axes."""
    keep = {name: slice(0, kept(layout.named_axes[name].size, SHARE)) for name in axes}
    with next(module.parameters()).device:
        return submodel(module, layout, cut(layout, layout.blocks, keep))


def rigid_axes(
    module: nn.Module, example: Inputs, layout: Layout, atoms: Mapping[str, Atom], trace: Trace
) -> dict[str, str]:
    """The axes that cannot be narrowed after all, and why.

    First the module must run with narrower axes, which finds sizes that it remembers. Then every tensor on the way must
    have the shape that follows from the axes, which finds a view that divides fewer channels among as many heads.
    """
    shape = [length(dim) for dim in trace.output]
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
            break
        rigid |= wrong
        fine = [name for name in fine if name not in wrong]
    return rigid


def _surprise(graph: torch.fx.Graph, trace: Trace, narrow: Mapping[Atom, str]) -> dict[str, str]:
    """The axes of the first tensor whose shape does not follow from the axes, and why they are rigid."""

    def expected_shape(dims: Dims) -> tuple[int, ...]:
        sizes = [[kept(a.size, SHARE) if a in narrow else a.size for a in leaves(dim)] for dim in dims]
        return tuple(map(math.prod, sizes))

    if len(graph.nodes) != len(trace.graph.nodes):
        return dict.fromkeys(narrow.values(), "the model takes other steps when it is narrowed")
    for expected, node in zip(trace.graph.nodes, graph.nodes, strict=True):
        if expected.op == "output":
            continue
        results = trace.values[expected]
        if tuple(map(expected_shape, results)) != shapes_of(node)[: len(results)]:
            sources = [dims for source in expected.all_input_nodes for dims in trace.values[source]]
            found = {narrow[a] for dims in (*results, *sources) for dim in dims for a in leaves(dim) if a in narrow}
            return dict.fromkeys(found or narrow.values(), f"{expected.target} in {where(expected)} has a fixed size")
    return {}
