"""The aggregated updates of a run: what its rounds did to shallow and deep layers, and how smooth that is.

The update of a round (the paper calls it gradient) is the difference of the recorded server states before and after it.
Where levels keep a layer for themselves, it is the mean of what the levels see, at every position over the clients of
the cohort that hold it. What smooth means, and why by these numbers: docs/analysis-updates.md.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from incofl.aggregate import Accumulator, Contribution
from incofl.analysis.analyze import Findings, Options, cell, evenly
from incofl.analysis.layers import LOOKS, Array, Contest, Layers, groups_of
from incofl.analysis.plots import drawn, short
from incofl.analysis.runs import RecordedRun
from incofl.errors import RunError
from incofl.server import Server
from incofl.split import Slice
from incofl.tensors import Tensors

REACH = 4.0  # standard deviations to both sides; what lies beyond is left out, as end bins would be peaks
LEAST = 64  # elements below which a histogram says nothing
NORMAL_IQR = 1.3489795003921634  # interquartile range of the normal distribution, in standard deviations
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# Less is smoother, for each of these measures; with their labels in figures.
MEASURES = {
    "roughness": "roughness (extra peaks)",
    "kurtosis": "size of excess kurtosis",
    "step": "change of shape in a round ($W_1$)",
    "width": "change of width in a round (|log$_2$|)",
}
MOST_GROUPS, MOST_DEEP, MOST_ROUNDS = 4, 4, 11  # of ridges; the paper shows the rounds 40 to 50
OVERLAP = 1.7  # height of a ridge in distances of two
Holder = tuple[int, Slice, int]  # a level, its slice, and the number of clients of the cohort that hold it


@dataclass(frozen=True)
class Shape:
    """The distribution of an update."""

    numbers: dict[str, float]
    marks: Array  # at QUANTILES
    edges: Array  # of the histogram's bins, over REACH to both sides of the median
    counts: Array
    z: Array  # the standardised elements, as evenly spaced quantiles


def describe(values: ArrayLike, before: Shape | None = None) -> Shape | None:
    """Returns the shape of an update; ``None`` where few elements moved, or half of them by the same amount."""
    x = np.asarray(values, dtype=np.float64).ravel()
    x = x[x != 0]  # nobody trained the others
    marks = np.quantile(x, QUANTILES) if len(x) >= LEAST else np.zeros(len(QUANTILES))
    # Quartiles, not the standard deviation: a few large elements would squeeze the rest into one bin.
    scale = float(marks[3] - marks[1]) / NORMAL_IQR
    if not scale > 0:
        return None
    standard, mean, deviation = (x - marks[2]) / scale, float(x.mean()), float(x.std())
    counts, z = histogram(standard), quantiles(standard)
    numbers = {
        "elements": float(len(x)),
        "roughness": roughness(counts),
        "kurtosis": float(np.mean((x - mean) ** 4)) / deviation**4 - 3,  # 0 for a bell
        "mean": mean,
        "deviation": deviation,
        "scale": scale,
        "step": step(before.z, z) if before else math.nan,
        "width": abs(math.log2(scale / before.numbers["scale"])) if before else math.nan,
    }
    numbers |= {f"quantile_{at:g}": float(mark) for at, mark in zip(QUANTILES, marks, strict=True)}
    return Shape(numbers, marks, np.linspace(-REACH, REACH, len(counts) + 1) * scale + marks[2], counts, z)


def histogram(z: Array) -> Array:
    """Returns the histogram of standardised elements, in bins by Rice's rule: a kernel estimate would be smooth."""
    bins = max(8, math.ceil(2 * len(z) ** (1 / 3)))
    return np.histogram(z, bins, (-REACH, REACH))[0].astype(np.float64)


def roughness(counts: Array) -> float:
    """Returns TV / (2 max) - 1, the total variation of a histogram beyond that of one peak: m - 1 for m equal peaks."""
    return float(np.abs(np.diff(counts, prepend=0, append=0)).sum() / (2 * counts.max()) - 1)


def quantiles(z: Array, points: int = 1000) -> Array:
    """Returns evenly spaced quantiles of standardised elements, within ``REACH``."""
    ordered: Array = np.sort(z.clip(-REACH, REACH))
    return ordered.take(((np.arange(points) + 0.5) / points * len(z)).astype(int))


def step(one: Array, other: Array) -> float:
    """Returns the Wasserstein-1 distance of two distributions, given as ``quantiles``: their mean distance."""
    return float(np.abs(one - other).mean())


@cache
def floor(elements: int, draws: int = 20) -> float:
    """Returns the roughness that ``elements`` normal numbers have by chance, mean of a few draws."""
    rng = np.random.default_rng(0)
    return float(np.mean([roughness(histogram(rng.standard_normal(elements))) for _ in range(draws)]))


def update_rounds(run: RecordedRun) -> list[int]:
    """Returns the rounds whose update is known: the states before and after them were recorded."""
    if rounds := [round for round in run.recorded if round - 1 in run.recorded]:
        return rounds
    what = "no states of two consecutive rounds were recorded, which the analysis of updates needs"
    raise RunError(f"{run.path}: {what}; run it with record.every=1 or record.window (--set, or in the config)")


def updates(run: RecordedRun, names: Collection[str], rounds: Sequence[int]) -> Iterator[tuple[int, Tensors]]:
    """Yields the aggregated updates of some parameters, round by round; each state is read once, no data files."""
    cohorts, federation = {row["round"]: row["clients"] for row in run.rows}, run.outline
    after: Server | None = None
    for round in rounds:
        before = after if after is not None and after.round == round - 1 else run.server(round - 1)
        after = run.server(round)
        who = ((federation.level_of(c), c if federation.splitter.by_client else None) for c in cohorts[round])
        cohort = sorted(Counter(who).items())
        holders = [(level, federation.slice(level, round - 1, c), clients) for (level, c), clients in cohort]
        yield round, update_between(before, after, names, holders)


def update_between(before: Server, after: Server, names: Collection[str], holders: Sequence[Holder]) -> Tensors:
    """Returns what a round did to some parameters; one that levels have for themselves is averaged over the holders."""
    private = {name for own in after.private.values() for name in own} & set(names)
    update = {name: after.shared[name] - before.shared[name] for name in names if name not in private}
    mean = Accumulator(before.layout)
    for level, slice_, clients in holders:
        old, new = before.state(level), after.state(level)
        mean.add(Contribution(slice_, slice_.look({name: new[name] - old[name] for name in private}), clients))
    averaged = mean.mean().values
    return update | {name: averaged[name] for name in private if name in averaged}


def layers(run: RecordedRun) -> tuple[Layers, dict[str, dict[int, Shape]]]:
    """Describes the updates of the layers that InCo pairs, in groups of which a shallow and a deep layer moved."""
    group_of = groups_of(run.layout)
    shapes: dict[str, dict[int, Shape]] = {name: {} for name in group_of}
    for round, update in updates(run, group_of, update_rounds(run)):
        for name, value in update.items():
            if shape := describe(value.numpy(), shapes[name].get(round - 1)):
                shapes[name][round] = shape
    compared = {head for name, head in group_of.items() if name != head and shapes[name] and shapes[head]}
    if not compared:
        least = f"at least {LEAST} elements that moved in a round"
        raise RunError(f"{run.path}: no deep layer and its shallow counterpart with {least}")
    records = {name: {round: shape.numbers for round, shape in own.items()} for name, own in shapes.items()}
    return Layers.of({name: head for name, head in group_of.items() if head in compared}, records), shapes


def shallow_smoother(found: Layers, what: str) -> Contest:
    """Tests the paper's observation that updates of shallow layers are smoother than those of deep ones."""
    # A needle and a box are both unlike a bell, so the size of the kurtosis counts.
    return found.shallow_larger(-np.abs(found.numbers[what]), np.median)


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Draws distributions and smoothness of the updates of each run."""
    findings = Findings("updates: share of (deep layer, round) pairs in which the shallow layer's update is smoother")
    for run, (found, shapes) in findings.of_each(runs, layers).items():
        tests = {what: shallow_smoother(found, what) for what in MEASURES}
        shares = {what: cell(test.pairs.share, ".0%") for what, test in tests.items()}
        deep = sum(found.role(name) == "deep" for name in found.group_of)
        row = {"run": run.name, "rounds": found.span, "deep layers": deep} | shares
        findings.row(row | {"p of roughness (layers)": tests["roughness"].layers.p_value})
        chance = {name: floor(int(elements.max())) for name, elements in found.rows("elements").items()}
        findings.json(run, "updates.json", {**found.json(floor=chance), "shallow_smoother": tests})
        draw_ridges(findings.file(run, "updates.png"), found, shapes, run.name)
        title = f"{run.name}: smoothness of aggregated updates, median and middle 80 % of rounds; less is smoother"
        labels = {what: f"{label}\nshallow smoother: {shares[what]} of pairs" for what, label in MEASURES.items()}
        path, marks = findings.file(run, "smoothness.png"), {"normal numbers": chance}
        found.draw(path, title, labels, lambda row: np.quantile(np.abs(row), [0.1, 0.5, 0.9]), marks)
    return findings


def draw_ridges(path: Path, found: Layers, shapes: Mapping[str, Mapping[int, Shape]], name: str) -> None:
    """Draws a ridge for each of the last rounds: shallow layers on the left, deep ones of their group beside them."""
    title = f"{name}: distribution of aggregated updates by round, each scaled to its peak; ticks: 5, 50 and 95 percent"
    heads = evenly(list(dict.fromkeys(found.group_of.values())), MOST_GROUPS)
    lines = [[h, *evenly([n for n, own in found.group_of.items() if own == h and n != h], MOST_DEEP)] for h in heads]
    columns = max(map(len, lines))
    with drawn(path, title, (2.3, 2.3), len(lines) * columns, columns) as panels:
        for at, names in enumerate(lines):
            width = max(float(np.median([shape.numbers["scale"] for shape in shapes[n].values()])) for n in names)
            for axes, layer in zip(panels[at * columns :], names, strict=False):
                kind, rounds = found.role(layer), list(shapes[layer])[-MOST_ROUNDS:]
                for place, shape in enumerate(shapes[layer][round] for round in rounds):
                    top = OVERLAP * shape.counts / shape.counts.max() + place
                    over = 2 * (len(rounds) - place)  # earlier rounds lie in front, at the bottom
                    axes.stairs(top, shape.edges, baseline=place, fill=True, color=LOOKS[kind]["color"], zorder=over)
                    axes.stairs(top, shape.edges, baseline=place, color="white", lw=0.7, zorder=over + 1)
                    axes.vlines(shape.marks[::2], place, place + 0.25, color="black", lw=0.9, zorder=over + 1)
                axes.set(xlim=(-REACH * width, REACH * width), xlabel="change of a weight", ylabel="round")
                axes.set_title(f"{short(layer)}, {kind}", fontsize=8)
                axes.set_yticks(range(len(rounds)), map(str, rounds), fontsize=7)
                axes.ticklabel_format(axis="x", scilimits=(-3, 3))
                axes.locator_params(axis="x", nbins=4)
