"""Cross-environment similarity: do two runs, such as an IID and a non-IID one, move the same layers alike?

In each round that both recorded, the update of a layer is a matrix with a row for each output (a convolution's weight
is out x (in k k)), and the similarity of two runs is linear CKA between their matrices. Plain CKA of unrelated matrices
is far from 0 when rows are longer than there are rows. ``chance`` says where it lies: CKA after the rows of one have
been shuffled. The debiased estimate, which is 0 there, stands beside it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incofl.analysis.cka import LEAST, cka_matrix, debiased_matrix, gram
from incofl.analysis.runs import Run
from incofl.analysis.smoothness import describe
from incofl.analysis.trials import Correlation, SignTest, correlation, sign_test
from incofl.analysis.updates import Window, groups_of, update_rounds, updates
from incofl.errors import RunError

STATISTICS = ("mean", "variance", "covariance", "difference", "roughness")


@dataclass(frozen=True)
class Pair:
    """One layer in one round of two runs: the similarity of its updates, and statistics of both.

    Attributes:
        cka: plain.
        chance: plain, with the rows of one in another order.
        debiased: without the bias of short matrices; none where it is undefined, as below four rows.
        mean: size of the mean update, mean of both runs.
        variance: of the elements, mean of both runs.
        covariance: of an element in one run with the same in the other.
        difference: mean size of the difference of an element.
        roughness: see ``smoothness``, mean of both runs; none for few elements.
    """

    cka: float
    chance: float
    debiased: float | None
    mean: float
    variance: float
    covariance: float
    difference: float
    roughness: float | None


def matrix(update: Tensor) -> Tensor:
    """An update with a row for each output; of a vector every element is a row."""
    return update.reshape(len(update), -1).double()


def compare_updates(one: Tensor, other: Tensor) -> Pair | None:
    """Two updates of one layer; none where a run did not move it, or all its outputs alike."""
    a, b = matrix(one), matrix(other)
    grams = [gram(a), gram(b)]
    if not all(k.any() for k in grams):
        return None
    order = torch.randperm(len(b), generator=torch.Generator().manual_seed(0))
    plain = cka_matrix([*grams, grams[1][order][:, order]])[0]
    debiased = float(debiased_matrix(grams)[0, 1]) if len(a) >= LEAST else math.nan
    rough = [found[0].roughness for update in (one, other) if (found := describe(update.numpy())) is not None]
    return Pair(
        cka=float(plain[1]),
        chance=float(plain[2]),
        debiased=debiased if math.isfinite(debiased) else None,
        mean=float(a.mean().abs() + b.mean().abs()) / 2,
        variance=float(a.var() + b.var()) / 2,
        covariance=float(((a - a.mean()) * (b - b.mean())).mean()),
        difference=float((a - b).abs().mean()),
        roughness=float(np.mean(rough)) if len(rough) == 2 else None,
    )


Layers = dict[str, dict[int, Pair]]


def compare_runs(one: Run, other: Run, window: Window | None = None) -> Layers:
    """Per layer that InCo pairs and both runs trained, round by round; in groups, the shallow layer first."""
    rounds = sorted(set(update_rounds(one, window)) & set(update_rounds(other, window)))
    names = [name for name in groups_of(one.layout) if other.layout.shapes.get(name) == one.layout.shapes[name]]
    if not rounds or not names:
        what = "round whose update both recorded" if names else "layer of one name and shape"
        raise RunError(f"{one.folder.path} and {other.folder.path}: no {what}; expected two runs of one model")
    found: Layers = {name: {} for name in names}
    for (round, a), (_, b) in zip(updates(one, names, rounds), updates(other, names, rounds), strict=True):
        for name in names:
            if name in a and name in b and (pair := compare_updates(a[name], b[name])) is not None:
                found[name][round] = pair
    return {name: pairs for name, pairs in found.items() if pairs}


@dataclass(frozen=True)
class Higher:
    """Whether shallow layers are more similar across two runs than the deep ones of their group.

    Attributes:
        pairs: over pairs of a deep layer and a round; rounds are not independent, so its p-value is too small.
        layers: a deep layer has one vote, its mean over the rounds.
        lowest_above_highest: per group, whether the lowest round of the shallow layer is above the highest of all deep
            ones, as the paper's figure shows it.
    """

    pairs: SignTest
    layers: SignTest
    lowest_above_highest: Mapping[str, bool]


def shallow_higher(found: Layers, group_of: Mapping[str, str], what: str = "cka") -> Higher:
    """Tests the paper's observation on ``cka`` or ``debiased``; ``group_of`` names each layer's shallow one."""
    rows = {n: {r: v for r, p in found[n].items() if (v := getattr(p, what)) is not None} for n in found}
    rows = {name: values for name, values in rows.items() if values}
    deep = [name for name in rows if group_of[name] != name and group_of[name] in rows]
    lead = {n: [rows[group_of[n]][r] - v for r, v in rows[n].items() if r in rows[group_of[n]]] for n in deep}
    heads = dict.fromkeys(group_of[name] for name in deep)
    return Higher(
        pairs=sign_test([value for values in lead.values() for value in values]),
        layers=sign_test([float(np.mean(values)) for values in lead.values() if values]),
        lowest_above_highest={
            head: min(rows[head].values()) > max(max(rows[n].values()) for n in deep if group_of[n] == head)
            for head in heads
        },
    )


def over_rounds(pairs: Mapping[int, Pair], what: str) -> float | None:
    """The mean of a number over the rounds."""
    values = [value for pair in pairs.values() if (value := getattr(pair, what)) is not None]
    return float(np.mean(values)) if values else None


def normalised(found: Layers, group_of: Mapping[str, str], what: str) -> dict[str, float]:
    """Means over the rounds, in each group divided by the smallest size, as in the paper's figure."""
    means = {name: mean for name, pairs in found.items() if (mean := over_rounds(pairs, what)) is not None}
    least: dict[str, float] = {}
    for name, mean in means.items():
        least[group_of[name]] = min(abs(mean), least.get(group_of[name], np.inf))
    return {name: mean / least[group_of[name]] for name, mean in means.items() if least[group_of[name]] > 0}


def relations(found: Layers, group_of: Mapping[str, str]) -> dict[str, Correlation]:
    """How each statistic goes with CKA over the layers, both normalised within their group."""
    similarity = normalised(found, group_of, "cka")
    result = {}
    for what in STATISTICS:
        values = normalised(found, group_of, what)
        both = [name for name in similarity if name in values]
        result[what] = correlation([similarity[n] for n in both], [values[n] for n in both])
    return result


def summary(one: Run, other: Run, found: Layers) -> dict[str, Any]:
    """What ``cross_environment.json`` holds."""
    group_of = groups_of(one.layout)

    def described(name: str, pairs: Mapping[int, Pair]) -> dict[str, Any]:
        values: dict[str, Sequence[Any]] = {key: [getattr(p, key) for p in pairs.values()] for key in _FIELDS}
        cka = values["cka"]
        return {
            "group": group_of[name],
            "role": "shallow" if name == group_of[name] else "deep",
            "cka_min_mean_max": [min(cka), float(np.mean(cka)), max(cka)],
            "rounds": list(pairs),
            **values,
        }

    return {
        "runs": [one.name, other.name],
        "layers": {name: described(name, pairs) for name, pairs in found.items()},
        "shallow_higher": {what: asdict(shallow_higher(found, group_of, what)) for what in ("cka", "debiased")},
        "relations": {what: asdict(value) for what, value in relations(found, group_of).items()},
    }


_FIELDS = tuple(Pair.__dataclass_fields__)
