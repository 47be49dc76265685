"""The layout of any model, found by tracing it: ``Layout.infer``.

The operators of a trace tell which dimensions of which tensors are the same; repeated blocks are found among the
modules; and both are tried out before they are used.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from incofl.errors import LayoutError
from incofl.layout import Axes, Axis, Layout
from incofl.models.infer.blocks import counterparts, find_stages
from incofl.models.infer.dims import Atom, Dim, hold, leaves, length
from incofl.models.infer.trace import Trace, trace
from incofl.models.infer.trial import hold_rigid
from incofl.models.model import first_line, on_cpu, on_meta, shapes_of
from incofl.tensors import Inputs, call

EVERY_WIDTH = "every width"


def infer_layout(module: nn.Module, example: Inputs, blocks: Sequence[str] = ()) -> Layout:
    """The layout of a module from a batch of inputs; neither is changed.

    Where the axes cannot be found there is depth alone, where blocks cannot, width alone.
    """
    name = type(module).__name__
    with torch.random.fork_rng(devices=[]):
        copied, example, traced, untraced = _follow(module, example)
        axes, reasons = ({}, {EVERY_WIDTH: untraced}) if traced is None else _try_axes(copied, example, traced)
        stages, results = find_stages(copied, example, None if traced is None else traced.graph, blocks)
    layout = dataclasses.replace(Layout.of(module, axes, stages, {}), results=results)
    layout = dataclasses.replace(layout, shallow=counterparts(copied, layout), kept_whole=reasons)
    if not layout.stages and not layout.narrow_axes:
        raise LayoutError(
            f"layout: {name} can be split neither by depth nor by width: it has no numbered children of one class, "
            "such as those of a ModuleList, that keep the shape of what they get, and "
            f"{layout.why_whole}; name its blocks with model.blocks, or write its Layout by hand"
        )
    return layout


def _follow(module: nn.Module, example: Inputs) -> tuple[nn.Module, Inputs, Trace | None, str]:
    """A copy that runs, a batch for it and its trace, or why there is none: without values if that works."""
    running: tuple[nn.Module, Inputs] | None = None
    problem: Exception
    for copies in (on_meta, on_cpu):
        copied, batch = copies(module, example)
        copied.register_forward_hook(lambda _, inputs, output: getattr(output, "logits", output))
        try:
            output = call(copied, batch)
        except Exception as fails:  # on the CPU, or only without values
            if running is None:
                problem = fails
            continue
        if not isinstance(output, Tensor) or not output.dim():
            words = "gives something else than one tensor, expected one with a row for each example"
            raise LayoutError(f"layout: {type(module).__name__} {words}, such as (batch, classes)")
        running = copied, batch
        try:
            return *running, trace(*running), ""
        except Exception as untraced:
            problem = untraced
    if running is None:
        words = f"fails on a batch of shape {shapes_of(example)}: {first_line(problem)}"
        raise LayoutError(f"layout: {type(module).__name__} {words}") from problem
    return *running, None, first_line(problem).removeprefix("layout: ")


def _try_axes(module: nn.Module, example: Inputs, traced: Trace) -> tuple[dict[str, Axes], dict[str, str]]:
    """The axes that a trial confirms, and why others are held whole."""
    names: dict[Atom, str] = {}
    for dim in (dim for dims in traced.entries.values() for dim in dims):
        free = [atom for atom in leaves(dim) if atom.whole is None]
        hold(free[1:], reason="it lies along one dimension with another axis, or twice")
    axes, _ = _find_axes(module, traced, names)
    narrow = {name: atom for atom, name in names.items() if atom.whole is None}
    try:
        hold_rigid(module, example, Layout.of(module, axes, (), {}), narrow, traced)
    except Exception as problem:  # whatever a user's module may raise when it is copied or cut
        return {}, {EVERY_WIDTH: f"no narrower copy can be made: {first_line(problem)}"}
    return _find_axes(module, traced, names)


def _find_axes(module: nn.Module, traced: Trace, names: dict[Atom, str]) -> tuple[dict[str, Axes], dict[str, str]]:
    """The axes of all entries that can be narrowed, and the classes; and why others cannot.

    An axis has the name of the first module in whose tensors it lies; new ones are added to ``names``.
    """
    reasons: dict[str, str] = {}
    # The classes: the dimension of the output that an entry has; the second, or the last of (batch, length, classes).
    learned = {leaves(dim) for dims in traced.entries.values() for dim in dims}
    classes = next((leaves(dim) for dim in (*traced.output[1:2], *traced.output[-1:]) if leaves(dim) in learned), ())

    def name_of(atom: Atom, entry: str) -> str:
        owner = entry.rpartition(".")[0] or entry
        return names.setdefault(atom, owner if owner not in names.values() else f"{entry} ({1 + len(names)})")

    def axis(entry: str, dim: Dim) -> Axis | None:
        factors = leaves(dim)
        free = next((at for at, atom in enumerate(factors) if atom.whole is None), None)
        if free is not None:
            name, size = name_of(factors[free], entry), factors[free].size
            return Axis(name, size, copies=length(factors[:free]), unit=length(factors[free + 1 :]))
        if factors and factors == classes:
            return Axis("classes", length(factors), fixed=True)
        held = sorted((atom for atom in factors if atom.whole), key=lambda atom: (atom not in names, -atom.size))
        for atom in held[:1]:
            reasons.setdefault(name_of(atom, entry), str(atom.whole))
        return None

    entries = [entry for entry in module.state_dict() if entry in traced.entries]
    axes = {entry: tuple(axis(entry, dim) for dim in traced.entries[entry]) for entry in entries}
    return axes, reasons
