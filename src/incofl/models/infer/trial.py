"""The safety net: what was found is tried out before anything relies on it."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.fx import Graph

from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.models.infer.dims import Atom, Dims, hold, leaves, length
from incofl.models.infer.trace import Trace, export, shapes_of, where
from incofl.models.model import first_line
from incofl.split import kept, submodel
from incofl.split.slices import cut
from incofl.tensors import Inputs, call

SHARE = 0.5  # of the units that a trial keeps
# Steps that change no element, and that torch leaves out where there is nothing to do.
IDLE = ("aten.contiguous.default", "aten._assert_tensor_metadata.default")


def problem_with(module: nn.Module, example: Inputs, shape: Sequence[int]) -> str | None:
    """Why a module cannot replace one whose output has this shape; ``None`` if it can."""
    try:
        output = call(module, example)
    except Exception as problem:  # whatever a user's module may raise
        return first_line(problem)
    fits = isinstance(output, Tensor) and output.shape == tuple(shape)
    return None if fits else f"its output is no longer of shape {tuple(shape)}"


def hold_rigid(module: nn.Module, example: Inputs, layout: Layout, atoms: Mapping[str, Atom], trace: Trace) -> None:
    """Holds axes whole that cannot be narrowed after all.

    First the module must run with narrower axes, which finds sizes that it remembers. Then every tensor on the way must
    have the shape that follows from the axes, which finds a view that divides fewer channels among as many heads.
    """
    shape = [length(dim) for dim in trace.output]
    fine: list[str] = []

    def narrowed(axes: Iterable[str]) -> nn.Module:
        keep = {name: slice(0, kept(atoms[name].size, SHARE)) for name in axes}
        with next(module.parameters()).device:
            return submodel(module, layout, cut(layout, layout.blocks, keep))

    def sift(names: Sequence[str], why_not: Callable[[nn.Module], str | None]) -> None:
        """Holds the axes that fail; of a kind, which differ in the number of their block only, those between two."""
        kinds: dict[str, list[str]] = {}
        for name in names:
            kinds.setdefault(re.sub(r"(^|.*\.)\d+\.", r"\1*.", name), []).append(name)  # without its last number
        if not names or why_not(narrowed([*fine, *names])) is None:
            fine.extend(names)
        elif len(kinds) > 1:
            groups = list(kinds.values())
            for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
                sift([name for kind in half for name in kind], why_not)
        elif (problem := why_not(narrowed([*fine, names[0]]))) is None:
            fine.append(names[0])
            sift(names[1:], why_not)
        else:
            all_fail = why_not(narrowed([*fine, names[-1]])) is not None
            for name in names if all_fail else names[:1]:
                size = atoms[name].size
                hold([atoms[name]], reason=f"with {kept(size, SHARE)} of {size} the model fails: {problem}")
            sift([] if all_fail else names[1:], why_not)

    def not_exported(small: nn.Module) -> str | None:
        try:
            export(small, example)
        except LayoutError as problem:
            return first_line(problem)
        return None

    sift(list(atoms), lambda small: problem_with(small, example, shape))
    while fine:
        try:
            graph = export(narrowed(fine), example).graph
        except LayoutError:
            running, fine = fine, []
            sift(running, not_exported)
            continue
        wrong, reason = _surprise(graph, trace, {atoms[name] for name in fine})
        hold(wrong, reason=reason)
        if not wrong:
            break
        fine = [name for name in fine if atoms[name] not in wrong]


def _surprise(graph: Graph, trace: Trace, narrow: set[Atom]) -> tuple[set[Atom], str]:
    """The axes of the first tensor whose shape does not follow from the axes, and why they are rigid."""

    def expected_shape(dims: Dims) -> tuple[int, ...]:
        sizes = [[kept(a.size, SHARE) if a in narrow else a.size for a in leaves(dim)] for dim in dims]
        return tuple(map(math.prod, sizes))

    ours, theirs = ([node for node in g.nodes if str(node.target) not in IDLE] for g in (trace.graph, graph))
    if [str(node.target) for node in ours] != [str(node.target) for node in theirs]:
        return narrow, "the model takes other steps when it is narrowed"
    for expected, node in zip(ours, theirs, strict=True):
        results = trace.values.get(expected, [])
        if tuple(map(expected_shape, results)) != shapes_of(node)[: len(results)]:
            touched = [*results, *(dims for source in expected.all_input_nodes for dims in trace.values[source])]
            found = narrow & {atom for dims in touched for dim in dims for atom in leaves(dim)}
            return found or narrow, f"{where(expected)} is written for one size of it ({expected.name})"
    return set(), ""
