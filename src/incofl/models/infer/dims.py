"""Dimensions of tensors as products of atoms, which calls of operators find to be equal, split or whole.

A dimension of length 1152 may turn out to be 3 x 6 x 64: queries, keys and values, heads, channels of a head. An atom
that is split or held whole is so in every tensor in which it occurs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

OBVIOUS = ""  # the reason to hold whole what nobody would narrow: pixels, tokens, kernels


@dataclass(eq=False, slots=True)
class Atom:
    """A factor of the length of dimensions."""

    size: int
    whole: str | None = None  # why it can never be narrowed; None if it may be
    parts: "tuple[Atom, ...]" = ()  # its factors, outermost first; a single one: the atom that it is equal to


# Atoms, outermost first; their product is the length. A dimension of length 1 has none.
Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


def new(size: int, whole: str | None = OBVIOUS) -> Dim:
    """A dimension of which only the length is known."""
    return () if size == 1 else (Atom(size, whole),)


def news(shape: Iterable[int], whole: str | None = OBVIOUS) -> Dims:
    """Dimensions of which only the lengths are known."""
    return tuple(new(size, whole) for size in shape)


def leaves(dim: Iterable[Atom]) -> Dim:
    """The atoms of a dimension that are not split any further."""
    return tuple(leaf for atom in dim for leaf in (leaves(atom.parts) if atom.parts else (atom,)))


def length(dim: Dim) -> int:
    """The length of a dimension."""
    return math.prod(atom.size for atom in dim)


def hold(*dims: Iterable[Atom], reason: str = OBVIOUS) -> None:
    """Holds dimensions whole from now on; the first reason is kept."""
    for atom in leaves(atom for dim in dims for atom in dim):
        if atom.whole is None:
            atom.whole = reason


def unify(a: Dim, b: Dim) -> None:
    """Makes two dimensions of one length the same; a dimension of length 1 goes with any other."""
    left, right = list(leaves(a)[::-1]), list(leaves(b)[::-1])
    while left and right:
        x, y = left.pop(), right.pop()
        if x is y:
            continue
        if not x.parts and not y.parts:  # neither split nor joined since the loop began
            if x.size == y.size:
                x.parts, y.whole = (y,), x.whole if y.whole is None else y.whole
            elif x.size % y.size == 0:
                _split(x, y.size)
            elif y.size % x.size == 0:
                _split(y, x.size)
            else:
                hold([x, y, *left, *right], reason=f"lengths {length(a)} are divided in two ways that do not agree")
                return
        left.extend(leaves([x])[::-1])
        right.extend(leaves([y])[::-1])


def spread(rank: int, *tensors: Dims) -> Dims:
    """The dimensions of tensors that are broadcast, from the last; those of length 1 take the others' length."""
    result: list[Dim] = [()] * rank
    for dims in tensors:
        for at in range(-len(dims), 0):
            unify(dims[at], result[at])
            result[at] = result[at] or dims[at]
    return tuple(result)


def reshape(dims: Dims, shape: Sequence[int]) -> Dims:
    """The dimensions of the same elements in another shape, as in ``torch.reshape``."""
    rest = [atom for dim in dims for atom in leaves(dim)][::-1]
    result: list[Dim] = []
    for size in shape:
        taken: list[Atom] = []
        while size > 1:
            atom = rest.pop()
            if atom.parts:  # it occurs twice, and was split the first time
                rest.extend(leaves([atom])[::-1])
            elif size % atom.size == 0:
                taken.append(atom)
                size //= atom.size
            elif atom.size % size == 0:
                rest.extend(_split(atom, size)[::-1])
            else:
                hold(*dims, reason=f"a view to {list(shape)} does not keep its units together")
                return news(shape)
        result.append(tuple(taken))
    return tuple(result)


def _split(atom: Atom, outer: int) -> Dim:
    atom.parts = (Atom(outer, atom.whole), Atom(atom.size // outer, atom.whole))
    return atom.parts


class Value(tuple[Dim, ...]):
    """The dimensions of a tensor that a model computes."""

    learned = False  # whether it is made of parameters only, without the input


@dataclass(frozen=True)
class Call:
    """A call of an operator in a traced model, as the rules see it."""

    name: str  # without overload: aten.linear
    where: str  # path of the module that calls it
    arguments: dict[str, Any]  # by the names of the operator's schema; a tensor is a Value
    shapes: tuple[tuple[int, ...], ...]  # of its results

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[0]

    @property
    def values(self) -> list[Value]:
        """All tensors among the arguments."""
        lists = [given if isinstance(given, list) else [given] for given in self.arguments.values()]
        return [value for given in lists for value in given if isinstance(value, Value)]

    def hold(self, *dims: Dim, what: str = "uses its positions one by one") -> None:
        """Holds dimensions whole because of this call."""
        hold(*dims, reason=f"{self.where} {what} ({self.name.removeprefix('aten.')})")


Rule = Callable[[Call], Dims | list[Dims] | None]  # dimensions of the result, or of each; None: it cannot say
