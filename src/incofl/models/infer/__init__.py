"""The layout of any model, found by tracing it: ``Layout.infer``.

The operators of a trace tell which dimensions of which tensors are the same; repeated blocks are found among the
modules; and both are tried out before they are used.
"""

import dataclasses

import torch
from torch import nn

from incofl.errors import LayoutError
from incofl.inputs import Inputs
from incofl.layout import Axes, Axis, Layout
from incofl.models.infer.blocks import counterparts, find_stages
from incofl.models.infer.dims import Atom, Dim, hold, leaves, length
from incofl.models.infer.trace import Trace, first_line, trace
from incofl.models.infer.trial import rigid_axes
from incofl.models.model import shapes_of, try_out

__all__ = ["infer_layout"]

CLASSES = "classes"


def infer_layout(module: nn.Module, example: Inputs) -> Layout:
    """The layout of a module from a batch of inputs; neither is changed."""
    Layout.of(module, {}, (), {})  # refuses tied parameters
    try:
        copied, example, _ = try_out(module, example)
    except Exception as problem:
        raise LayoutError(
            f"layout: {type(module).__name__} fails on a batch of shape {shapes_of(example)}: {first_line(problem)}"
        ) from problem
    copied.register_forward_hook(lambda _, inputs, output: getattr(output, "logits", output))
    with torch.random.fork_rng(devices=[]):
        traced = trace(copied, example)
        _one_axis_each(traced)
        axes, atoms, reasons = _name(copied, traced)
        reasons |= rigid_axes(copied, example, Layout.of(copied, axes, (), {}), atoms, traced)
        stages = find_stages(copied, example, traced.graph)
    layout = Layout.of(module, _fix(axes, reasons), stages, {})
    layout = dataclasses.replace(layout, shallow=counterparts(copied, layout), kept_whole=reasons)
    if not layout.stages and not layout.narrow_axes:
        raise LayoutError(
            f"layout: {type(module).__name__} can be split neither by depth nor by width: it has no numbered children "
            "of one class, such as those of a ModuleList, that keep the shape of what they get, and "
            f"{layout.why_whole}; write its Layout by hand"
        )
    return layout


def _one_axis_each(traced: Trace) -> None:
    """Of each dimension only the outermost free atom can be narrowed; none if it occurs twice."""
    for dims in traced.entries.values():
        for dim in dims:
            free = [atom for atom in leaves(dim) if atom.whole is None]
            hold(free[1:], reason="it lies along one dimension with another axis, or twice")


def _name(module: nn.Module, traced: Trace) -> tuple[dict[str, Axes], dict[str, Atom], dict[str, str]]:
    """The axes of all entries, the atom of each axis that can be narrowed, and why others cannot.

    An axis has the name of the first module in whose tensors it lies.
    """
    names: dict[Dim, str] = {leaves(dim): CLASSES for dim in _class_dim(traced)}
    atoms: dict[str, Atom] = {}
    reasons: dict[str, str] = {}

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

    entries = [entry for entry in module.state_dict() if entry in traced.entries]
    axes = {entry: tuple(axis(entry, dim) for dim in traced.entries[entry]) for entry in entries}
    return axes, atoms, reasons


def _class_dim(traced: Trace) -> list[Dim]:
    """The dimension of the output that has an entry's length: the second, or the last of (batch, length, classes)."""
    learned = {leaves(dim) for dims in traced.entries.values() for dim in dims}
    return [dim for dim in (*traced.output[1:2], *traced.output[-1:]) if leaves(dim) in learned][:1]


def _fix(axes: dict[str, Axes], reasons: dict[str, str]) -> dict[str, Axes]:
    """The axes with those fixed that have a reason."""
    return {
        entry: tuple(axis and dataclasses.replace(axis, fixed=axis.fixed or axis.name in reasons) for axis in own)
        for entry, own in axes.items()
    }
