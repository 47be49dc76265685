"""Rules of operators that move elements: views, permutations, pieces and joints."""

import dataclasses
import itertools

import torch

from incofl.models.infer.call import Call, Value, opaque
from incofl.models.infer.dims import OBVIOUS, Dims, leaves, length, new, news, reshape, unify_all


def view(call: Call) -> Dims:
    """The same elements in the same order."""
    return reshape(call["self"].dims, call.shape)


def permutation(call: Call) -> Dims:
    """Dimensions in another order: the operator is applied to a tensor of the sizes 2, 3, 4, ..."""
    value: Value = call["self"]
    others = {name: argument for name, argument in call.arguments.items() if name != "self"}
    operator = getattr(torch.ops.aten, call.name.removeprefix("aten."))
    probe = operator(torch.empty(*range(2, 2 + len(value)), device="meta"), **others)
    return tuple(value[size - 2] for size in probe.shape)


def expand(call: Call) -> Dims:
    """Dimensions of length 1, and new ones in front, are repeated."""
    dims = call["self"].dims
    aligned = [()] * (len(call.shape) - len(dims)) + list(dims)
    return tuple(
        dim if length(dim) == size else new(size, OBVIOUS) for dim, size in zip(aligned, call.shape, strict=True)
    )


def repeat(call: Call) -> Dims:
    """Whole copies one after the other."""
    times, value = call["repeats"], call["self"]
    dims = [()] * (len(times) - len(value)) + list(value.dims)
    return tuple((*new(count, OBVIOUS), *dim) for count, dim in zip(times, dims, strict=True))


def repeat_interleave(call: Call) -> Dims | list[Dims]:
    """Copies of each position next to it."""
    dims, at = list(call["self"].dims), call["dim"]
    if at is None:
        return opaque(call)
    dims[at] = (*dims[at], *new(call["repeats"], OBVIOUS))
    return tuple(dims)


def pick(call: Call) -> list[Dims]:
    """One position of a dimension, or each of them."""
    dims = list(call["self"].dims)
    call.hold(dims.pop(call["dim"] or 0))
    return [tuple(dims)] * len(call.shapes)


def resize(call: Call) -> Dims:
    """A range of positions, or more of them: dimensions whose length changes cannot be narrowed."""
    dims = list(call["self"].dims)
    for at, size in enumerate(call.shape):
        if length(dims[at]) != size:
            call.hold(dims[at])
            dims[at] = new(size, OBVIOUS)
    return tuple(dims)


def pieces(call: Call) -> list[Dims]:
    """Equal pieces are copies of an axis; unequal ones cannot be narrowed."""
    value: Value = call["self"]
    at = (call["dim"] or 0) % len(value)
    sizes = [shape[at] for shape in call.shapes]
    if len(set(sizes)) == 1:
        copies, inner = reshape((value[at],), (len(sizes), sizes[0]))
        call.hold(copies)
        along = [inner] * len(sizes)
    else:
        call.hold(value[at])
        along = [new(size, OBVIOUS) for size in sizes]
    return [(*value.dims[:at], dim, *value.dims[at + 1 :]) for dim in along]


def glu(call: Call) -> Dims:
    """One half gates the other."""
    return pieces(dataclasses.replace(call, shapes=call.shapes * 2))[0]


def joint(call: Call) -> Dims:
    """Tensors one after the other: copies of an axis if all are of the same one."""
    tensors: list[Value] = call["tensors"]
    at = (call["dim"] or 0) % len(call.shape)
    dims = _agree([(*value.dims[:at], (), *value.dims[at + 1 :]) for value in tensors])
    along = [leaves(value[at]) for value in tensors]
    if along[0] and all(dim == along[0] for dim in along):
        joined = (*new(len(along), OBVIOUS), *along[0])
    else:
        call.hold(*along, what="puts unlike widths side by side")
        joined = new(call.shape[at], OBVIOUS)
    return (*dims[:at], joined, *dims[at + 1 :])


def stack(call: Call) -> Dims:
    """Tensors of one shape along a new dimension."""
    dims = _agree([value.dims for value in call["tensors"]])
    at = (call["dim"] or 0) % len(call.shape)
    return (*dims[:at], new(len(call["tensors"]), OBVIOUS), *dims[at:])


def lookup(call: Call) -> Dims:
    """Advanced indexing: dimensions with an index are replaced by those of the indices."""
    value: Value = call["self"]
    at = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    call.hold(*(value[dim] for dim in at))
    others = [dim for number, dim in enumerate(value.dims) if number not in at]
    rank = len(call.shape) - len(others)
    first = at[0] if at[-1] - at[0] == len(at) - 1 else 0  # as in torch and numpy
    return (*others[:first], *news(call.shape[first : first + rank], OBVIOUS), *others[first:])


def _agree(all_dims: list[Dims]) -> Dims:
    for one, other in itertools.pairwise(all_dims):
        unify_all(one, other)
    return all_dims[0]
