"""Positions that few clients of a cohort held move not at all, or by a bounded step: ``NAME+holders``.

Where one client holds a position, no comparison of values can tell whether it lies. So with fewer than ``least``
holders the update of a position is set to zero, or kept within ``bound`` times the root mean square of the update over
the positions that have enough holders, of all tensors together. If no position has, all those updates are zero.
"""

import math
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge

from incofl.options import options
from incofl.tensors import Tensors, length
from incofl.transform import Context, Record, Stateless


@options("holders")
class Holders(Stateless):
    """A minimum number of holders, below which a position does not move freely."""

    least: Annotated[int, Ge(1)] = 3  # number of clients of a cohort that must hold a position
    bound: Annotated[float, Ge(0)] = 0.0  # of the step of other positions, in terms of the steps of these; 0: none

    name = "holders"
    counts_holders: ClassVar[bool] = True

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        few = {n: (context.weight[n] / context.unit < self.least - 0.5).expand_as(u) for n, u in update.items()}
        number, size = (sum(int(f(x)) for x in few.values()) for f in (torch.sum, torch.numel))
        scale = length({n: torch.where(few[n], 0, u) for n, u in update.items()}) / math.sqrt(max(size - number, 1))
        most = self.bound * scale
        new = {n: torch.where(few[n], u.clamp(-most, most), u) for n, u in update.items()}
        return new, state, {"all": {"few": number / max(size, 1), "most": most}}
