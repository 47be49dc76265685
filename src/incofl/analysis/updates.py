"""The aggregated updates of a run: what its rounds did to shallow and deep layers.

The update of a round is the difference of the recorded server states before and after it; the paper calls it gradient.
It needs states of consecutive rounds: ``record.every = 1``, or ``record.window`` for some of them. Where levels keep a
layer for themselves (all of ``fedavg``'s), the update is the mean of what the levels see, at every position over the
clients of the cohort that hold it.

The layers are those that InCo pairs: ``Layout.shallow`` says for each deep layer which shallow one of the same shape
belongs to it. All that share one are a group: a stage of a ResNet, a block of a ViT.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from incofl.aggregate import Accumulator, Contribution
from incofl.analysis.analyze import Findings, NotRecordedError, Options, cell, evenly, own
from incofl.analysis.plots import DEEP, SHALLOW, Axes, draw_ranges, drawn, finish_layers, short
from incofl.analysis.runs import RecordedRun
from incofl.analysis.smoothness import LEAST, REACH, Array, Shape, describe, floor, quantiles, step
from incofl.engine.build import build_splitter, client_levels
from incofl.errors import RunError
from incofl.layout import Layout
from incofl.methods import find_method
from incofl.server import Server
from incofl.split import Slice, Splitter
from incofl.statistics import SignTest, sign_test
from incofl.tensors import Tensors

# Less is smoother, for each of these measures; with their labels in figures.
MEASURES = {
    "roughness": "roughness (extra peaks)",
    "kurtosis": "size of excess kurtosis",
    "step": "change of shape in a round ($W_1$)",
    "width": "change of width in a round (|log$_2$|)",
}
NUMBERS = ("elements", "roughness", "kurtosis", "mean", "deviation", "quantiles")
MOST_GROUPS, MOST_DEEP, MOST_ROUNDS = 4, 4, 11  # of ridges; the paper shows the rounds 40 to 50
OVERLAP = 1.7  # height of a ridge in distances of two
TITLE = "updates: share of (deep layer, round) pairs in which the shallow layer's update is smoother"
HEADINGS = ["run", "rounds", "deep layers", *MEASURES, "p of roughness (layers)"]


def groups_of(layout: Layout) -> dict[str, str]:
    """Maps each layer that InCo pairs to the shallow one of its group; group by group, the shallow one first."""
    groups: dict[str, list[str]] = {}
    for deep, shallow in layout.shallow.items():
        groups.setdefault(shallow, [shallow]).append(deep)
    return {name: shallow for shallow, names in groups.items() for name in names}


def update_rounds(run: RecordedRun) -> list[int]:
    """Returns the rounds whose update is known: the states before and after them were recorded."""
    rounds = [round for round in run.recorded if round - 1 in run.recorded]
    if not rounds:
        raise NotRecordedError(
            f"{run.path}: no states of two consecutive rounds were recorded, which the analysis of updates needs; "
            "run it with --set record.every=1 (or record.window)"
        )
    return rounds


def updates(run: RecordedRun, names: Collection[str], rounds: Sequence[int]) -> Iterator[tuple[int, Tensors]]:
    """Yields the aggregated updates of some parameters, round by round; each state is read once."""
    cohorts = {row["round"]: row["clients"] for row in run.rows}
    splitter = build_splitter(run.config, run.model)
    after: Server | None = None
    for round in rounds:
        before = after if after is not None and after.round == round - 1 else run.server(round - 1)
        after = run.server(round)
        yield round, update_between(before, after, names, _holders(run, splitter, cohorts[round], round))


def update_between(
    before: Server, after: Server, names: Collection[str], holders: Mapping[int, tuple[Slice, int]]
) -> Tensors:
    """Returns what a round did to some parameters; one that levels have for themselves is averaged over the holders.

    ``holders`` has for each level of the cohort its slice and its number of clients.
    """
    private = {name for own in after.private.values() for name in own} & set(names)
    update = {name: after.shared[name] - before.shared[name] for name in names if name not in private}
    mean = Accumulator(before.layout)
    for level, (slice_, clients) in holders.items():
        old, new = before.state(level), after.state(level)
        mean.add(Contribution(slice_, slice_.look({name: new[name] - old[name] for name in private}), clients))
    averaged = mean.mean().values
    return update | {name: averaged[name] for name in private if name in averaged}


def _holders(run: RecordedRun, splitter: Splitter, clients: Sequence[int], round: int) -> dict[int, tuple[Slice, int]]:
    """Returns for each level of a cohort its slice and its number of clients; needs no data files."""
    levels = client_levels(run.config, len(splitter.depths))
    fixed = {"smallest": 0, "largest": len(splitter.depths) - 1}.get(find_method(run.config.method).level)
    cohort = Counter(levels[client] if fixed is None else fixed for client in clients)
    return {level: (splitter.slice(run.layout, level, round - 1), count) for level, count in sorted(cohort.items())}


@dataclass(frozen=True)
class Layer:
    """The updates of one layer by round; rounds in which nobody trained it are left out."""

    group: str  # the shallow layer that it belongs to; itself if it is one
    shapes: dict[int, Shape]
    steps: dict[int, float]  # how far the shape of its distribution is from that of the round before
    widths: dict[int, float]  # size of the base-2 logarithm of its width over that of the round before

    @property
    def floor(self) -> float:
        """The roughness that as many normal numbers have by chance."""
        return floor(max(shape.elements for shape in self.shapes.values()))

    def measure(self, what: str) -> dict[int, float]:
        """Returns one of ``MEASURES`` by round."""
        if what in ("step", "width"):
            return self.steps if what == "step" else self.widths
        # A needle and a box are both unlike a bell, so the size of the kurtosis counts.
        return {round: abs(float(getattr(shape, what))) for round, shape in self.shapes.items()}


def layers(run: RecordedRun) -> dict[str, Layer]:
    """Describes the updates of the layers that InCo pairs, in groups of which a shallow and a deep layer moved."""
    found = {name: Layer(group, {}, {}, {}) for name, group in groups_of(run.layout).items()}
    last: dict[str, Array] = {}
    for round, update in updates(run, found, update_rounds(run)):
        for name, value in update.items():
            if (described := describe(value.numpy())) is None:
                continue
            layer, (shape, z) = found[name], described
            now = quantiles(z)
            if round - 1 in layer.shapes:
                layer.steps[round] = step(last[name], now)
                layer.widths[round] = abs(math.log2(shape.scale / layer.shapes[round - 1].scale))
            layer.shapes[round], last[name] = shape, now
    known = {name: layer for name, layer in found.items() if layer.shapes}
    compared = {layer.group for name, layer in known.items() if name != layer.group and layer.group in known}
    if not compared:
        least = f"at least {LEAST} elements that moved in a round"
        raise RunError(f"{run.path}: no deep layer and its shallow counterpart with {least}")
    return {name: layer for name, layer in known.items() if layer.group in compared}


@dataclass(frozen=True)
class Contest:
    """How often the shallow layer of a group has a larger value than a deep one."""

    pairs: SignTest  # over pairs of a deep layer and a round; rounds are not independent, so its p-value is too small
    layers: SignTest  # the careful test: a deep layer has one vote
    by_group: dict[str, float]  # the share of pairs
    lowest_above_highest: dict[str, bool]  # in each group, over all rounds and deep layers


def shallow_larger(
    values: Mapping[str, Mapping[int, float]], group_of: Mapping[str, str], vote: Callable[[list[float]], Any]
) -> Contest:
    """Compares the shallow layer of each group with its deep ones, round by round; ``vote`` sums up the rounds."""
    lead: dict[str, list[float]] = {}
    above: dict[str, bool] = {}
    for name, deep in values.items():
        shallow = values.get(group_of[name], {})
        gaps = [shallow[round] - value for round, value in deep.items() if round in shallow]
        if name != group_of[name] and gaps:
            lead[name] = gaps
            above[group_of[name]] = above.get(group_of[name], True) and min(shallow.values()) > max(deep.values())
    by_group = {head: [gap > 0 for name in lead if group_of[name] == head for gap in lead[name]] for head in above}
    return Contest(
        pairs=sign_test([gap for gaps in lead.values() for gap in gaps]),
        layers=sign_test([float(vote(gaps)) for gaps in lead.values()]),
        by_group={head: float(np.mean(wins)) for head, wins in by_group.items()},
        lowest_above_highest=above,
    )


def shallow_smoother(found: Mapping[str, Layer], what: str) -> Contest:
    """Tests the paper's observation that updates of shallow layers are smoother than those of deep ones."""
    values = {name: {round: -value for round, value in layer.measure(what).items()} for name, layer in found.items()}
    return shallow_larger(values, {name: layer.group for name, layer in found.items()}, np.median)


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Draws distributions and smoothness of the updates of each run."""
    findings = Findings(TITLE, [HEADINGS])
    for run, found in findings.of_each(runs, layers).items():
        rounds, tests = update_rounds(run), {what: shallow_smoother(found, what) for what in MEASURES}
        described = {name: _described(name, layer) for name, layer in found.items()}
        numbers = {"rounds": rounds, "layers": described, "shallow_smoother": tests}
        findings.json(own(run, "updates.json"), numbers)
        draw_ridges(findings.file(own(run, "updates.png")), found, run.name)
        draw_smoothness(findings.file(own(run, "smoothness.png")), found, tests, run.name)
        deep = sum(layer.group != name for name, layer in found.items())
        shares = [cell(test.pairs.share, ".0%") for test in tests.values()]
        p_value = cell(tests["roughness"].layers.p_value)
        findings.table.append([run.name, f"{rounds[0]}-{rounds[-1]}", str(deep), *shares, p_value])
    return findings


def _described(name: str, layer: Layer) -> dict[str, Any]:
    numbers = {key: [getattr(shape, key) for shape in layer.shapes.values()] for key in NUMBERS}
    numbers |= {"step": [layer.steps.get(round) for round in layer.shapes]}
    numbers |= {"width": [layer.widths.get(round) for round in layer.shapes], "rounds": list(layer.shapes)}
    return {"group": layer.group, "role": role(name, layer.group), "floor": layer.floor, **numbers}


def role(name: str, group: str) -> str:
    """Returns what a layer is in its group."""
    return "shallow" if name == group else "deep"


def draw_ridges(path: Path, found: Mapping[str, Layer], name: str) -> None:
    """Draws a ridge for each of the last rounds: shallow layers on the left, deep ones of their group beside them."""
    heads = evenly(list(dict.fromkeys(layer.group for layer in found.values())), MOST_GROUPS)
    lines = [[g, *evenly([n for n in found if found[n].group == g and n != g], MOST_DEEP)] for g in heads]
    columns = max(map(len, lines))
    title = f"{name}: distribution of aggregated updates by round, each scaled to its peak; ticks: 5, 50 and 95 percent"
    with drawn(path, 2.3 * columns + 0.6, 2.3 * len(lines) + 0.6, title) as figure:
        grid = figure.subplots(len(lines), columns, squeeze=False)
        for row, names in zip(grid, lines, strict=True):
            width = max(float(np.median([shape.scale for shape in found[n].shapes.values()])) for n in names)
            for axes, layer in zip(row, names, strict=False):
                _ridges(axes, found[layer], (SHALLOW if layer == names[0] else DEEP)["color"])
                axes.set_title(f"{short(layer)}, {role(layer, names[0])}", fontsize=8)
                axes.set_xlim(-REACH * width, REACH * width)
                axes.set_xlabel("change of a weight" if names is lines[-1] else "")
            for unused in row[len(names) :]:
                unused.remove()
            row[0].set_ylabel("round")


def _ridges(axes: Axes, layer: Layer, fill: str) -> None:
    rounds = list(layer.shapes)[-MOST_ROUNDS:]
    for place, round in enumerate(rounds):
        shape = layer.shapes[round]
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


def draw_smoothness(path: Path, found: Mapping[str, Layer], tests: Mapping[str, Contest], name: str) -> None:
    """Draws each layer's median over the rounds, with the middle 80 percent of them; less is smoother."""
    title = f"{name}: smoothness of aggregated updates, median and middle 80 % of rounds; less is smoother"
    with drawn(path, 12.5, 0.22 * len(found) + 1.8, title) as figure:
        for axes, what in zip(figure.subplots(1, len(MEASURES), sharey=True), MEASURES, strict=True):
            values = {layer: list(entry.measure(what).values()) for layer, entry in found.items()}
            ranges = {layer: np.quantile(own, [0.1, 0.5, 0.9]).tolist() for layer, own in values.items() if own}
            draw_ranges(axes, {layer: entry.group for layer, entry in found.items()}, ranges)
            share = tests[what].pairs.share
            axes.set_title("" if share is None else f"shallow smoother: {share:.0%} of pairs")
            axes.set_xlabel(MEASURES[what])
        finish_layers(figure, list(found), {layer: entry.floor for layer, entry in found.items()}, "normal numbers")
