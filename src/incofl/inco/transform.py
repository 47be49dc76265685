"""InCo Aggregation as an update transform: walks the layout's (deep, shallow) pairs and mixes each."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from incofl.inco.cross_layer import Granularity, Rule, check_options, coefficient, mix, products
from incofl.layout import Layout
from incofl.tensors import Tensors

Record = dict[str, dict[str, float]]


@dataclass(frozen=True)
class InCo:
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

    rule: Rule = "released"
    granularity: Granularity = "kernel"
    normalise: bool = True
    optimise: bool = True
    theta_max: float | None = 5.0
    clip: float | None = 0.1
    eps: float = 1e-7
    guard_zero_reference: bool = True
    reference: Literal["released", "first-same-shape"] = "released"

    name = "inco"

    def __post_init__(self) -> None:
        check_options(self.rule, self.granularity, self.theta_max, self.clip, self.eps)

    def __call__(self, update: Tensors, layout: Layout) -> tuple[Tensors, Record]:
        """The mixed update and, per mixed tensor, the coefficients of this round. Leaves its input as it is.

        All mixing reads the unmixed update (no chains). A pair of which no client of the cohort held the deep or the
        shallow layer is skipped.
        """
        pairs = layout.shallow if self.reference == "released" else layout.first_same_shape
        mixed, record = dict(update), Record()
        for deep, shallow in pairs.items():
            if deep in update and shallow in update:
                mixed[deep] = self._mix(update[deep], update[shallow])
                record[deep] = self._describe(update[deep], update[shallow])
        return mixed, record

    def _mix(self, deep: Tensor, shallow: Tensor) -> Tensor:
        return mix(
            deep,
            shallow,
            rule=self.rule,
            granularity=self.granularity,
            normalise=self.normalise,
            optimise=self.optimise,
            theta_max=self.theta_max,
            clip=self.clip,
            eps=self.eps,
            guard_zero_reference=self.guard_zero_reference,
        )

    def _describe(self, deep: Tensor, shallow: Tensor) -> dict[str, float]:
        p = products(deep, shallow, self.granularity)
        return {
            "theta": float(coefficient(p, self.rule, self.theta_max, self.eps).mean()),
            "beta": float(p.beta.mean()),
            "beta_positive": float((p.beta > 0).float().mean()),
            "norm_deep": float(p.deep_norm.square().sum().sqrt()),
            "norm_shallow": float(p.shallow_norm.square().sum().sqrt()),
        }
