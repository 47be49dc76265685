"""The figures of similarity: by depth, as heat maps, and against accuracy."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from incofl.analysis.plots import HEAT, colour, drawn, marker, panels
from incofl.analysis.similarity import Similarity

MOST_ROWS = 6  # of heat maps under each other


def draw_by_depth(path: Path, found: Similarity, name: str) -> None:
    """One run: mean CKA at each point over all pairs, over those of one level and of two, and without bias."""
    lines = {
        "all pairs": found.mean_by_depth,
        "same level": found.within_level,
        "different levels": found.between_levels,
        "all pairs, debiased": found.debiased_by_depth,
    }
    title = f"{name}: similarity of {len(found.clients)} clients' models after round {found.round}"
    with drawn(path, 6.4, 3.6, title) as figure:
        axes = figure.subplots()
        for place, (label, values) in enumerate(lines.items()):
            if any(value is not None for value in values):
                dashes = "--" if place == 3 else "-"
                axes.plot(*_known(values), dashes, color=colour(place), marker=marker(place), label=label)
        _depth_axis(axes, found.points)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_groups_by_depth(path: Path, groups: Mapping[str, Sequence[Similarity]]) -> None:
    """Several settings: mean CKA over all pairs, a line each, with a band that spans the seeds."""
    seeds = max(map(len, groups.values()))
    with drawn(path, 7.2, 3.8, "similarity of clients' models" + ("; bands span the seeds" * (seeds > 1))) as figure:
        axes = figure.subplots()
        points = shared_points([members[0] for members in groups.values()])
        for place, (label, members) in enumerate(groups.items()):
            values = by_depth(members)
            name = f"{label} ({len(members)} seeds)" if seeds > 1 else label
            axes.plot(*_known(_mean(values)), color=colour(place), marker=marker(place), label=name)
            if len(members) > 1:
                depth = np.flatnonzero(np.isfinite(values).all(0))
                low, high = values[:, depth].min(0), values[:, depth].max(0)
                axes.fill_between(depth, low, high, color=colour(place), alpha=0.15, lw=0)
        _depth_axis(axes, points)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_heat_maps(path: Path, found: Mapping[str, Similarity]) -> None:
    """CKA of every pair of clients, a panel for each point; several runs under each other."""
    shown = dict(list(found.items())[:MOST_ROWS])
    one = len(shown) == 1
    most = max(len(entry.points) for entry in shown.values())
    columns = min(most, 4) if one else most
    rows = -(-most // columns) if one else len(shown)
    label, first = next(iter(shown.items()))
    title = f"CKA of every pair of clients after round {first.round}" + (f", {label}" if one else "")
    with drawn(path, max(1.9 * columns + 1.2, 5), 2.0 * rows + 0.9, title) as figure:
        if one:
            cells = [(axes, point) for axes, point in zip(panels(figure, most, columns), range(most), strict=True)]
            images = [_heat(axes, first, point, first.points[point]) for axes, point in cells]
            drawn_axes = [axes for axes, _ in cells]
        else:
            grid = figure.subplots(rows, columns, squeeze=False)
            images, drawn_axes = [], list(grid.flat)
            for line, (name, entry) in zip(grid, shown.items(), strict=True):
                for point, axes in enumerate(line):
                    if point < len(entry.points):
                        images.append(_heat(axes, entry, point, f"{name}: {entry.points[point]}"))
                    else:
                        axes.remove()
                        drawn_axes.remove(axes)
        figure.colorbar(images[0], ax=drawn_axes, label="CKA", shrink=0.8)
        _outer_labels(figure)


def draw_against_accuracy(path: Path, groups: Mapping[str, Sequence[Similarity]]) -> None:
    """Mean CKA against test accuracy over the recorded rounds, a panel for each point; seeds share a colour."""
    points = shared_points([members[0] for members in groups.values()])
    alone = next(iter(groups.values()))[0] if sum(map(len, groups.values())) == 1 else None
    columns = min(len(points), 4)
    width, height = max(2.3 * columns + (0.3 if alone else 1.8), 6.2), 2.3 * -(-len(points) // columns) + 0.9
    title = "similarity of clients' models against accuracy, by recorded round; scales differ"
    with drawn(path, width, height, title) as figure:
        for point, axes in enumerate(panels(figure, len(points), columns)):
            for place, (label, members) in enumerate(groups.items()):
                seen = [
                    (then.accuracy, then.mean_by_depth[point])
                    for member in members
                    for then in member.evaluated
                    if point < len(member.points) and then.mean_by_depth[point] is not None
                ]
                if seen:
                    axes.plot(*np.array(seen).T, marker(place), color=colour(place), alpha=0.8, label=label)
            axes.set_title(points[point] + (_coefficient(alone, point) if alone else ""))
            axes.locator_params(axis="x", nbins=4)
        figure.supxlabel("test accuracy, mean of the levels", fontsize=9)
        figure.supylabel("mean CKA over all pairs", fontsize=9)
        if not alone:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside right center")


def shared_points(found: Sequence[Similarity]) -> Sequence[str]:
    """What the points are called in a figure of several models: their numbers, where their names differ."""
    longest = max((entry.points for entry in found), key=len)
    if all(entry.points == longest[: len(entry.points)] for entry in found):
        return longest
    return [str(number) for number in range(1, len(longest) + 1)]


def by_depth(members: Sequence[Similarity]) -> np.ndarray:
    """Mean CKA by seed and point; of points that all have."""
    points = min(len(member.points) for member in members)
    return np.array([member.mean_by_depth[:points] for member in members], dtype=float)


def _mean(values: np.ndarray) -> list[float | None]:
    """Over the seeds, at each point."""
    return [float(np.nanmean(column)) if np.isfinite(column).any() else None for column in values.T]


def _known(values: Sequence[float | None]) -> tuple[list[int], list[float]]:
    pairs = [(place, value) for place, value in enumerate(values) if value is not None]
    return [place for place, _ in pairs], [value for _, value in pairs]


def _depth_axis(axes: Axes, points: Sequence[str]) -> None:
    axes.set_xticks(range(len(points)), points, rotation=0 if len(points) < 7 else 40)
    axes.set(xlabel="where the models are compared, from shallow to deep", ylabel="mean CKA", ylim=(0, 1.02))


def _heat(axes: Axes, found: Similarity, point: int, title: str) -> AxesImage:
    """One panel; white lines lie between levels, which are named at their middle."""
    image = axes.imshow(found.cka[point], vmin=0, vmax=1, cmap=HEAT)
    levels = [member.level for member in found.clients]
    middles = {level: float(np.mean([i for i, own in enumerate(levels) if own == level])) for level in set(levels)}
    axes.set_xticks(list(middles.values()), [str(level) for level in middles])
    axes.set_yticks(list(middles.values()), [str(level) for level in middles])
    for place in range(1, len(levels)):
        if levels[place] != levels[place - 1]:
            axes.axhline(place - 0.5, color="white", lw=0.8)
            axes.axvline(place - 0.5, color="white", lw=0.8)
    axes.grid(visible=False)
    axes.set_title(title)
    return image


def _outer_labels(figure: Figure) -> None:
    figure.supxlabel("clients, by level", fontsize=9)
    figure.supylabel("clients, by level", fontsize=9)


def _coefficient(found: Similarity, point: int) -> str:
    """The correlation at a point, to be written beside its name."""
    known = found.correlation[found.points[point]]["pearson"]
    return f": r = {known:.2f}" if known is not None else ""
