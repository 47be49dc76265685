"""Components 2 and 3 of the paper on one pair of layers: cross-layer mixing, normalisation, projection.

g_k is the aggregated update of a deep layer, g_0 that of its shallow counterpart (the paper calls them gradients; here
an update is always new minus old, to be added). With the norms N_k, N_0 and, as in the theorem of section 3.3,

    alpha = <g_0, g_0>,    beta = <g_0, g_k>,    theta = beta / alpha,

the minimiser of ||g_k - g||^2 subject to <g, g_0> >= 0 is g_k where beta >= 0 and g_k - theta g_0 elsewhere.
What is applied in practice differs between the theorem, Algorithm 1 and the code the authors released, so the rule is a
choice; see ``mix``.
"""

from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from incofl.errors import ConfigError
from incofl.options import options

Rule = Literal["released", "algorithm1", "theorem", "norm-only"]
Granularity = Literal["kernel", "tensor"]


class Products(NamedTuple):
    """The scalars of each unit of granularity, shaped to broadcast over it."""

    deep_norm: Tensor  # N_k
    shallow_norm: Tensor  # N_0
    alpha: Tensor  # <g_0, g_0>
    beta: Tensor  # <g_0, g_k>
    theta: Tensor  # the weight of g_0, bounded


@options("inco")
class Mixing:
    """The choices of InCo; ``mix`` says what each means."""

    rule: Rule = "released"
    granularity: Granularity = "kernel"
    normalise: bool = True
    optimise: bool = True
    theta_max: Annotated[float, Gt(0)] | None = 5.0
    clip: Annotated[float, Gt(0)] | None = 0.1
    eps: Annotated[float, Ge(0)] = 1e-7
    guard_zero_reference: bool = True

    def inner(self, a: Tensor, *others: Tensor) -> list[Tensor]:
        """<a, b> for each b, per unit: a kernel of a convolution weight by itself, any other tensor as a whole."""
        if self.granularity == "tensor" or a.dim() <= 2:
            # Row by row first: the sum of a whole tensor depends on how many threads share it.
            return [(a * b).reshape(len(a), -1).sum(1).sum().view([1] * a.dim()) for b in others]
        # (out, in, kh, kw): one unit per (out, in) pair. Position by position, there is no product as large as a layer.
        totals = [torch.zeros(a.shape[:2], dtype=a.dtype, device=a.device) for _ in others]
        for x, *ys in zip(*(t.flatten(2).unbind(2) for t in (a, *others)), strict=True):
            for total, y in zip(totals, ys, strict=True):
                total.addcmul_(x, y)
        return [total.view(*total.shape, *[1] * (a.dim() - 2)) for total in totals]

    def products(self, deep: Tensor, shallow: Tensor, alpha: Tensor) -> Products:
        """All that the formulas need; alpha is given, as a shallow layer serves several deep ones."""
        deep_square, beta = self.inner(deep, deep, shallow)
        return Products(deep_square.sqrt_(), alpha.sqrt(), alpha, beta, self._theta(alpha, beta))

    def _theta(self, alpha: Tensor, beta: Tensor) -> Tensor:
        """``theorem`` has none where beta >= 0: there g_k satisfies the constraint."""
        if self.rule == "norm-only" or not self.optimise:
            return torch.full_like(beta, float(self.rule != "norm-only"))
        theta = (beta.abs() if self.rule == "released" else beta) / (alpha + self.eps)
        if self.theta_max is not None:
            theta.clamp_(-self.theta_max, self.theta_max)
        return theta.masked_fill_(beta >= 0, 0) if self.rule == "theorem" else theta

    def combine_(self, deep: Tensor, shallow: Tensor, p: Products) -> Tensor:
        """Makes ``deep`` the mixed update, a g_k + b g_0 with one a and one b per unit."""
        sign = 1 if self.rule == "released" or not self.optimise else -1
        a, b = torch.ones_like(p.theta), sign * p.theta
        if self.normalise:
            scale = (p.deep_norm + p.shallow_norm) / 2
            a, b = scale / (p.deep_norm + self.eps), b * scale / (p.shallow_norm + self.eps)
        unmixed = []  # units in which g_k stays as it is
        if self.guard_zero_reference and float(p.shallow_norm.min()) == 0:
            unmixed.append(p.shallow_norm == 0)
        if self.rule == "theorem" and self.optimise:
            unmixed.append(p.beta >= 0)
        for where in unmixed:
            a, b = a.masked_fill(where, 1), b.masked_fill(where, 0)
        deep.mul_(a).addcmul_(shallow, b)
        return deep if self.clip is None else deep.clamp_(-self.clip, self.clip)


def mix(
    deep: Tensor,
    shallow: Tensor,
    *,
    rule: Rule = "released",
    granularity: Granularity = "kernel",
    normalise: bool = True,
    optimise: bool = True,
    theta_max: float | None = 5.0,
    clip: float | None = 0.1,
    eps: float = 1e-7,
    guard_zero_reference: bool = True,
) -> Tensor:
    """The InCo update of a deep layer, from its own aggregated update and that of its shallow counterpart.

    Per unit of granularity, with N the norm:

    - ``released``: theta = |beta|/(alpha+eps), (g_k/(N_k+eps) + theta g_0/(N_0+eps)) (N_k+N_0)/2;
    - ``algorithm1``: theta = beta/(alpha+eps), (g_k/(N_k+eps) - theta g_0/(N_0+eps)) (N_k+N_0)/2;
    - ``theorem``: as ``algorithm1`` where beta < 0, g_k itself elsewhere;
    - ``norm-only``: theta = 0, g_k/(N_k+eps) (N_k+N_0)/2: a control that gives g_k another length and no direction.

    Args:
        deep: g_k; not modified.
        shallow: g_0, of the same shape; not modified.
        rule: which of the formulas.
        granularity: ``kernel`` (each k x k kernel of a convolution by itself, other tensors as a whole) or ``tensor``.
        normalise: mix unit vectors and scale by the mean norm; without it ``g_k + theta g_0`` or ``g_k - theta g_0``.
        optimise: use theta; without it the two are simply added, whatever the rule.
        theta_max: bound of |theta|, against a tiny g_0; ``None``: no bound.
        clip: bound of the elements of the result, against a blown-up tiny g_k; ``None``: no bound.
        eps: added to alpha and to both norms, against division by zero.
        guard_zero_reference: where g_0 is zero the result is g_k; without it the formula halves g_k.
    """
    if deep.shape != shallow.shape:
        raise ConfigError(
            f"mix: deep has shape {tuple(deep.shape)}, shallow {tuple(shallow.shape)}, expected one shape"
        )
    mixing = Mixing(rule, granularity, normalise, optimise, theta_max, clip, eps, guard_zero_reference)
    return mixing.combine_(deep.clone(), shallow, mixing.products(deep, shallow, *mixing.inner(shallow, shallow)))
