"""The factors A and B of adapters as matrices, and the SVD of sums of their products, without any product.

The SVD of a sum is that of a small matrix between two QR factors: no matrix as large as an adapted weight is made.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from incofl.methods.adapters import Adapter
from incofl.tensors import Tensors


@dataclass(frozen=True)
class Factors:
    """Both factors of an adapter as matrices, (ranks x inputs) and (outputs x ranks), with a weight."""

    a: Tensor
    b: Tensor
    weight: float = 1.0

    @classmethod
    def of(cls, adapter: Adapter, state: Tensors) -> "Factors":
        """Those of a state; the kernels of convolutions in rows."""
        return cls(state[adapter.a].flatten(1), state[adapter.b].flatten(1))

    def exact(self, weight: float = 1.0) -> "Factors":
        """The same in float64, with a weight."""
        return Factors(self.a.double(), self.b.double(), weight)

    @property
    def rank(self) -> int:
        return len(self.a)

    def ranks(self, first: int, last: int, weight: float) -> "Factors":
        """Some of the ranks."""
        return Factors(self.a[first:last], self.b[:, first:last], weight)

    @property
    def norm(self) -> float:
        """||B A||_F = sqrt(tr(B'B A A')), without the product."""
        return math.sqrt(max(float(((self.b.T @ self.b) * (self.a @ self.a.T)).sum()), 0.0))


def shares(parts: Sequence[Factors]) -> list[Factors]:
    """The same factors with weights that sum to 1; equal ones where all are 0."""
    total = sum(part.weight for part in parts)
    return [dataclasses.replace(part, weight=part.weight / total if total else 1 / len(parts)) for part in parts]


def svd_of_sum(parts: Sequence[Factors]) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V' of the sum of weight B A, by QR of the factors side by side and the SVD of what is between.

    Of the two signs that a pair of vectors can have, rounding must not choose: the largest entry of U is positive.
    """
    left, middle = torch.linalg.qr(torch.cat([math.sqrt(part.weight) * part.b for part in parts], 1))
    right, other = torch.linalg.qr(torch.cat([math.sqrt(part.weight) * part.a for part in parts], 0).T)
    u, s, v = torch.linalg.svd(middle @ other.T, full_matrices=False)
    u, v = left @ u, v @ right.T
    signs = torch.where(u.gather(0, u.abs().argmax(0, keepdim=True)) < 0, -1, 1).to(u.dtype)
    return u * signs, s, signs.T * v


def cut_ranks(parts: Sequence[Factors], old: Factors, balanced: bool) -> Factors:
    """The best factors of the sum of weight B A: U S and V', or ``balanced`` with sqrt(S) in both.

    A rank without a singular value has B = 0 and some A, else it could never learn again.
    """
    u, s, v = svd_of_sum(parts)
    u, s, v = u[:, : old.rank], s[: old.rank], v[: old.rank]
    empty = s <= s.max() * torch.finfo(s.dtype).eps * max(len(u), v.shape[1])
    side = torch.where(empty, 1, s.sqrt()) if balanced else torch.ones_like(s)
    a, b = old.a.clone(), torch.zeros_like(old.b)
    a[: len(s)], b[:, : len(s)] = side[:, None] * v, u * torch.where(empty, 0, s / side)
    return Factors(a, b)
