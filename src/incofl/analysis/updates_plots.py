"""The figures of updates: ridges of their distributions, their smoothness, their similarity across environments."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from incofl.analysis.environments import STATISTICS, Layers, normalised, over_rounds, relations
from incofl.analysis.plots import colour, drawn, marker, panels
from incofl.analysis.smoothness import REACH
from incofl.analysis.trials import Correlation
from incofl.analysis.updates import MEASURES, Layer, Smoother

SHALLOW, DEEP = colour(0), colour(1)
MOST_GROUPS = 4  # of ridges under each other
MOST_DEEP = 4  # beside each other
MOST_ROUNDS = 11  # as the paper's rounds 40 to 50
OVERLAP = 1.7  # height of a ridge in distances of two

LABELS = {
    "roughness": "roughness (extra peaks)",
    "kurtosis": "size of excess kurtosis",
    "step": "change of shape in a round ($W_1$)",
    "width": "change of width in a round (|log$_2$|)",
    "mean": "size of the mean",
    "variance": "variance",
    "covariance": "covariance",
    "difference": "mean size of the difference",
}


def short(name: str) -> str:
    """A layer's name in figures."""
    return name.removesuffix(".weight")


def spaced(values: Sequence[str], most: int) -> list[str]:
    """At most so many of them, evenly, the first and the last among them."""
    places = np.unique(np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int))
    return [values[place] for place in places]


def draw_ridges(path: Path, found: Mapping[str, Layer], name: str) -> None:
    """A ridge for each of the last rounds: shallow layers on the left, deep ones of the same group beside them."""
    shown = spaced(list(dict.fromkeys(layer.group for layer in found.values() if layer.group in found)), MOST_GROUPS)
    rows = {g: [g, *spaced([n for n in found if found[n].group == g and n != g], MOST_DEEP)] for g in shown}
    columns = max(map(len, rows.values()))
    title = f"{name}: distribution of aggregated updates by round, each scaled to its peak; ticks: 5, 50 and 95 percent"
    with drawn(path, 2.3 * columns + 0.6, 2.3 * len(rows) + 0.6, title) as figure:
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for line, names in zip(grid, rows.values(), strict=True):
            for axes, layer in zip(line, names, strict=False):
                _ridges(axes, found[layer], SHALLOW if layer == names[0] else DEEP)
                axes.set_title(f"{short(layer)}, {'shallow' if layer == names[0] else 'deep'}", fontsize=8)
            width = max(float(np.median([s.scale for s in found[n].shapes.values()])) for n in names)
            for axes in line[: len(names)]:
                axes.set_xlim(-REACH * width, REACH * width)
            for unused in line[len(names) :]:
                unused.remove()
            line[0].set_ylabel("round")
        for axes in grid[-1][: len(names)]:
            axes.set_xlabel("change of a weight")


def _ridges(axes: Axes, layer: Layer, fill: str) -> None:
    rounds = list(layer.shapes)[-MOST_ROUNDS:]
    for place, round in enumerate(rounds):
        shape = layer.shapes[round]
        edges, heights = shape.edges(), OVERLAP * shape.counts / shape.counts.max()
        over = len(rounds) - place  # earlier rounds lie in front, at the bottom
        axes.fill_between(edges, place, place + np.append(heights, 0), step="post", color=fill, lw=0, zorder=2 * over)
        axes.stairs(heights + place, edges, baseline=place, color="white", lw=0.7, zorder=2 * over + 1)
        axes.vlines(shape.quantiles[::2], place, place + 0.25, color="black", lw=0.9, zorder=2 * over + 1)
    axes.set_yticks(range(len(rounds)), [str(round) for round in rounds], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.locator_params(axis="x", nbins=4)
    axes.ticklabel_format(axis="x", scilimits=(-3, 3))
    axes.xaxis.get_offset_text().set_fontsize(7)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(-0.2, len(rounds) - 1 + OVERLAP + 0.1)


def draw_smoothness(path: Path, found: Mapping[str, Layer], tests: Mapping[str, Smoother], name: str) -> None:
    """Each layer's median over the rounds, with the middle 80 percent of them; less is smoother."""
    title = f"{name}: smoothness of aggregated updates, median and middle 80 % of rounds; less is smoother"
    with drawn(path, 12.5, 0.22 * len(found) + 1.8, title) as figure:
        row = figure.subplots(1, len(MEASURES), sharey=True)
        for axes, what in zip(row, MEASURES, strict=True):
            for place, (layer, entry) in enumerate(found.items()):
                if values := list(entry.measure(what).values()):
                    _range(axes, place, values, layer == entry.group)
                if what == "roughness":
                    axes.plot(entry.floor, place, "|", color="black", ms=9, mew=1.4)
            share = tests[what].pairs.share
            axes.set_title("" if share is None else f"shallow smoother: {share:.0%} of pairs")
            axes.set_xlabel(LABELS[what])
        handles = [*_roles(), Line2D([], [], ls="", marker="|", ms=9, mew=1.4, color="black", label="normal numbers")]
        _layer_axis(row[0], list(found), handles)


def _range(axes: Axes, place: int, values: Sequence[float], shallow: bool, full: bool = False) -> None:
    """A dot in the middle of a bar."""
    low, high = np.quantile(values, [0, 1] if full else [0.1, 0.9])
    hue, shape = (SHALLOW, marker(0)) if shallow else (DEEP, marker(1))
    axes.hlines(place, low, high, color=hue, lw=2, alpha=0.45)
    axes.plot(np.mean(values) if full else np.median(values), place, shape, color=hue, ms=5)


def _roles() -> list[Line2D]:
    return [
        Line2D([], [], ls="", marker=marker(0), color=SHALLOW, label="shallow layer"),
        Line2D([], [], ls="", marker=marker(1), color=DEEP, label="deep layer"),
    ]


def _layer_axis(axes: Axes, names: Sequence[str], handles: list[Line2D]) -> None:
    """Layers from top to bottom, and what the marks mean."""
    axes.set_yticks(range(len(names)), [short(name) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def draw_environments(path: Path, found: Layers, group_of: Mapping[str, str], title: str) -> None:
    """CKA between the updates of two runs for each layer: lowest, mean and highest round."""
    with drawn(path, 8, 0.24 * len(found) + 1.9, title) as figure:
        plain, debiased = figure.subplots(1, 2, sharey=True)
        for place, (name, pairs) in enumerate(found.items()):
            for axes, what in ((plain, "cka"), (debiased, "debiased")):
                if values := [value for pair in pairs.values() if (value := getattr(pair, what)) is not None]:
                    _range(axes, place, values, name == group_of[name], full=True)
            plain.plot(over_rounds(pairs, "chance"), place, "|", color="black", ms=9, mew=1.4)
        plain.set_xlabel("CKA of updates: lowest, mean, highest round")
        debiased.set_xlabel("the same, debiased (unrelated: 0)")
        debiased.axvline(0, color="black", lw=0.8)
        handles = [
            *_roles(),
            Line2D([], [], ls="", marker="|", ms=9, mew=1.4, color="black", label="the same with rows shuffled"),
        ]
        _layer_axis(plain, list(found), handles)


def draw_relations(path: Path, found: Layers, group_of: Mapping[str, str], title: str) -> None:
    """CKA against statistics of the updates, both divided by the smallest in their group: a point is a layer."""
    similarity, measured = normalised(found, group_of, "cka"), relations(found, group_of)
    heads = list(dict.fromkeys(group_of[name] for name in found))
    with drawn(path, 2.5 * len(STATISTICS), 3.2, title) as figure:
        for axes, what in zip(panels(figure, len(STATISTICS), len(STATISTICS)), STATISTICS, strict=True):
            values = normalised(found, group_of, what)
            for name in (name for name in similarity if name in values):
                place = heads.index(group_of[name])
                filled = colour(place) if name == group_of[name] else "none"
                axes.plot(values[name], similarity[name], marker(place), mec=colour(place), mfc=filled, mew=1.3, ms=6)
            axes.set_title(_coefficients(measured[what]))
            axes.set_xlabel(f"{LABELS[what].partition(' (')[0]}\n(smallest of its group = 1)")
        figure.axes[0].set_ylabel("CKA (smallest of its group = 1)")
        handles = [
            Line2D([], [], ls="", marker=marker(place), color=colour(place), label=short(head))
            for place, head in enumerate(heads[:8])
        ]
        handles.append(Line2D([], [], ls="", marker="o", mec="black", mfc="none", label="hollow: deep layers"))
        figure.legend(handles=handles, loc="outside lower center", ncols=5)


def _coefficients(found: Correlation) -> str:
    if found.pearson is None or found.spearman is None:
        return f"{found.points} layers"
    return f"r = {found.pearson:+.2f}, $\\rho$ = {found.spearman:+.2f}"
