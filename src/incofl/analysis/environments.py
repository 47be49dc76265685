"""Cross-environment similarity: do two runs, such as an IID and a non-IID one, move the same layers alike?

In each round that both recorded, the update of a layer is a matrix with a row for each output (a convolution's weight
is out x (in k k)), and the similarity of two runs is linear CKA between their matrices. Plain CKA of unrelated matrices
is far from 0 when rows are longer than there are rows. ``chance`` says where it lies: CKA after the rows of one have
been shuffled. The debiased estimate, which is 0 there, stands beside it.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from incofl.analysis.analyze import Findings, Options, cell
from incofl.analysis.cka import LEAST, cka_matrix, debiased_matrix, gram
from incofl.analysis.layers import Contest, Layers, Record, groups_of
from incofl.analysis.plots import draw_ranges, drawn, finish_layers, legend, look, short
from incofl.analysis.runs import RecordedRun, by_seed
from incofl.analysis.smoothness import describe
from incofl.analysis.updates import update_rounds, updates
from incofl.errors import RunError
from incofl.statistics import Correlation, correlation

# Statistics of updates that may go with their similarity, with their labels in figures.
STATISTICS = {
    "mean": "size of the mean",
    "variance": "variance",
    "covariance": "covariance",
    "difference": "mean size of the difference",
    "roughness": "roughness",
}
HEADINGS = ("runs", "seed", "rounds", "CKA shallow higher", "debiased", "lowest above highest")


def matrix(update: Tensor) -> Tensor:
    """Returns an update with a row for each output; every element of a vector is a row."""
    return update.reshape(len(update), -1).double()


def compare_updates(one: Tensor, other: Tensor) -> dict[str, float] | None:
    """Compares two updates of one layer: CKA, and the statistics of both.

    Returns ``None`` where a run did not move the layer, or all its outputs alike. Debiased CKA is not a number below
    four rows, and roughness for few elements.
    """
    a, b = matrix(one), matrix(other)
    grams = [gram(a), gram(b)]
    if not all(k.any() for k in grams):
        return None
    order = torch.randperm(len(b), generator=torch.Generator().manual_seed(0))
    plain = cka_matrix([*grams, grams[1][order][:, order]])[0]
    rough = [found[0].roughness for update in (one, other) if (found := describe(update.numpy())) is not None]
    return {
        "cka": float(plain[1]),
        "chance": float(plain[2]),
        "debiased": float(debiased_matrix(grams)[0, 1]) if len(a) >= LEAST else math.nan,
        "mean": float(a.mean().abs() + b.mean().abs()) / 2,
        "variance": float(a.var() + b.var()) / 2,
        "covariance": float(((a - a.mean()) * (b - b.mean())).mean()),
        "difference": float((a - b).abs().mean()),
        "roughness": float(np.mean(rough)) if len(rough) == 2 else math.nan,
    }


def compare_runs(one: RecordedRun, other: RecordedRun) -> Layers:
    """Compares the layers that InCo pairs and both runs trained, round by round."""
    rounds = sorted(set(update_rounds(one)) & set(update_rounds(other)))
    group_of = groups_of(one.layout)
    names = [name for name in group_of if other.layout.shapes.get(name) == one.layout.shapes[name]]
    if not rounds or not names:
        what = "round whose update both recorded" if names else "layer of one name and shape"
        raise RunError(f"{one.path} and {other.path}: no {what}; expected two runs of one model")
    found: dict[str, dict[int, Record]] = {name: {} for name in names}
    for (round, a), (_, b) in zip(updates(one, names, rounds), updates(other, names, rounds), strict=True):
        for name in names:
            if name in a and name in b and (pair := compare_updates(a[name], b[name])) is not None:
                found[name][round] = pair
    return Layers.of(group_of, found)


def shallow_higher(found: Layers, what: str = "cka") -> Contest:
    """Tests the paper's observation that shallow layers are more similar, on ``cka`` or ``debiased``."""
    return found.shallow_larger(found.numbers[what], np.mean)


def normalised(found: Layers, what: str) -> dict[str, float]:
    """Returns means over the rounds, in each group divided by the smallest size, as in the paper's figure."""
    means = {name: float(values.mean()) for name, values in found.rows(what).items()}
    heads = {name: found.group_of[name] for name in means}
    least = {head: min(abs(means[name]) for name in heads if heads[name] == head) for head in heads.values()}
    return {name: mean / least[heads[name]] for name, mean in means.items() if least[heads[name]] > 0}


def relations(found: Layers) -> dict[str, Correlation]:
    """Correlates each statistic with CKA over the layers, both normalised within their group."""
    similarity, statistics = normalised(found, "cka"), {what: normalised(found, what) for what in STATISTICS}
    return {
        what: correlation(list(similarity.values()), [values.get(name) for name in similarity])
        for what, values in statistics.items()
    }


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Compares the first setting with each other one: runs of the same seed, round by round."""
    (reference, firsts), *others = by_seed(runs).items()
    if not others:
        raise RunError("environments: got runs of one setting, expected two, such as IID and non-IID")
    title = f"updates against those of {reference}: share of (deep layer, round) pairs in which shallow ones are closer"
    findings, of_seed = Findings(title, [HEADINGS]), {run.seed: run for run in firsts}

    def look(run: RecordedRun) -> Layers:
        if run.seed not in of_seed:
            raise RunError(f"{run.name} has no run of {reference} with its seed")
        return compare_runs(of_seed[run.seed], run)

    comparisons = []
    label_of = {run: label for label, group in others for run in group}
    for run, found in findings.of_each(list(label_of), look).items():
        both = [of_seed[run.seed].name, run.name]
        higher = {what: shallow_higher(found, what) for what in ("cka", "debiased")}
        comparisons.append({"runs": both, **found.json(), "shallow_higher": higher, "relations": relations(found)})
        above = higher["cka"].lowest_above_highest.values()
        shares = [cell(test.pairs.share, ".0%") for test in higher.values()]
        head = [" / ".join(both), str(run.seed), f"{found.rounds[0]}-{found.rounds[-1]}"]
        findings.table.append([*head, *shares, f"{sum(above)} of {len(above)} groups"])
        suffix = "" if len(others) == 1 else "-" + re.sub(r"[^\w.+-]+", "-", label_of[run])
        if (path := out / f"cross_environment{suffix}.png") not in findings.files:  # one picture for each setting
            names = f"similarity of updates of {' and '.join(both)}"
            draw_environments(findings.file(path), found, names)
            draw_relations(findings.file(out / f"relations{suffix}.png"), found, f"{names} against their statistics")
    findings.json(out / "cross_environment.json", {"reference": reference, "comparisons": comparisons})
    return findings


def draw_environments(path: Path, found: Layers, title: str) -> None:
    """Draws CKA between the updates of two runs for each layer: lowest, mean and highest round."""
    with drawn(path, 8, 0.24 * len(found.group_of) + 1.9, title) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for panel, what in zip(axes, ("cka", "debiased"), strict=True):
            ranges = {name: (own.min(), own.mean(), own.max()) for name, own in found.rows(what).items()}
            draw_ranges(panel, found.group_of, ranges)
        axes[0].set_xlabel("CKA of updates: lowest, mean, highest round")
        axes[1].set_xlabel("the same, debiased (unrelated: 0)")
        axes[1].axvline(0, color="black", lw=0.8)
        chance = {name: float(own.mean()) for name, own in found.rows("chance").items()}
        finish_layers(figure, chance, "the same with rows shuffled")


def draw_relations(path: Path, found: Layers, title: str) -> None:
    """Draws CKA against statistics of the updates, both divided by the smallest in their group: a point is a layer."""
    similarity, measured = normalised(found, "cka"), relations(found)
    heads = list(dict.fromkeys(found.group_of.values()))
    with drawn(path, 2.5 * len(STATISTICS), 3.2, title) as figure:
        for axes, (what, label) in zip(figure.subplots(1, len(STATISTICS)), STATISTICS.items(), strict=True):
            values, known = normalised(found, what), measured[what]
            for name in (name for name in similarity if name in values):
                style = look(heads.index(found.group_of[name]), ms=6, mew=1.3)
                fill = style["color"] if name == found.group_of[name] else "none"
                axes.plot(values[name], similarity[name], **style, mfc=fill)
            r = f"r = {known.pearson:+.2f}, $\\rho$ = {known.spearman:+.2f}" if known.pearson is not None else ""
            axes.set_title(r or f"{known.points} layers")
            axes.set_xlabel(f"{label}\n(smallest of its group = 1)")
        figure.axes[0].set_ylabel("CKA (smallest of its group = 1)")
        looks = {short(head): look(place, ls="") for place, head in enumerate(heads[:8])}
        legend(figure, looks | {"hollow: deep layers": {"marker": "o", "ls": "", "mec": "black", "mfc": "none"}})
