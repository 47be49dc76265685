"""Linear CKA: how similar two representations of the same examples are, whatever their sizes.

Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019. For representations X (n, p) and
Y (n, q) of n examples, their columns centred, the feature form is

    CKA(X, Y) = ||Y^T X||^2 / (||X^T X|| ||Y^T Y||)        (Frobenius norms)

It lies in [0, 1], and is 1 for rotations and scalings of one representation. With the centred Gram matrices K = X X^T
and L = Y Y^T it equals the kernel form <K, L> / (||K|| ||L||), the cosine of two matrices. Which form is cheaper
depends on whether there are more examples or more features.

With few examples and many features the plain CKA of unrelated representations is far from 0. Nguyen et al., "Do Wide
and Deep Networks Learn the Same Things?", ICLR 2021, use the unbiased HSIC of Song et al., JMLR 2012, whose mean over
minibatches does not depend on their size. It is the same cosine, of matrices that are centred in another way (Székely
and Rizzo, Annals of Statistics 2014). Everything is computed in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from incofl.errors import ConfigError

COLUMNS = 8192  # of a representation that are in float64 at a time: it may be large
LEAST = 4  # examples that the unbiased estimate needs


def linear_cka(x: Tensor, y: Tensor) -> float:
    """CKA of two representations, one row per example, by the cheaper of its forms."""
    _check([x, y])
    if len(x) < min(x.shape[1], y.shape[1]):
        return float(cka_matrix([gram(x), gram(y)])[0, 1])
    products = CrossProducts()
    products.add(x, y)
    return products.cka()


class CrossProducts:
    """The feature form over minibatches: exact, without holding more than sums of products of features."""

    def __init__(self) -> None:
        self._examples = 0
        self._shift: tuple[Tensor, Tensor] | None = None
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor) -> None:
        """Takes in more examples."""
        _check([x, y])
        x, y = x.double(), y.double()
        if self._shift is None:  # near the mean: sums of squares then lose no digits when they are centred
            self._shift = x.mean(0), y.mean(0)
        x, y = x - self._shift[0], y - self._shift[1]
        sums = [x.sum(0), y.sum(0), x.T @ x, y.T @ y, y.T @ x]
        self._sums = [old + new for old, new in zip(self._sums, sums, strict=True)] if self._sums else sums
        self._examples += len(x)

    def cka(self) -> float:
        """Of all examples so far."""
        if self._examples < 2:
            raise ConfigError(f"CKA: got {self._examples} example(s), expected at least 2")
        x, y, xx, yy, yx = self._sums
        n = self._examples
        norms = [
            float(torch.linalg.matrix_norm(products - torch.outer(a, b) / n))
            for products, a, b in ((xx, x, x), (yy, y, y), (yx, y, x))
        ]
        scale = norms[0] * norms[1]
        return norms[2] ** 2 / scale if scale else float("nan")


def gram(x: Tensor) -> Tensor:
    """The centred Gram matrix of a representation, (n, n)."""
    total = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)
    for columns in x.tensor_split(-(-x.shape[1] // COLUMNS), 1):
        part = columns.double()
        part = part - part.mean(0)
        total.addmm_(part, part.T)
    return total


def u_centred(k: Tensor) -> Tensor:
    """A Gram matrix centred without its diagonal, which becomes 0: what the unbiased HSIC is made of."""
    n = len(k)
    k = k - k.diag().diag()
    rows = k.sum(1) / (n - 2)
    k = k - rows - rows[:, None] + rows.sum() / (n - 1)
    return k.fill_diagonal_(0)


def cka_matrix(grams: Sequence[Tensor]) -> Tensor:
    """CKA of every pair of representations, from their centred Gram matrices."""
    return _cosines(_products(grams))


class DebiasedCka:
    """CKA of every pair of representations from the mean of the unbiased HSIC over minibatches."""

    def __init__(self) -> None:
        self._products: Tensor | None = None

    def add(self, grams: Sequence[Tensor]) -> None:
        """Takes in a minibatch: the Gram matrix of each representation."""
        n = len(grams[0])
        if n < LEAST:
            raise ConfigError(f"unbiased CKA: got a minibatch of {n} example(s), expected at least {LEAST}")
        hsic = _products([u_centred(k) for k in grams]) / (n * (n - 3))
        self._products = hsic if self._products is None else self._products + hsic

    def matrix(self) -> Tensor:
        """CKA of every pair; it can be slightly below 0 where there is no similarity."""
        assert self._products is not None
        return _cosines(self._products)


def debiased_matrix(grams: Sequence[Tensor]) -> Tensor:
    """The same of one batch."""
    estimate = DebiasedCka()
    estimate.add(grams)
    return estimate.matrix()


def _products(matrices: Sequence[Tensor]) -> Tensor:
    """The inner product of every pair of matrices."""
    flat = torch.stack([matrix.flatten() for matrix in matrices])
    return flat @ flat.T


def _cosines(products: Tensor) -> Tensor:
    """From the inner products of every pair; not a number where a representation is constant."""
    norms = products.diagonal().clamp(min=0).sqrt()
    return products / norms / norms[:, None]


def _check(representations: Sequence[Tensor]) -> None:
    shapes = [tuple(x.shape) for x in representations]
    if any(len(shape) != 2 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ConfigError(f"CKA: got shapes {shapes}, expected matrices with a row for each of the same examples")
