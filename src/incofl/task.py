"""What a model is trained for: a loss, and metrics that add up over the parts of a test set."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from incofl.errors import ConfigError, nearest
from incofl.imports import load_attribute

IGNORED = -100  # the target of a position that counts in no loss and no metric


@dataclass(frozen=True)
class Metric:
    """A number that is computed from totals, and totals add up over the parts of a test set.

    Attributes:
        totals: of a batch, from output and target: any tensor, such as the sum and the number of examples.
        value: the metric of the summed totals.
        higher_is_better: the direction of an improvement.
        percent: whether a share, which people read in percent.
    """

    totals: Callable[[Any, Tensor], Tensor]
    value: Callable[[Tensor], float]
    higher_is_better: bool = True
    percent: bool = False


@dataclass(frozen=True)
class Task:
    """A loss and metrics.

    Attributes:
        loss: from output and target, a scalar: the mean over the batch.
        metrics: by name; from output and target a mean over the batch, or a ``Metric``. The first one takes the place
            of the accuracy in all records.
        name: what it is called in records.
        classes: whether targets are classes, and outputs logits with the classes in dimension 1. Some methods need it.
        count: number of examples, or of positions, that the loss of a batch is the mean of.
    """

    loss: Callable[[Any, Tensor], Tensor]
    metrics: Mapping[str, Callable[[Any, Tensor], Tensor | float] | Metric] = field(default_factory=dict)
    name: str = "own"
    classes: bool = False
    count: Callable[[Tensor], int] = len

    @property
    def all_metrics(self) -> dict[str, Metric]:
        """The metrics, and last of all the loss."""
        given = {**self.metrics, "loss": Metric(self._weighted(self.loss), _ratio, higher_is_better=False)}
        return {
            name: metric if isinstance(metric, Metric) else Metric(self._weighted(metric), _ratio)
            for name, metric in given.items()
        }

    @property
    def first(self) -> str:
        """The name of the metric that takes the place of the accuracy."""
        return next(iter(self.all_metrics))

    def score(self, output: Any, target: Tensor) -> "Score":
        """The totals of a batch."""
        totals = {name: metric.totals(output, target) for name, metric in self.all_metrics.items()}
        return Score({name: total.detach().double().cpu().numpy() for name, total in totals.items()})

    def values(self, score: "Score") -> dict[str, float]:
        """All metrics of a test set."""
        return {n: float(metric.value(torch.from_numpy(score.totals[n]))) for n, metric in self.all_metrics.items()}

    def _weighted(self, mean: Callable[[Any, Tensor], Tensor | float]) -> Callable[[Any, Tensor], Tensor]:
        def totals(output: Any, target: Tensor) -> Tensor:
            count = self.count(target)
            return torch.tensor([float(mean(output, target)) * count if count else 0.0, count], dtype=torch.float64)

        return totals


@dataclass(frozen=True, eq=False)
class Score:
    """Totals of the metrics of a task, as arrays, which processes can exchange; those of parts of a test set add up."""

    totals: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Score) or self.totals.keys() != other.totals.keys():
            return False
        return all(np.array_equal(total, other.totals[name]) for name, total in self.totals.items())

    def __add__(self, other: "Score") -> "Score":
        if not self.totals or not other.totals:
            return self if self.totals else other
        return Score({name: total + other.totals[name] for name, total in self.totals.items()})


def _ratio(totals: Tensor) -> float:
    return float(totals[0] / totals[1]) if totals[1] else math.nan


def _rate(right: Tensor, counted: Tensor) -> Tensor:
    return torch.stack([(right & counted).sum(), counted.sum()])


def _accuracy_totals(output: Tensor, target: Tensor) -> Tensor:
    return _rate(output.argmax(1) == target, target != IGNORED)


def _confusion(output: Tensor, target: Tensor) -> Tensor:
    """How often each class (row) was taken for each class (column)."""
    classes, counted = output.shape[1], target != IGNORED
    pairs = target[counted] * classes + output.argmax(1)[counted]
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def _mean_iou(confusion: Tensor) -> float:
    """Intersection over union, mean over the classes that occur."""
    both = confusion.diag()
    either = confusion.sum(0) + confusion.sum(1) - both
    return float((both / either)[either > 0].mean())


def _aligned(output: Tensor, target: Tensor) -> Tensor:
    """An output in the shape of the target: of (B, 1) for (B,), which would otherwise be broadcast to (B, B)."""
    if output.shape != target.shape and output.numel() != target.numel():
        raise ConfigError(f"task: the output has shape {tuple(output.shape)}, the target {tuple(target.shape)}")
    return output.reshape(target.shape)


def _labels_found(output: Tensor, target: Tensor) -> Tensor:
    """Labels found, found wrongly, and missed."""
    said, meant = _aligned(output, target) > 0, target > 0.5
    return torch.stack([(said & meant).sum(), (said & ~meant).sum(), (~said & meant).sum()])


def _f1(totals: Tensor) -> float:
    found, wrong, missed = totals.tolist()
    return 2 * found / (2 * found + wrong + missed) if found + wrong + missed else 1.0


def _error_totals(power: int, output: Tensor, target: Tensor) -> Tensor:
    errors = (_aligned(output, target) - target).abs().double() ** power
    return torch.stack([errors.sum(), torch.tensor(errors.numel(), dtype=torch.float64)])


def _classes_in_dim_1(function: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Tensor:
    return function(output.transpose(1, -1), target)


def _counted(target: Tensor) -> int:
    return int((target != IGNORED).sum())


_ACCURACY = Metric(_accuracy_totals, _ratio, percent=True)

TASKS: dict[str, Task] = {
    "classification": Task(
        functional.cross_entropy, {"accuracy": _ACCURACY}, "classification", classes=True, count=_counted
    ),
    "multilabel": Task(
        lambda output, target: functional.binary_cross_entropy_with_logits(_aligned(output, target), target.float()),
        {
            "accuracy": Metric(
                lambda o, t: _rate((_aligned(o, t) > 0) == (t > 0.5), torch.ones_like(t, dtype=torch.bool)),
                _ratio,
                percent=True,
            ),
            "f1": Metric(_labels_found, _f1, percent=True),
        },
        "multilabel",
    ),
    "regression": Task(
        lambda output, target: functional.mse_loss(_aligned(output, target), target),
        {
            "rmse": Metric(partial(_error_totals, 2), lambda t: math.sqrt(_ratio(t)), higher_is_better=False),
            "mae": Metric(partial(_error_totals, 1), _ratio, higher_is_better=False),
        },
        "regression",
    ),
    "next-token": Task(
        partial(_classes_in_dim_1, functional.cross_entropy),
        {"accuracy": Metric(partial(_classes_in_dim_1, _accuracy_totals), _ratio, percent=True)},
        "next-token",
        count=_counted,
    ),
    "segmentation": Task(
        functional.cross_entropy,
        {"accuracy": _ACCURACY, "iou": Metric(_confusion, _mean_iou, percent=True)},
        "segmentation",
        count=_counted,
    ),
}
CLASSIFICATION = TASKS["classification"]


def find_task(name: str) -> Task:
    """The task of that name, or one of your own named ``package.module:attribute``."""
    if ":" in name:
        task: Task = load_attribute(name, "task.name", Task)
        return task
    if name not in TASKS:
        raise ConfigError(f"task.name: got {name!r}{nearest(name, TASKS)}")
    return TASKS[name]
