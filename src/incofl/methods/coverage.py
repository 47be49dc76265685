"""Steps by coverage: the update of a position is shrunk the more, the fewer clients of the cohort held it.

The mean over n holders has a variance of about 1/n, so what few clients hold moves by noise the most. With n the number
of holders of a position, its update is multiplied by

    count:    n / (n + c)
    signal:   S / (S + V / n),

where V is the variance of a client's update and S the square of what it has in common with others, both estimated over
a whole tensor from the spread of the round's uploads (a James-Stein estimate); a tensor of which no position has two
holders is shrunk by its count.
"""

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from incofl.options import options
from incofl.tensors import Tensors
from incofl.transform import Context, Record, Stateless


@options("coverage")
class Coverage(Stateless):
    """Shrinks the update of what few clients hold."""

    kind: Literal["count", "signal"] = "count"  # by the number of holders, or by the spread of their updates
    c: Annotated[float, Ge(0)] = 1.0  # number of holders at which a step is halved; 0: no step is changed

    name = "coverage"

    @property
    def needs_squares(self) -> bool:
        """Whether the server must add up the squares of the updates, too."""
        return self.kind == "signal"

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        record = Record()
        for name, mean in update.items():
            holders = context.weight[name] / context.unit
            factor = self._by_signal(mean, context.squares.get(name), holders)
            if factor is None:
                factor = holders / (holders + self.c) if self.c else torch.ones_like(holders)
            mean.mul_(torch.where(holders > 0, factor, 1.0).to(mean.dtype))
            record[name] = {"factor": float(factor[holders > 0].mean())}
        return update, state, record

    def _by_signal(self, mean: Tensor, squares: Tensor | None, holders: Tensor) -> Tensor | None:
        several = (holders > 1.5).expand_as(mean)
        if squares is None or not bool(several.any()):
            return None
        spread = (squares - mean.square()).clamp_(min=0) * (holders / (holders - 1).clamp(min=0.5))
        variance = spread[several].mean()
        held = (holders > 0).expand_as(mean)
        noise = variance / holders.clamp(min=1)
        signal = (mean.square() - noise.expand_as(mean))[held].mean().clamp_(min=0)
        return signal / (signal + noise).clamp(min=torch.finfo(mean.dtype).tiny)
