"""A ``Slice``: the part of every server tensor that one client holds, as index maps."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from incofl.errors import UploadError
from incofl.layout import Axis, Layout
from incofl.tensors import Tensors

# One dimension of one tensor: a run of neighbouring channels (a view, no copy) or any list of channels.
Index = slice | Tensor
WHOLE = slice(None)
ALL = "all/"  # begins the names of tensors that are no part of a model: every slice holds the whole of them


@dataclass(frozen=True)
class Slice:
    """Index maps for each tensor that a client holds; a name that is absent is not held.

    ``take`` and ``put`` are adjoint: ``<take(x), y> = <x, put(y)>``. Names in ``frozen`` are held but never change:
    they are no part of an update, an upload or a round's traffic. Names in ``given`` are sent and not uploaded.
    """

    index: Mapping[str, tuple[Index, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    frozen: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()

    def take(self, full: Mapping[str, Tensor]) -> Tensors:
        """Cuts this part out of a server-sized state; the result shares no memory with it."""
        return {name: value.clone() for name, value in self.look(full).items()}

    def look(self, full: Mapping[str, Tensor]) -> Tensors:
        """This part of a server-sized state, in its memory where channels are neighbours: only to be read."""
        held = {name: full[name] for name in self.index if name in full}
        own = {n: x if n in self.whole else x[_open(self.index[n], x)] for n, x in held.items()}
        return own | {name: value for name, value in full.items() if name.startswith(ALL)}

    def put(self, part: Mapping[str, Tensor], into: Tensors, weight: float = 1.0) -> None:
        """Adds ``weight * part`` to the positions of ``into`` that this slice holds, in place."""
        views: list[Tensor] = []
        values: list[Tensor] = []
        for name, value in part.items():
            if (target := self.view(name, into[name])) is not None:
                views.append(target)
                values.append(value)
            else:
                into[name][_open(self.index[name], into[name])] += value.to(into[name].dtype) * weight
        if views:
            torch._foreach_add_(views, values, alpha=weight)

    def write(self, part: Mapping[str, Tensor], into: Tensors) -> None:
        """Replaces the positions of ``into`` that this slice holds by those of ``part``, in place."""
        for name, value in part.items():
            into[name][_open(self.index[name], into[name])] = value.to(into[name].dtype)

    def view(self, name: str, full: Tensor) -> Tensor | None:
        """The positions of a server tensor that this slice holds, sharing its memory; none if lists choose them."""
        if name in self.whole:
            return full
        at = self.index[name]
        return full[at] if all(isinstance(index, slice) for index in at) else None

    @cached_property
    def whole(self) -> frozenset[str]:
        """The tensors of which it leaves out nothing."""
        return frozenset(name for name, at in self.index.items() if not any(map(cuts, at)))

    def check(self, part: Mapping[str, Tensor], who: str, uploaded: bool = True) -> None:
        """Refuses a part whose names or shapes are not exactly those of this slice that are uploaded, or sent."""
        if odd := part.keys() ^ (self.index.keys() - self.frozen - (self.given if uploaded else frozenset())):
            name = min(odd)
            raise UploadError(f"{who}: {name!r} is {'not in its slice' if name in part else 'missing'}")
        for name, value in part.items():
            if tuple(value.shape) != self.shapes[name]:
                says = f"has shape {tuple(value.shape)}, its slice expects {self.shapes[name]}"
                raise UploadError(f"{who}: {name!r} {says}; was it trained with another round's slice?")

    def num_bytes(self, full: Mapping[str, Tensor]) -> int:
        """Bytes of this part of a server-sized state that cross the network in a round, uncompressed."""
        sent = [name for name in self.shapes if name in full and name not in self.frozen]
        whole = sum(value.nbytes for name, value in full.items() if name.startswith(ALL))
        return whole + sum(math.prod(self.shapes[name]) * full[name].element_size() for name in sent)

    @property
    def num_elements(self) -> int:
        """Number of scalars in this slice, buffers included."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def cut(layout: Layout, blocks: Collection[str], keep: Mapping[str, Index] | None = None) -> Slice:
    """The slice that keeps the given ``blocks`` and, of each axis named in ``keep``, the given units.

    Stem and head belong to no block and are always held. Because the choice is made per axis, tensors that share
    one (a residual stream) agree by construction.
    """
    keep = keep or {}
    held = [name for name, block in layout.block_of.items() if block is None or block in blocks]
    index = {
        name: tuple(
            WHOLE if axis is None else positions(axis, keep.get(axis.name, WHOLE)) for axis in layout.axes[name]
        )
        for name in held
    }
    shapes = {name: tuple(map(_length, index[name], layout.shapes[name])) for name in held}
    return Slice(index, shapes, layout.frozen.intersection(held), layout.given.intersection(held))


def positions(axis: Axis, units: Index) -> Index:
    """Where some units of an axis lie along the dimension of a tensor."""
    if not cuts(units) or (axis.copies == 1 and axis.unit == 1):
        return units
    if axis.copies == 1 and isinstance(units, slice):
        start, stop, _ = units.indices(axis.size)
        return slice(start * axis.unit, stop * axis.unit)
    return torch.arange(axis.length).view(axis.copies, axis.size, axis.unit)[:, units].flatten()


def cuts(index: Index) -> bool:
    """Whether an index can leave out channels."""
    return not isinstance(index, slice) or index != WHOLE


def _length(index: Index, size: int) -> int:
    return len(range(*index.indices(size))) if isinstance(index, slice) else index.numel()


def _open(at: tuple[Index, ...], full: Tensor) -> tuple[Index, ...]:
    """Makes several channel lists an open mesh, as ``numpy.ix_`` does, so that each acts on its own dimension."""
    lists = [dim for dim, index in enumerate(at) if not isinstance(index, slice)]
    if len(lists) <= 1:
        return at
    # Every dimension up to the last list becomes a list: advanced indices that are neighbours keep their place.
    last = lists[-1] + 1
    mesh = torch.meshgrid(*(torch.arange(full.shape[dim])[at[dim]] for dim in range(last)), indexing="ij")
    return (*mesh, *at[last:])
