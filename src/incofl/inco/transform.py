"""InCo Aggregation as an update transform: walks the layout's (deep, shallow) pairs and mixes each."""

from dataclasses import dataclass
from typing import Literal

from incofl.inco.cross_layer import Mixing, Products
from incofl.layout import Layout
from incofl.tensors import Tensors

Record = dict[str, dict[str, float]]


@dataclass(frozen=True)
class InCo(Mixing):
    """Replaces the update of every deep layer by its mix with the shallow layer of the same shape in its stage.

    The fields are the arguments of ``mix``, and the config section ``inco``.

    Attributes:
        rule: ``released`` (what the authors' code does), ``algorithm1`` or ``theorem`` of the paper.
        granularity: ``kernel`` (each k x k kernel of a convolution by itself) or ``tensor``.
        normalise: mix unit vectors and scale by the mean norm; false: the ablation without normalisation.
        optimise: weigh the shallow layer by theta; false: the ablation without optimisation.
        theta_max: bound of the size of theta, or none.
        clip: bound of the elements of a mixed update, or none.
        eps: against division by zero, in alpha and in both norms.
        guard_zero_reference: where the shallow update is zero leave the deep one as it is; false: halve it, as the
            released code does.
        reference: which layer is the shallow one: ``released`` (as the model's layout says after the authors' code) or
            ``first-same-shape`` (as the paper words it).
    """

    reference: Literal["released", "first-same-shape"] = "released"

    name = "inco"

    def __call__(self, update: Tensors, layout: Layout) -> tuple[Tensors, Record]:
        """The mixed update and, per mixed tensor, the coefficients of this round. Leaves its input as it is.

        All mixing reads the unmixed update (no chains). A pair of which no client of the cohort held the deep or the
        shallow layer is skipped.
        """
        pairs = layout.shallow if self.reference == "released" else layout.first_same_shape
        mixed, record = dict(update), Record()
        for deep, shallow in pairs.items():
            if deep in update and shallow in update:
                p = self.products(update[deep], update[shallow])
                mixed[deep] = self.combine(update[deep], update[shallow], p)
                record[deep] = self._describe(p)
        return mixed, record

    def _describe(self, p: Products) -> dict[str, float]:
        """Means over the units in which something moved; where nobody held a kernel there is nothing to describe."""
        moved = (p.deep_norm > 0) | (p.shallow_norm > 0)
        count = max(int(moved.sum()), 1)
        return {
            "theta": float((self.theta(p) * moved).sum()) / count,
            "beta": float(p.beta.sum()) / count,
            "beta_positive": float((p.beta > 0).sum()) / count,
            "norm_deep": float(p.deep_norm.square().sum().sqrt()),
            "norm_shallow": float(p.shallow_norm.square().sum().sqrt()),
        }
