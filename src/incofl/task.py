"""What a model is trained for: a loss, and metrics that add up over the parts of a test set."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from incofl.errors import ConfigError, nearest
from incofl.imports import load_attribute

IGNORED = -100  # the target of a position that counts in no loss and no metric
# Behind the name of a metric: of examples of people or devices that take no part in training.
UNSEEN = "_unseen_clients"
Mean = Callable[[Any, Tensor], Tensor | float]  # of an output and a target: a mean over the batch


def _ratio(totals: Tensor) -> float:
    return float(totals[0] / totals[1]) if totals[1] else math.nan


@dataclass(frozen=True)
class Metric:
    """A number that is computed from totals, which add up over the parts of a test set."""

    totals: Callable[[Any, Tensor], Tensor]  # of output and target, any tensor: such as a sum and a number of examples
    value: Callable[[Tensor], float] = _ratio  # of the summed totals; by default the first over the second
    higher_is_better: bool = True
    percent: bool = False  # whether it is a share, which people read in percent


@dataclass(frozen=True)
class Task:
    """A loss and metrics, functions of output and target; the first metric takes the place of the accuracy."""

    loss: Callable[[Any, Tensor], Tensor]  # the mean over the batch
    metrics: Mapping[str, Mean | Metric] = field(default_factory=dict)  # by name, a mean over the batch or a ``Metric``
    name: str = "own"  # in records
    classes: bool = False  # targets are classes, outputs logits with the classes in dimension 1; some methods need it
    count: Callable[[Tensor], int] = len  # number of examples, or of positions, that the loss is the mean of

    @property
    def all_metrics(self) -> dict[str, Metric]:
        """The metrics, and last of all the loss."""
        given = {n: m if isinstance(m, Metric) else Metric(partial(self._totals, m)) for n, m in self.metrics.items()}
        return given | {"loss": Metric(partial(self._totals, self.loss), higher_is_better=False)}

    @property
    def first(self) -> str:
        """The name of the metric that takes the place of the accuracy."""
        return next(iter(self.all_metrics))

    def score(self, output: Any, target: Tensor) -> "Score":
        """The totals of a batch."""
        totals = {name: metric.totals(output, target) for name, metric in self.all_metrics.items()}
        return Score({name: total.detach().double().cpu().numpy() for name, total in totals.items()})

    def values(self, score: "Score") -> dict[str, float]:
        """All metrics of a test set, and of its examples of unseen clients if there are any."""
        metrics = self.all_metrics
        metrics |= {f"{name}{UNSEEN}": metric for name, metric in metrics.items() if f"{name}{UNSEEN}" in score.totals}
        return {name: float(metric.value(torch.as_tensor(score.totals[name]))) for name, metric in metrics.items()}

    def _totals(self, mean: Mean, output: Any, target: Tensor) -> Tensor:
        count = self.count(target)
        return torch.tensor([float(mean(output, target)) * count if count else 0.0, count], dtype=torch.float64)


@dataclass(frozen=True)
class Score:
    """Totals of the metrics of a task, as arrays, which processes can exchange; those of parts of a test set add up."""

    totals: Mapping[str, np.ndarray] = field(default_factory=dict)

    def renamed(self, suffix: str) -> "Score":
        """The same totals under longer names, for a part of a test set that is reported by itself."""
        return Score({f"{name}{suffix}": total for name, total in self.totals.items()})

    def __add__(self, other: "Score") -> "Score":
        names = {**self.totals, **other.totals}
        return Score({name: np.add(self.totals.get(name, 0), other.totals.get(name, 0)) for name in names})


def _right_classes(output: Tensor, target: Tensor) -> Tensor:
    return torch.stack([(output.argmax(1) == target).sum(), (target != IGNORED).sum()])


def _confusion(output: Tensor, target: Tensor) -> Tensor:
    """How often each class (row) was taken for each class (column)."""
    classes, counted = output.shape[1], target != IGNORED
    pairs = target[counted] * classes + output.argmax(1)[counted]
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def _label_confusion(output: Tensor, target: Tensor) -> Tensor:
    """How often a label that is there or not (row) was taken for one that is there or not (column)."""
    pairs = 2 * (target > 0.5).long() + (_aligned(output, target) > 0)
    return torch.bincount(pairs.flatten(), minlength=4).view(2, 2)


def _f1(confusion: Tensor) -> float:
    (_, wrong), (missed, found) = confusion.tolist()
    return 2 * found / (2 * found + wrong + missed) if found + wrong + missed else 1.0


def _mean_iou(confusion: Tensor) -> float:
    """Intersection over union, mean over the classes that occur."""
    both = confusion.diag()
    either = confusion.sum(0) + confusion.sum(1) - both
    return float((both / either)[either > 0].mean())


def _errors(power: int, output: Tensor, target: Tensor) -> Tensor:
    errors = (_aligned(output, target) - target).abs().double() ** power
    return torch.stack([errors.sum(), torch.tensor(errors.numel(), dtype=torch.float64)])


def _aligned(output: Tensor, target: Tensor) -> Tensor:
    """An output in the shape of the target: of (B, 1) for (B,), which would otherwise be broadcast to (B, B)."""
    if output.shape != target.shape and output.numel() != target.numel():
        raise ConfigError(f"task: the output has shape {tuple(output.shape)}, the target {tuple(target.shape)}")
    return output.reshape(target.shape)


def _counted(target: Tensor) -> int:
    return int((target != IGNORED).sum())


_ACCURACY = Metric(_right_classes, percent=True)
_RMSE = Metric(partial(_errors, 2), lambda totals: math.sqrt(_ratio(totals)), higher_is_better=False)
_ERRORS = {"rmse": _RMSE, "mae": Metric(partial(_errors, 1), higher_is_better=False)}
_LABEL_ACCURACY = Metric(_label_confusion, lambda totals: float(totals.diag().sum() / totals.sum()), percent=True)
_LABELS = {"accuracy": _LABEL_ACCURACY, "f1": Metric(_label_confusion, _f1, percent=True)}
_PIXELS = {"accuracy": _ACCURACY, "iou": Metric(_confusion, _mean_iou, percent=True)}
_TOKENS = {"accuracy": Metric(lambda o, t: _right_classes(o.transpose(1, -1), t), percent=True)}

CLASSIFICATION = Task(cross_entropy, {"accuracy": _ACCURACY}, "classification", classes=True, count=_counted)
_OTHERS = (
    Task(lambda o, t: binary_cross_entropy_with_logits(_aligned(o, t), t.float()), _LABELS, "multilabel"),
    Task(lambda o, t: mse_loss(_aligned(o, t), t), _ERRORS, "regression"),
    Task(lambda o, t: cross_entropy(o.transpose(1, -1), t), _TOKENS, "next-token", count=_counted),
    Task(cross_entropy, _PIXELS, "segmentation", count=_counted),
)
TASKS: dict[str, Task] = {task.name: task for task in (CLASSIFICATION, *_OTHERS)}


def find_task(name: str) -> Task:
    """The task of that name, or one of your own named ``package.module:attribute``."""
    task: Task | None = load_attribute(name, "task.name", Task) if ":" in name else TASKS.get(name)
    if task is None:
        raise ConfigError(f"task.name: got {name!r}{nearest(name, TASKS)}")
    return task
