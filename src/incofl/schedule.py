"""Step sizes that change over the rounds, on clients and on the server."""

import math
from dataclasses import replace
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le

from incofl.options import options


@options("")
class Schedule:
    """A factor of the step size as a function of the round."""

    # of ``lr`` over the rounds: ``constant``, ``step`` (times ``decay`` after every ``decay_every`` rounds) or
    # ``cosine`` (from ``lr`` to ``decay_to`` times ``lr``)
    schedule: Literal["constant", "step", "cosine"] = "constant"
    decay: Annotated[float, Gt(0), Le(1)] = 0.9  # factor of a step
    decay_every: Annotated[int, Ge(1)] = 10  # number of rounds between two steps
    decay_to: Annotated[float, Ge(0), Le(1)] = 0.0  # last value of the cosine, as a share of ``lr``
    decay_rounds: Annotated[int, Ge(1)] | None = None  # number of rounds with a decay; left out, those of the run

    def factor(self, round: int) -> float:
        """The factor in a round, whose number starts at 0."""
        if self.schedule == "step":
            return self.decay ** (min(round, self.decay_rounds or round) // self.decay_every)
        if self.schedule == "cosine":
            progress = min(round / (self.decay_rounds or 1), 1.0)
            return self.decay_to + (1 - self.decay_to) * (1 + math.cos(math.pi * progress)) / 2
        return 1.0

    def for_run(self, rounds: int, epochs: int) -> Self:
        """The schedule with what follows from the run filled in."""
        open_end = self.schedule == "cosine" and self.decay_rounds is None
        return replace(self, decay_rounds=rounds) if open_end else self
