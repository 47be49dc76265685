"""Rules of operators that move elements: views, permutations, pieces and joints."""

import itertools

import torch

from incofl.infer.call import Call, Rule, Value
from incofl.infer.dims import OBVIOUS, Dims, leaves, length, new, news, reshape, unify


def view(call: Call) -> Dims:
    """The same elements in the same order."""
    return reshape(call["self"].dims, call.shape)


def permutation(call: Call) -> Dims:
    """Whatever the operator and its arguments: what it does to a tensor of the sizes 2, 3, 4, ..."""
    value: Value = call["self"]
    others = {name: argument for name, argument in call.arguments.items() if name != "self"}
    operator = getattr(torch.ops.aten, call.name.removeprefix("aten."))
    probe = operator(torch.empty(*range(2, 2 + len(value)), device="meta"), **others)
    return tuple(value[size - 2] for size in probe.shape)


def expand(call: Call) -> Dims:
    """Dimensions of length 1, and new ones in front, are repeated."""
    dims = call["self"].dims
    missing = len(call.shape) - len(dims)
    return tuple(
        dims[at - missing] if at >= missing and length(leaves(dims[at - missing])) == size else new(size, OBVIOUS)
        for at, size in enumerate(call.shape)
    )


def repeat(call: Call) -> Dims:
    """Whole copies one after the other."""
    times, value = call["repeats"], call["self"]
    dims = [()] * (len(times) - len(value)) + list(value.dims)
    return tuple((*new(count, OBVIOUS), *dim) for count, dim in zip(times, dims, strict=True))


def repeat_interleave(call: Call) -> Dims | list[Dims]:
    """Copies of each position beside it."""
    dims, at = list(call["self"].dims), call["dim"]
    if at is None:
        return opaque(call)
    dims[at] = (*dims[at], *new(call["repeats"], OBVIOUS))
    return tuple(dims)


def pick(call: Call) -> Dims | list[Dims]:
    """One position of a dimension, or each of them."""
    dims = list(call["self"].dims)
    call.hold(dims.pop(call["dim"] or 0))
    return [tuple(dims)] * len(call.shapes) if call.name == "aten.unbind" else tuple(dims)


def piece(call: Call) -> Dims:
    """A range of positions; mostly all of them."""
    dims, at = list(call["self"].dims), call["dim"] or 0
    if length(leaves(dims[at])) != call.shape[at]:
        call.hold(dims[at])
        dims[at] = new(call.shape[at], OBVIOUS)
    return tuple(dims)


def pieces(call: Call) -> list[Dims]:
    """Equal pieces are copies of an axis; unequal ones cannot be narrowed."""
    value: Value = call["self"]
    at = (call["dim"] or 0) % len(value)
    sizes = [shape[at] for shape in call.shapes]
    if len(set(sizes)) == 1:
        copies, inner = reshape((value[at],), (len(sizes), sizes[0]))
        call.hold(copies)
        return [(*value.dims[:at], inner, *value.dims[at + 1 :])] * len(sizes)
    call.hold(value[at])
    return [(*value.dims[:at], new(size, OBVIOUS), *value.dims[at + 1 :]) for size in sizes]


def glu(call: Call) -> Dims:
    """One half gates the other."""
    halved = [size // (2 if at == call["dim"] % len(call["self"]) else 1) for at, size in enumerate(_shape(call))]
    return pieces(Call(call.name, call.where, call.arguments, (tuple(halved), tuple(halved))))[0]


def joint(call: Call) -> Dims:
    """Tensors one after the other: copies of an axis if all are of the same one."""
    tensors: list[Value] = call["tensors"]
    at = (call["dim"] or 0) % len(call.shape)
    dims = _agree([(*value.dims[:at], (), *value.dims[at + 1 :]) for value in tensors])
    along = [leaves(value[at]) for value in tensors]
    if along[0] and all(dim == along[0] for dim in along):
        joined = (*new(len(along), OBVIOUS), *along[0])
    else:
        for dim in along:
            call.hold(dim, "puts unlike widths side by side")
        joined = new(call.shape[at], OBVIOUS)
    return (*dims[:at], joined, *dims[at + 1 :])


def stack(call: Call) -> Dims:
    """Tensors of one shape along a new dimension."""
    dims = _agree([value.dims for value in call["tensors"]])
    at = (call["dim"] or 0) % len(call.shape)
    return (*dims[:at], new(len(call["tensors"]), OBVIOUS), *dims[at:])


def pad(call: Call) -> Dims:
    """Dimensions whose length changes cannot be narrowed."""
    dims = list(call["self"].dims)
    for at, size in enumerate(call.shape):
        if length(leaves(dims[at])) != size:
            call.hold(dims[at])
            dims[at] = new(size, OBVIOUS)
    return tuple(dims)


def moved(call: Call) -> Dims:
    """The order of positions changes along some dimensions."""
    for at in call["dims"] or range(len(call["self"])):
        call.hold(call["self"][at])
    dims: Dims = call["self"].dims
    return dims


def lookup(call: Call) -> Dims:
    """Advanced indexing: dimensions with an index are replaced by those of the indices."""
    value: Value = call["self"]
    at = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    for dim in at:
        call.hold(value[dim])
    others = [dim for number, dim in enumerate(value.dims) if number not in at]
    rank = len(call.shape) - len(others)
    first = at[0] if at[-1] - at[0] == len(at) - 1 else 0  # as torch and numpy have it
    return (*others[:first], *news(call.shape[first : first + rank], OBVIOUS), *others[first:])


def opaque(call: Call) -> Dims | list[Dims]:
    """An operator without a rule: whatever it touches is held whole, which is always safe."""
    for value in call.values:
        for dim in value.dims:
            call.hold(dim, "has no rule")
    results = [news(shape, OBVIOUS) for shape in call.shapes]
    return results if len(results) != 1 else results[0]


def _agree(all_dims: list[Dims]) -> Dims:
    for one, other in itertools.pairwise(all_dims):
        for a, b in zip(one, other, strict=True):
            unify(a, b)
    return all_dims[0]


def _shape(call: Call) -> list[int]:
    return [length(leaves(dim)) for dim in call["self"].dims]


def _table() -> dict[str, Rule]:
    names: dict[Rule, str] = {
        view: "view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as reshape_as ravel",
        permutation: "permute transpose t mT numpy_T movedim moveaxis swapaxes swapdims adjoint",
        expand: "expand expand_as broadcast_to",
        repeat: "repeat",
        repeat_interleave: "repeat_interleave",
        pick: "select unbind",
        piece: "slice narrow",
        pieces: "split split_with_sizes chunk tensor_split",
        glu: "glu",
        joint: "cat concat",
        stack: "stack",
        pad: "pad constant_pad_nd",
        moved: "flip roll",
        lookup: "index",
    }
    return {f"aten.{name}": rule for rule, line in names.items() for name in line.split()}


VIEWS: dict[str, Rule] = _table()
