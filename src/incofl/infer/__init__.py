"""The layout of any model, found by tracing it: ``Layout.infer``.

The operators of a trace tell which dimensions of which tensors are the same; repeated blocks are found among the
modules; and both are tried out before they are believed.
"""

import copy
import dataclasses

from torch import Tensor, nn

from incofl.errors import LayoutError
from incofl.infer.blocks import counterparts, find_stages
from incofl.infer.dims import Atom, Dim, hold, leaves, length
from incofl.infer.trace import Trace, first_line, trace
from incofl.infer.trial import rigid_axes
from incofl.layout import Axes, Axis, Layout

__all__ = ["infer_layout"]

CLASSES = "classes"


def infer_layout(module: nn.Module, example: Tensor) -> Layout:
    """The layout of a module; the example is a batch of whatever it reads. Neither is changed."""
    Layout.of(module, {}, (), {})  # refuses tied parameters
    skeleton = copy.deepcopy(module).to("meta").eval()
    example = example.to("meta")
    try:
        skeleton(example)
    except Exception as problem:
        raise LayoutError(
            f"layout: {type(module).__name__} fails on a batch of shape {tuple(example.shape)}: {first_line(problem)}"
        ) from problem
    traced = trace(skeleton, example)
    _one_axis_each(traced)
    axes, atoms, reasons = _name(skeleton, traced)
    found = Layout.of(skeleton, axes, (), {})
    reasons |= rigid_axes(skeleton, example, found, atoms, traced)
    layout = Layout.of(skeleton, _hold(axes, reasons), find_stages(skeleton, example, traced.graph), {})
    layout = dataclasses.replace(layout, shallow=counterparts(skeleton, layout), kept_whole=reasons)
    if not layout.stages and not layout.narrow_axes:
        raise LayoutError(
            f"layout: {type(module).__name__} can be split neither by depth nor by width: it has no numbered children "
            "of one class, such as those of a ModuleList, that keep the shape of what they get, and "
            f"{layout.why_whole}; write its Layout by hand"
        )
    return layout


def _one_axis_each(traced: Trace) -> None:
    """Along a dimension one atom can be narrowed, the outermost; none if that lies there twice."""
    for dims in traced.entries.values():
        for dim in dims:
            free = [atom for atom in leaves(dim) if atom.whole is None]
            hold(free[1:], "it lies along one dimension with another axis, or twice")


def _name(module: nn.Module, traced: Trace) -> tuple[dict[str, Axes], dict[str, Atom], dict[str, str]]:
    """The axes of all entries, the atom of each axis that may be narrowed, and why others may not.

    An axis has the name of the first module in whose tensors it lies.
    """
    names: dict[tuple[Atom, ...], str] = {leaves(traced.output[1]): CLASSES}
    atoms: dict[str, Atom] = {}
    reasons: dict[str, str] = {}
    axes: dict[str, Axes] = {}

    def axis(entry: str, dim: Dim) -> Axis | None:
        factors = leaves(dim)
        free = next((at for at, atom in enumerate(factors) if atom.whole is None), None)
        key = factors if free is None else (factors[free],)
        reason = next((atom.whole for atom in sorted(factors, key=lambda a: -a.size) if atom.whole), None)
        if not factors or (free is None and reason is None and key not in names):
            return None
        if key not in names:
            owner = entry.rpartition(".")[0] or entry
            names[key] = owner if owner not in names.values() else f"{entry} ({len(names)})"
        name = names[key]
        if free is None:
            if name != CLASSES:
                reasons.setdefault(name, reason or "")
            return Axis(name, length(factors), fixed=True)
        atoms.setdefault(name, factors[free])
        return Axis(name, factors[free].size, copies=length(factors[:free]), unit=length(factors[free + 1 :]))

    for entry in module.state_dict():
        if entry in traced.entries:
            axes[entry] = tuple(axis(entry, dim) for dim in traced.entries[entry])
    return axes, atoms, reasons


def _hold(axes: dict[str, Axes], reasons: dict[str, str]) -> dict[str, Axes]:
    """The axes with those fixed that have a reason to be."""
    return {
        entry: tuple(
            dataclasses.replace(axis, fixed=True) if axis is not None and axis.name in reasons else axis for axis in own
        )
        for entry, own in axes.items()
    }
