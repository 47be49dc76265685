"""Dimensions of tensors as products of atoms, which operators find to be equal or split.

A dimension of length 1152 may turn out to be 3 x 6 x 64: queries, keys and values, heads, channels of a head. An atom
that is split or held whole is so in every tensor in which it occurs.
"""

import math
from collections.abc import Iterable, Sequence

OBVIOUS = ""  # the reason to hold whole what nobody would narrow: pixels, tokens, kernels


class Atom:
    """A factor of the length of dimensions."""

    __slots__ = ("parts", "size", "whole")

    def __init__(self, size: int, whole: str | None = None) -> None:
        self.size = size
        self.whole = whole  # why it can never be narrowed; None if it may be
        self.parts: tuple[Atom, ...] = ()  # its factors, outermost first; a single one: the atom that it is equal to


# Atoms, outermost first; their product is the length. A dimension of length 1 has none.
Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


def new(size: int, whole: str | None = None) -> Dim:
    """A dimension of which only the length is known."""
    return () if size == 1 else (Atom(size, whole),)


def news(shape: Iterable[int], whole: str | None = None) -> Dims:
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
        if x.parts or y.parts:  # split or joined since the loop began
            left.extend(leaves([x])[::-1])
            right.extend(leaves([y])[::-1])
        elif x.size == y.size:
            y.whole = x.whole if y.whole is None else y.whole
            x.parts = (y,)
        elif x.size % y.size == 0:
            left.extend(_split(x, y.size)[::-1])
            right.append(y)
        elif y.size % x.size == 0:
            right.extend(_split(y, x.size)[::-1])
            left.append(x)
        else:
            hold([x, y, *left, *right], reason=f"lengths {length(a)} are divided in two ways that do not agree")
            return


def unify_all(a: Dims, b: Dims) -> None:
    """Makes dimensions the same, pair by pair."""
    for one, other in zip(a, b, strict=True):
        unify(one, other)


def reshape(dims: Dims, shape: Sequence[int]) -> Dims:
    """The dimensions of the same elements in another shape, as in ``torch.reshape``."""
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
                hold(*dims, reason=f"a view to {list(shape)} does not keep its units together")
                return news(shape, OBVIOUS)
        result.append(tuple(taken))
    return tuple(result)


def _split(atom: Atom, outer: int) -> Dim:
    atom.parts = (Atom(outer, atom.whole), Atom(atom.size // outer, atom.whole))
    return atom.parts
