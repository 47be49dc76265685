"""Dimensions of tensors as products of atoms; what operators say about them makes atoms equal, or splits them.

A dimension of length 1152 may turn out to be 3 x 6 x 64: queries, keys and values, heads, channels of a head. Where one
atom is split or held whole, it is so in every tensor in which it occurs.
"""

import math
from collections.abc import Iterable, Sequence

OBVIOUS = ""  # the reason of what nobody would want to narrow: pixels, tokens, kernels


class Atom:
    """A factor of the length of dimensions.

    Attributes:
        size: the factor.
        whole: why it can never be narrowed; ``None`` if it may be.
        parts: what it was found to be the product of, outermost first; one part: the atom that it is equal to.
    """

    __slots__ = ("parts", "size", "whole")

    def __init__(self, size: int, whole: str | None = None) -> None:
        self.size, self.whole = size, whole
        self.parts: tuple[Atom, ...] = ()


# Atoms, outermost first; their product is the length. A dimension of length 1 has none.
Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


def new(size: int, whole: str | None = None) -> Dim:
    """A dimension of which nothing is known but its length."""
    return () if size == 1 else (Atom(size, whole),)


def news(shape: Iterable[int], whole: str | None = None) -> Dims:
    """Dimensions of which nothing is known but their lengths."""
    return tuple(new(size, whole) for size in shape)


def leaves(dim: Iterable[Atom]) -> Dim:
    """The atoms as far as they are known now."""
    found: list[Atom] = []
    for atom in dim:
        if atom.parts:
            found.extend(leaves(atom.parts))
        else:
            found.append(atom)
    return tuple(found)


def length(dim: Dim) -> int:
    """Of a dimension."""
    return math.prod(atom.size for atom in dim)


def hold(dim: Iterable[Atom], reason: str = OBVIOUS) -> None:
    """Holds atoms whole from now on; the first reason is kept."""
    for atom in leaves(dim):
        if atom.whole is None:
            atom.whole = reason


def unify(a: Dim, b: Dim) -> None:
    """Two dimensions of one length turn out to be the same."""
    left, right = list(leaves(a)[::-1]), list(leaves(b)[::-1])
    while left and right:
        x, y = left.pop(), right.pop()
        if x is y:
            continue
        if x.parts or y.parts:  # split or joined on the way here
            left.extend(leaves([x])[::-1])
            right.extend(leaves([y])[::-1])
        elif x.size == y.size:
            _join(x, y)
        elif x.size % y.size == 0:
            left.extend(_split(x, y.size)[::-1])
            right.append(y)
        elif y.size % x.size == 0:
            right.extend(_split(y, x.size)[::-1])
            left.append(x)
        else:
            hold([x, y, *left, *right], f"lengths {length(leaves(a))} are divided in two ways that do not agree")
            return


def reshape(dims: Dims, shape: Sequence[int]) -> Dims:
    """The dimensions of the same elements in another shape, as ``torch.reshape`` gives it."""
    rest = [atom for dim in dims for atom in leaves(dim)][::-1]
    result: list[Dim] = []
    for size in shape:
        taken: list[Atom] = []
        while size > 1:
            atom = rest.pop()
            if atom.parts:
                rest.extend(leaves([atom])[::-1])
            elif size % atom.size == 0:
                taken.append(atom)
                size //= atom.size
            elif atom.size % size == 0:
                rest.extend(_split(atom, size)[::-1])
            else:
                hold([a for dim in dims for a in dim], f"a view to {list(shape)} does not keep its units together")
                return news(shape, OBVIOUS)
        result.append(tuple(taken))
    return tuple(result)


def _split(atom: Atom, outer: int) -> tuple[Atom, Atom]:
    pair = Atom(outer, atom.whole), Atom(atom.size // outer, atom.whole)
    atom.parts = pair
    return pair


def _join(a: Atom, b: Atom) -> None:
    b.whole = a.whole if b.whole is None else b.whole
    a.parts = (b,)
