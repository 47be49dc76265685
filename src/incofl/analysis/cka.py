"""Linear CKA: how similar two representations of the same examples are, whatever their sizes.

Kornblith et al., ICML 2019: the cosine <K, L> / (||K|| ||L||) of the centred Gram matrices K = X X^T and L = Y Y^T. For
unrelated representations of few examples and many features it is far from 0. Nguyen et al., ICLR 2021, therefore use
the unbiased HSIC of Song et al., JMLR 2012: the same cosine, of matrices that are centred in another way (Székely and
Rizzo, Annals of Statistics 2014). Everything is computed in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from incofl.errors import ConfigError

COLUMNS = 8192  # columns of a representation that are converted to float64 at a time
FEWEST = 4  # examples that the unbiased estimate needs


def gram(x: Tensor) -> Tensor:
    """Returns the centred Gram matrix (n, n) of a representation (n, p)."""
    if x.dim() != 2 or len(x) < 2:
        raise ConfigError(
            f"CKA: got shape {tuple(x.shape)}, expected a matrix with a row for each of at least 2 examples"
        )
    total = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)
    for columns in x.tensor_split(-(-x.shape[1] // COLUMNS), 1):
        part = columns.double()
        part = part - part.mean(0)
        total.addmm_(part, part.T)
    return total


def cka_matrix(grams: Sequence[Tensor]) -> Tensor:
    """Returns the CKA of every pair of representations; not a number where a representation is constant."""
    if len({len(k) for k in grams}) != 1:
        raise ConfigError(f"CKA: got {[len(k) for k in grams]} examples, expected the same examples for all")
    flat = torch.stack([k.flatten() for k in grams])
    products = flat @ flat.T
    norms = products.diagonal().sqrt()
    return products / norms / norms[:, None]


def debiased_matrix(grams: Sequence[Tensor]) -> Tensor:
    """Returns the CKA of every pair by the unbiased HSIC, slightly below 0 at times where there is no similarity."""
    if len(grams[0]) < FEWEST:
        raise ConfigError(f"unbiased CKA: got {len(grams[0])} example(s), expected at least {FEWEST}")
    return cka_matrix([_u_centred(k) for k in grams])


def _u_centred(k: Tensor) -> Tensor:
    """Centres a Gram matrix without its diagonal, which becomes 0."""
    n = len(k)
    k = k - k.diag().diag()
    rows = k.sum(1) / (n - 2)
    k = k - rows - rows[:, None] + rows.sum() / (n - 1)
    return k.fill_diagonal_(0)
