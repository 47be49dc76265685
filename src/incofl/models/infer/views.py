"""Rules of operators that move elements: views, permutations, pieces and joints."""

import dataclasses

import torch

from incofl.models.infer.dims import Call, Dims, leaves, length, new, news, reshape, spread


def view(call: Call) -> Dims:
    """The same elements in the same order."""
    return reshape(call["self"], call.shape)


def permutation(call: Call) -> Dims:
    """Dimensions in another order: the operator is applied to a tensor of the sizes 2, 3, 4, ..."""
    dims = call["self"]
    operator = getattr(torch.ops.aten, call.name.removeprefix("aten."))
    probe = operator(**call.arguments | {"self": torch.empty(*range(2, 2 + len(dims)), device="meta")})
    return tuple(dims[size - 2] for size in probe.shape)


def expand(call: Call) -> Dims:
    """Dimensions of length 1, and new ones in front, are repeated."""
    aligned = spread(len(call.shape), call["self"])
    return tuple(dim or new(size) for dim, size in zip(aligned, call.shape, strict=True))


def repeat(call: Call) -> Dims:
    """Whole copies one after the other."""
    aligned = spread(len(call.shape), call["self"])
    return tuple((*new(count), *dim) for count, dim in zip(call["repeats"], aligned, strict=True))


def repeat_interleave(call: Call) -> Dims | None:
    """Copies of each position next to it."""
    dims, at = list(call["self"]), call["dim"]
    if at is None:
        return None
    dims[at] = (*dims[at], *new(call["repeats"]))
    return tuple(dims)


def pick(call: Call) -> list[Dims]:
    """One position of a dimension, or each of them."""
    dims = list(call["self"])
    call.hold(dims.pop(call["dim"] or 0))
    return [tuple(dims)] * len(call.shapes)


def resize(call: Call) -> Dims:
    """A range of positions, or more of them: dimensions whose length changes cannot be narrowed."""
    dims = list(call["self"])
    for at, size in enumerate(call.shape):
        if length(dims[at]) != size:
            call.hold(dims[at])
            dims[at] = new(size)
    return tuple(dims)


def pieces(call: Call) -> list[Dims]:
    """Equal pieces are copies of an axis; unequal ones cannot be narrowed."""
    dims = call["self"]
    at = (call["dim"] or 0) % len(dims)
    sizes = [shape[at] for shape in call.shapes]
    if len(set(sizes)) == 1:
        copies, inner = reshape((dims[at],), (len(sizes), sizes[0]))
        call.hold(copies)
        along = [inner] * len(sizes)
    else:
        call.hold(dims[at])
        along = [new(size) for size in sizes]
    return [(*dims[:at], dim, *dims[at + 1 :]) for dim in along]


def glu(call: Call) -> Dims:
    """One half gates the other."""
    return pieces(dataclasses.replace(call, shapes=call.shapes * 2))[0]


def joint(call: Call) -> Dims:
    """Tensors one after the other, copies of an axis if all are of the same one; or along a new dimension."""
    at = (call["dim"] or 0) % len(call.shape)
    after = at if call.name == "aten.stack" else at + 1
    tensors = [dims for dims in call["tensors"] if all(map(length, dims))]  # others hold nothing, as an empty cache
    others = spread(len(call.shape) - 1, *((*dims[:at], *dims[after:]) for dims in tensors))
    along = [leaves(atom for dim in dims[at:after] for atom in dim) for dims in tensors]
    if len(along) == 1:
        return tensors[0]
    if along[0] and all(dim == along[0] for dim in along):
        joined = (*new(len(along)), *along[0])
    else:
        call.hold(*along, what="puts unlike widths side by side")
        joined = new(call.shape[at])
    return (*others[:at], joined, *others[at:])


def lookup(call: Call) -> Dims:
    """Advanced indexing: dimensions with an index are replaced by those of the indices."""
    at = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    call.hold(*(call["self"][dim] for dim in at))
    others = [dim for number, dim in enumerate(call["self"]) if number not in at]
    rank = len(call.shape) - len(others)
    first = at[0] if at[-1] - at[0] == len(at) - 1 else 0  # as in torch and numpy
    return (*others[:first], *news(call.shape[first : first + rank]), *others[first:])
