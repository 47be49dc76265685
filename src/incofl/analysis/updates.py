"""The aggregated updates of a run: what its rounds did to shallow and deep layers.

The update of a round is the difference of the recorded server states before and after it; the paper calls it gradient.
It needs states of consecutive rounds: ``record.every = 1``, or ``record.window`` for some of them. Where levels keep a
layer for themselves (all of ``fedavg``'s), the update is the mean of what the levels see, at every position over the
clients of the cohort that hold it.

The layers are those that InCo pairs: ``Layout.shallow`` says for each deep layer which shallow one of the same shape
belongs to it. All that share one are a group: a stage of a ResNet, a block of a ViT.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from incofl.aggregate import Accumulator, Contribution
from incofl.analysis.analyze import Findings, NotRecordedError, Options, cell, evenly, own
from incofl.analysis.layers import Array, Contest, Layers, Record, groups_of, role
from incofl.analysis.plots import DEEP, SHALLOW, Axes, draw_ranges, drawn, finish_layers, short
from incofl.analysis.runs import RecordedRun
from incofl.analysis.smoothness import LEAST, QUANTILES, REACH, Shape, describe, floor, quantiles, step
from incofl.engine.build import build_method, build_splitter, client_levels
from incofl.errors import RunError
from incofl.server import Server
from incofl.split import Slice
from incofl.tensors import Tensors

# Less is smoother, for each of these measures; with their labels in figures.
MEASURES = {
    "roughness": "roughness (extra peaks)",
    "kurtosis": "size of excess kurtosis",
    "step": "change of shape in a round ($W_1$)",
    "width": "change of width in a round (|log$_2$|)",
}
NUMBERS = ("elements", "roughness", "kurtosis", "mean", "deviation", "scale")
MOST_GROUPS, MOST_DEEP, MOST_ROUNDS = 4, 4, 11  # of ridges; the paper shows the rounds 40 to 50
OVERLAP = 1.7  # height of a ridge in distances of two
TITLE = "updates: share of (deep layer, round) pairs in which the shallow layer's update is smoother"
HEADINGS = ["run", "rounds", "deep layers", *MEASURES, "p of roughness (layers)"]


def update_rounds(run: RecordedRun) -> list[int]:
    """Returns the rounds whose update is known: the states before and after them were recorded."""
    rounds = [round for round in run.recorded if round - 1 in run.recorded]
    if not rounds:
        raise NotRecordedError(
            f"{run.path}: no states of two consecutive rounds were recorded, which the analysis of updates needs; "
            "run it with --set record.every=1 (or record.window)"
        )
    return rounds


Holder = tuple[int, Slice, int]  # a level, its slice, and the number of clients of the cohort that hold it


def updates(run: RecordedRun, names: Collection[str], rounds: Sequence[int]) -> Iterator[tuple[int, Tensors]]:
    """Yields the aggregated updates of some parameters, round by round; each state is read once, no data files."""
    cohorts, method = {row["round"]: row["clients"] for row in run.rows}, build_method(run.config)
    splitter = build_splitter(run.config, run.model, method)
    levels, last = client_levels(run.config, len(splitter.depths)), len(splitter.depths) - 1
    fixed = {"own": None, "smallest": 0}.get(method.level, last)
    after: Server | None = None
    for round in rounds:
        before = after if after is not None and after.round == round - 1 else run.server(round - 1)
        after = run.server(round)
        cohort = [(levels[c] if fixed is None else fixed, c if splitter.by_client else None) for c in cohorts[round]]
        slices = {key: splitter.slice(run.layout, key[0], round - 1, key[1]) for key in sorted(set(cohort))}
        holders = [(key[0], slice_, cohort.count(key)) for key, slice_ in slices.items()]
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
    group_of, last = groups_of(run.layout), dict[str, Array]()
    shapes: dict[str, dict[int, Shape]] = {name: {} for name in group_of}
    records: dict[str, dict[int, Record]] = {name: {} for name in group_of}
    for round, update in updates(run, group_of, update_rounds(run)):
        for name, value in update.items():
            if (described := describe(value.numpy())) is None:
                continue
            (shape, z), before = described, shapes[name].get(round - 1)
            now, change, width = quantiles(z), math.nan, math.nan
            if before is not None:
                change, width = step(last[name], now), abs(math.log2(shape.scale / before.scale))
            shapes[name][round], last[name] = shape, now
            numbers = {key: float(getattr(shape, key)) for key in NUMBERS} | {"step": change, "width": width}
            spread = {f"quantile_{at:g}": value for at, value in zip(QUANTILES, shape.quantiles, strict=True)}
            records[name][round] = numbers | spread
    compared = {head for name, head in group_of.items() if name != head and shapes[name] and shapes[head]}
    if not compared:
        least = f"at least {LEAST} elements that moved in a round"
        raise RunError(f"{run.path}: no deep layer and its shallow counterpart with {least}")
    return Layers.of({name: head for name, head in group_of.items() if head in compared}, records), shapes


def shallow_smoother(found: Layers, what: str) -> Contest:
    """Tests the paper's observation that updates of shallow layers are smoother than those of deep ones."""
    # A needle and a box are both unlike a bell, so the size of the kurtosis counts.
    return found.shallow_larger(-np.abs(found.numbers[what]), np.median)


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Draws distributions and smoothness of the updates of each run."""
    findings = Findings(TITLE, [HEADINGS])
    for run, (found, shapes) in findings.of_each(runs, layers).items():
        tests = {what: shallow_smoother(found, what) for what in MEASURES}
        chance = {name: floor(int(elements.max())) for name, elements in found.rows("elements").items()}
        findings.json(own(run, "updates.json"), {**found.json(floor=chance), "shallow_smoother": tests})
        draw_ridges(findings.file(own(run, "updates.png")), found.group_of, shapes, run.name)
        draw_smoothness(findings.file(own(run, "smoothness.png")), found, tests, chance, run.name)
        deep = sum(name != head for name, head in found.group_of.items())
        shares = [cell(test.pairs.share, ".0%") for test in tests.values()]
        rounds, p_value = f"{found.rounds[0]}-{found.rounds[-1]}", cell(tests["roughness"].layers.p_value)
        findings.table.append([run.name, rounds, str(deep), *shares, p_value])
    return findings


def draw_ridges(path: Path, group_of: Mapping[str, str], shapes: Mapping[str, Mapping[int, Shape]], name: str) -> None:
    """Draws a ridge for each of the last rounds: shallow layers on the left, deep ones of their group beside them."""
    heads = evenly(list(dict.fromkeys(group_of.values())), MOST_GROUPS)
    lines = [[h, *evenly([n for n, own in group_of.items() if own == h and n != h], MOST_DEEP)] for h in heads]
    columns = max(map(len, lines))
    title = f"{name}: distribution of aggregated updates by round, each scaled to its peak; ticks: 5, 50 and 95 percent"
    with drawn(path, 2.3 * columns + 0.6, 2.3 * len(lines) + 0.6, title) as figure:
        grid = figure.subplots(len(lines), columns, squeeze=False)
        for row, names in zip(grid, lines, strict=True):
            width = max(float(np.median([shape.scale for shape in shapes[n].values()])) for n in names)
            for axes, layer in zip(row, names, strict=False):
                _ridges(axes, shapes[layer], (SHALLOW if layer == names[0] else DEEP)["color"])
                axes.set_title(f"{short(layer)}, {role(layer, names[0])}", fontsize=8)
                axes.set_xlim(-REACH * width, REACH * width)
                axes.set_xlabel("change of a weight" if names is lines[-1] else "")
            for unused in row[len(names) :]:
                unused.remove()
            row[0].set_ylabel("round")


def _ridges(axes: Axes, shapes: Mapping[int, Shape], fill: str) -> None:
    rounds = list(shapes)[-MOST_ROUNDS:]
    for place, shape in enumerate(shapes[round] for round in rounds):
        edges, heights = shape.edges(), OVERLAP * shape.counts / shape.counts.max()
        over = 2 * (len(rounds) - place)  # earlier rounds lie in front, at the bottom
        axes.fill_between(edges, place, place + np.append(heights, 0), step="post", color=fill, lw=0, zorder=over)
        axes.stairs(heights + place, edges, baseline=place, color="white", lw=0.7, zorder=over + 1)
        axes.vlines(shape.quantiles[::2], place, place + 0.25, color="black", lw=0.9, zorder=over + 1)
    axes.set_yticks(range(len(rounds)), [str(round) for round in rounds], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.locator_params(axis="x", nbins=4)
    axes.ticklabel_format(axis="x", scilimits=(-3, 3))
    axes.xaxis.get_offset_text().set_fontsize(7)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(-0.2, len(rounds) - 1 + OVERLAP + 0.1)


def draw_smoothness(
    path: Path, found: Layers, tests: Mapping[str, Contest], chance: Mapping[str, float], name: str
) -> None:
    """Draws each layer's median over the rounds, with the middle 80 percent of them; less is smoother."""
    title = f"{name}: smoothness of aggregated updates, median and middle 80 % of rounds; less is smoother"
    with drawn(path, 12.5, 0.22 * len(chance) + 1.8, title) as figure:
        for axes, what in zip(figure.subplots(1, len(MEASURES), sharey=True), MEASURES, strict=True):
            values = found.rows(what).items()
            ranges = {layer: np.quantile(np.abs(own), [0.1, 0.5, 0.9]).tolist() for layer, own in values}
            draw_ranges(axes, found.group_of, ranges)
            share = tests[what].pairs.share
            axes.set_title("" if share is None else f"shallow smoother: {share:.0%} of pairs")
            axes.set_xlabel(MEASURES[what])
        finish_layers(figure, chance, "normal numbers")
