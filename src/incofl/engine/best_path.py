"""What a device gets that uses the best of the models it can hold: that of its own level, or of a smaller one.

Which is best must be found on other examples than those by which it is judged. So the test set has two halves: on each
the model counts that is best on the other. Whoever deploys a model has all held-out examples to choose by.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from incofl.task import UNSEEN, Score, Task

BEST = "_best_path"  # behind the name of a metric
EVEN, ODD = HALVES = ("/even", "/odd")  # behind that of its totals


def in_halves(even: Score, odd: Score) -> Score:
    """The score of two halves of a test set, and of each by itself."""
    return even + odd + even.renamed(EVEN) + odd.renamed(ODD)


def best_paths(
    task: Task, scores: Mapping[int, Score], levels: Sequence[int]
) -> tuple[dict[str, list[float]], list[int]]:
    """The first metric with the best model that each level can hold, and whose that is on the whole test set.

    Nothing if one half of the test set is empty.
    """
    first, metric = task.first, task.all_metrics[task.first]
    if any(first + half not in score.totals for score in scores.values() for half in HALVES):
        return {}, []

    def value(level: int, part: str) -> float:
        found = float(metric.value(torch.as_tensor(scores[level].totals[first + part])))
        return -math.inf if math.isnan(found) else found if metric.higher_is_better else -found

    def best(level: int, part: str) -> int:
        return max(sorted(held for held in scores if held <= level), key=lambda held: value(held, part))

    found: dict[str, list[float]] = {}
    for level in levels:
        totals = [scores[best(level, other)].totals[first + half] for half, other in ((EVEN, ODD), (ODD, EVEN))]
        judged = {first: totals[0] + totals[1]}
        if first + UNSEEN in scores[level].totals:  # nobody chooses by these
            judged[first + UNSEEN] = scores[best(level, "")].totals[first + UNSEEN]
        for name, total in judged.items():
            found.setdefault(name + BEST, []).append(float(metric.value(torch.as_tensor(total))))
    return found, [best(level, "") for level in levels]
