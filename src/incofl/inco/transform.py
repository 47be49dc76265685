"""InCo Aggregation as an update transform: walks the layout's (deep, shallow) pairs and mixes each."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Generator, Tensor

from incofl.errors import ConfigError
from incofl.inco.cross_layer import Mixing, Products
from incofl.layout import Layout
from incofl.options import options
from incofl.seeds import Purpose, torch_rng
from incofl.tensors import Tensors, norm
from incofl.transform import Context, Record, Stateless


@options("inco")
class InCo(Mixing, Stateless):
    """Replaces the update of every deep layer by its mix with the shallow layer of the same shape in its stage.

    Attributes:
        rule: ``released`` (what the authors' code does), ``algorithm1`` or ``theorem`` of the paper, or ``norm-only``,
            a control that changes the length of an update and not its direction.
        granularity: ``kernel`` (each k x k kernel of a convolution by itself, as in the authors' code) or ``tensor``
            (each layer as a whole, as in Algorithm 1 and the theorem of the paper).
        normalise: mix unit vectors and scale by the mean norm; false: the ablation without normalisation.
        optimise: weigh the shallow layer by theta; false: the ablation without optimisation.
        theta_max: bound of the size of theta, or none.
        clip: bound of the elements of a mixed update, or none.
        eps: against division by zero, in alpha and in both norms.
        guard_zero_reference: where the shallow update is zero keep the deep one; false: halve it, as the released code.
        reference: which layer is the shallow one: ``released`` (as the model's layout says after the authors' code),
            ``first-same-shape`` (as the paper words it: the first weight of that shape in the stage) or
            ``across-blocks`` (the same weight of the first block where it has that shape).
        stages: numbers of the stages, from 1 on, whose layers are mixed; left out, all.
        shuffle: permute the kernels of the shallow layer at random in every round: a control.
    """

    reference: Literal["released", "first-same-shape", "across-blocks"] = "released"
    stages: tuple[Annotated[int, Ge(1)], ...] | None = None
    shuffle: bool = False
    name = "inco"
    needs_shared_model = True

    def pairs(self, layout: Layout) -> Mapping[str, str]:
        """The shallow counterpart of each deep layer."""
        pairs = {
            "released": layout.shallow,
            "first-same-shape": layout.first_same_shape,
            "across-blocks": layout.across_blocks,
        }[self.reference]
        if self.stages is None:
            return pairs
        if max(self.stages) > len(layout.stages):
            raise ConfigError(f"inco.stages: got {max(self.stages)}, expected at most {len(layout.stages)}")
        mixed = {block for number in self.stages for block in layout.stages[number - 1]}
        return {deep: shallow for deep, shallow in pairs.items() if layout.block_of[deep] in mixed}

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        """Mixes in place, always with the unmixed update: there are no chains.

        A pair of which no client of the cohort held the deep or the shallow layer is skipped. The layers that a level
        keeps for itself are mixed with shared ones where it has no shallow counterpart of its own.
        """
        known = {**context.shared, **update}
        pairs = {deep: s for deep, s in self.pairs(context.layout).items() if deep in update and s in known}
        # What is itself mixed serves others as it was before.
        references = {s: known[s].clone() if s in pairs else known[s] for s in dict.fromkeys(pairs.values())}
        if self.shuffle:
            rng = torch_rng(context.seed, Purpose.SHUFFLE, context.round)
            references = {name: shuffled(value, rng) for name, value in references.items()}
        alpha = {shallow: self.inner(value, value)[0] for shallow, value in references.items()}
        record = Record()
        for deep, shallow in pairs.items():
            p = self.products(update[deep], references[shallow], alpha[shallow])
            before = update[deep].clone()
            self.combine_(update[deep], references[shallow], p)
            record[deep] = self._describe(p) | {"norm_change": norm(before.sub_(update[deep]))}
        return update, state, record

    def _describe(self, p: Products) -> dict[str, float]:
        """Means over the units in which something moved; where nobody held a kernel there is nothing to describe."""
        deep, shallow, beta, theta = (t.flatten() for t in (p.deep_norm, p.shallow_norm, p.beta, p.theta))
        moved = (deep + shallow).sign_()  # 1 or 0; sums of signs are faster than comparisons
        count = max(float(moved.sum()), 1.0)
        return {
            "theta": float(theta @ moved) / count,
            "beta": float(beta.sum()) / count,
            "beta_positive": float(beta.sign().clamp_(min=0).sum()) / count,
            "norm_deep": float(deep @ deep) ** 0.5,
            "norm_shallow": float(shallow @ shallow) ** 0.5,
        }


def shuffled(tensor: Tensor, rng: Generator) -> Tensor:
    """The kernels of a convolution weight, or the elements of any other tensor, in a random order."""
    units = tensor.flatten(0, 1) if tensor.dim() > 2 else tensor.flatten()
    return units[torch.randperm(len(units), generator=rng)].view(tensor.shape)
