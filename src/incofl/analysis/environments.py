"""Cross-environment similarity: do two runs, such as an IID and a non-IID one, move the same layers alike?

In each round that both recorded, the similarity of a layer is linear CKA between the updates of both runs, as matrices
with a row for each output. Plain CKA of unrelated matrices with few and long rows is far from 0; ``chance`` is their
value after the rows of one have been shuffled. The debiased estimate, which is 0 there, stands beside it.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from incofl.analysis.analyze import Findings, Options, cell
from incofl.analysis.layers import Layers, Record, groups_of
from incofl.analysis.plots import drawn, look, short
from incofl.analysis.runs import RecordedRun, by_seed
from incofl.analysis.similarity import FEWEST, cka_matrix, debiased_matrix, gram
from incofl.analysis.updates import describe, update_rounds, updates
from incofl.errors import RunError
from incofl.statistics import Correlation, correlation

STATISTICS = ("mean", "variance", "covariance", "difference", "roughness")  # of updates, that may go with their CKA
SIMILARITIES = {"cka": "CKA of updates: lowest, mean, highest round", "debiased": "the same, debiased (unrelated: 0)"}


def compare_updates(one: Tensor, other: Tensor) -> dict[str, float] | None:
    """Returns CKA and statistics of two updates of a layer; ``None`` where a run moved no output, or all alike."""
    a, b = (update.reshape(len(update), -1).double() for update in (one, other))  # each element of a vector is a row
    grams = [gram(a), gram(b)]
    if not all(k.any() for k in grams):
        return None
    order = torch.randperm(len(b), generator=torch.Generator().manual_seed(0))
    plain = cka_matrix([*grams, grams[1][order][:, order]])[0]
    rough = [shape.numbers["roughness"] if (shape := describe(x.numpy())) else math.nan for x in (one, other)]
    return {
        "cka": float(plain[1]),
        "chance": float(plain[2]),
        "debiased": float(debiased_matrix(grams)[0, 1]) if len(a) >= FEWEST else math.nan,
        "mean": float(a.mean().abs() + b.mean().abs()) / 2,
        "variance": float(a.var() + b.var()) / 2,
        "covariance": float(((a - a.mean()) * (b - b.mean())).mean()),
        "difference": float((a - b).abs().mean()),
        "roughness": float(np.mean(rough)),
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


def normalised(found: Layers, what: str) -> dict[str, float]:
    """Returns means over the rounds, in each group divided by the smallest size, as in the paper's figure."""
    means, heads = found.means(what), found.group_of
    least = {head: min(abs(means[name]) for name in means if heads[name] == head) for head in {heads[n] for n in means}}
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
    first, *others = by_seed(runs)
    if not others:
        raise RunError("got runs of one setting, expected two, such as IID and non-IID")
    reference, of_seed = first.label, {run.seed: run for run in first.runs}
    title = f"updates against those of {reference}: share of (deep layer, round) pairs in which shallow ones are closer"
    findings = Findings(title)

    def look_at(run: RecordedRun) -> Layers:
        if run.seed not in of_seed:
            raise RunError(f"{run.name} has no run of {reference} with its seed")
        return compare_runs(of_seed[run.seed], run)

    comparisons = []
    label_of = {run: group.label for group in others for run in group.runs}
    for run, found in findings.of_each(list(label_of), look_at).items():
        both = [of_seed[run.seed].name, run.name]
        # The paper's observation is that shallow layers are more similar.
        higher = {what: found.shallow_larger(found.numbers[what], np.mean) for what in SIMILARITIES}
        comparisons.append({"runs": both, **found.json(), "shallow_higher": higher, "relations": relations(found)})
        shares = [cell(test.pairs.share, ".0%") for test in higher.values()]
        above = higher["cka"].lowest_above_highest.values()
        row = {"runs": " / ".join(both), "seed": run.seed, "rounds": found.span, "CKA shallow higher": shares[0]}
        findings.row(row | {"debiased": shares[1], "lowest above highest": f"{sum(above)} of {len(above)} groups"})
        suffix = "" if len(others) == 1 else "-" + re.sub(r"[^\w.+-]+", "-", label_of[run])
        name, title = f"cross_environment{suffix}.png", f"similarity of updates of {' and '.join(both)}"
        if out / name not in findings.files:  # one picture for each setting
            path, marks = findings.file(out, name), {"the same with rows shuffled": found.means("chance")}
            found.draw(path, title, SIMILARITIES, lambda row: (row.min(), row.mean(), row.max()), marks)
            draw_relations(findings.file(out, f"relations{suffix}.png"), found, title)
    findings.json(out, "cross_environment.json", {"reference": reference, "comparisons": comparisons})
    return findings


def draw_relations(path: Path, found: Layers, title: str) -> None:
    """Draws CKA against statistics of the updates, both divided by the smallest in their group: a point is a layer."""
    similarity, heads = normalised(found, "cka"), list(dict.fromkeys(found.group_of.values()))
    title += " against their statistics, smallest of each group = 1; hollow: deep layers"
    with drawn(path, title, (2.4, 2.2), len(STATISTICS), len(STATISTICS)) as panels:
        for axes, (what, known) in zip(panels, relations(found).items(), strict=True):
            values = normalised(found, what)
            for name in (name for name in similarity if name in values):
                head = found.group_of[name]
                style = look(heads.index(head), ls="", ms=6, mew=1.3)
                style |= {"label": short(head)} if name == head else {"mfc": "none"}
                axes.plot(values[name], similarity[name], **style)
            r = f"r = {known.pearson:+.2f}, $\\rho$ = {known.spearman:+.2f}" if known.pearson is not None else ""
            axes.set(title=r or f"{known.points} layers", xlabel=what, ylabel="CKA")
