"""The task's first metric on examples that nodes hold out: nodes report its totals, which add up."""

import math
from collections.abc import Iterable
from functools import cached_property

import torch

from incofl.data import Examples
from incofl.engine.federation import Federation
from incofl.engine.worker import Worker
from incofl.errors import UploadError
from incofl.flower.protocol import Report
from incofl.inputs import map_inputs


class HeldOut:
    """Checks and adds up the totals that nodes report."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._name = federation.task.first
        self._metric = federation.task.all_metrics[self._name]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the totals, found by evaluating a blank example; none if the server has all examples."""
        f = self._federation
        if len(f.data.train):
            return (0,)
        x, y = f.data.train.x, f.data.train.y
        blank = Examples(map_inputs(lambda t: t.new_zeros(1, *t.shape[1:]), x), y.new_zeros(1, *y.shape[1:]))
        score = Worker(f).score(0, 0, f.slice(0, 0).look(f.model.initial), blank)
        return tuple(score.totals[self._name].shape)

    def check(self, report: Report) -> None:
        """Refuses totals that no examples can have."""
        value = self.value([report])
        if report.tested and (value is None or (self._metric.percent and not 0 <= value <= 1)):
            raise UploadError(f"its {self._name} on held-out examples is {value}, expected a possible value")

    def value(self, reports: Iterable[Report]) -> float | None:
        """The metric over all held-out examples; ``None`` if there are none, or if it cannot be computed."""
        totals = [torch.tensor(report.totals, dtype=torch.float64) for report in reports if report.tested]
        if not totals:
            return None
        try:
            value = float(self._metric.value(torch.stack(totals).sum(0).reshape(self.shape)))
        except (ValueError, ArithmeticError):  # the root of a negative number, from a node that does not tell the truth
            return None
        return value if math.isfinite(value) else None
