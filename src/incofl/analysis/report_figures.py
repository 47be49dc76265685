"""The report's figures as plain values that plotly.js draws: curves over the rounds, sizes, and bytes.

A colour is the name of a CSS variable such as ``--c0``: the page puts in what suits its light or dark scheme.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from incofl.analysis.report_runs import Group, ReportedRun, Value
from incofl.costs import human
from incofl.engine.records import Row

Trace = dict[str, Any]

COLOURS = 7  # --c0 to --c6 in report.css
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")
# Up to so many points of a curve are marked; more would hide the line.
MARKED = 30

PERCENT = {"tickformat": "~%", "hoverformat": ".1%"}
BYTES = {"tickformat": "~s", "hoverformat": ".3s", "ticksuffix": "B"}
SI = {"tickformat": "~s", "hoverformat": ".3s"}
ROUNDS = {"title": {"text": "round"}, "hoverformat": "d"}


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    data: list[Trace]
    layout: dict[str, Any]
    title: str = ""
    height: int = 340


@dataclass(frozen=True)
class Figure:
    """One or more panels that say one thing.

    Attributes:
        id: of the element.
        title: what is shown.
        caption: how to read it.
        alt: what it says, for who cannot see it.
        panels: next to each other where there is room.
        unit: of the values in the table below it: ``percent``, ``bytes`` or ``number``.
        width: least width of a panel in pixels.
        table: ``wide`` (a row per x, a column per curve), ``long`` (a row per point) or ``matrix`` (a heat map as it
            is).
    """

    id: str
    title: str
    caption: str
    alt: str
    panels: list[Panel]
    unit: Literal["percent", "bytes", "number"] = "number"
    width: int = 320
    table: Literal["wide", "long", "matrix"] = "wide"
    wide: bool = field(default=False)


def style(index: int, points: int, width: float = 2.4) -> Trace:
    """Colour, dash and marker of a curve: told apart by any of the three."""
    return {
        "mode": "lines+markers" if points <= MARKED else "lines",
        "line": {"color": f"--c{index % COLOURS}", "dash": DASHES[index % len(DASHES)], "width": width},
        "marker": {"color": f"--c{index % COLOURS}", "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 6},
    }


def line(name: str, points: tuple[Sequence[float], Sequence[float]], index: int, **more: Any) -> Trace:
    """A curve."""
    x, y = points
    return {"type": "scatter", "name": name, "x": list(x), "y": rounded(y), **style(index, len(x)), **more}


def rounded(values: Sequence[float]) -> list[float]:
    """Five digits: more cannot be seen, and weigh."""
    return [float(f"{value:.5g}") for value in values]


def thinned(points: tuple[Sequence[float], Sequence[float]], limit: int) -> tuple[list[float], list[float]]:
    """At most about so many points, evenly, the last one among them."""
    x, y = points
    step = max(1, -(-len(x) // limit))
    keep = range(len(x) - 1, -1, -step)[::-1]
    return [x[i] for i in keep], [y[i] for i in keep]


def point_limit(groups: Sequence[Group]) -> int:
    """Points of a curve such that many runs do not make a heavy page."""
    return max(60, min(400, 6000 // sum(len(group.runs) for group in groups)))


def curves(groups: Sequence[Group], value_of: Callable[[ReportedRun], Value]) -> list[Trace]:
    """A curve for each group; of several seeds their mean, with each seed as a thin line behind it."""
    limit, traces = point_limit(groups), []
    for group in groups:
        if len(group.runs) == 1:
            points = thinned(group.runs[0].points(value_of(group.runs[0])), limit)
            traces.append(line(group.label, points, group.index, meta={"group": group.index}))
            continue
        for run in group.runs:
            traces.append(thin(group, run, thinned(run.points(value_of(run)), limit)))
        mean = thinned(group.mean(value_of), limit)
        name = f"{group.label}, mean of {len(group.runs)}"
        traces.append(line(name, mean, group.index, meta={"group": group.index}))
    return [trace for trace in traces if trace["x"]]


def thin(group: Group, run: ReportedRun, points: tuple[list[float], list[float]]) -> Trace:
    """One seed, behind the mean."""
    look = {"mode": "lines", "line": {"color": f"--c{group.index % COLOURS}", "width": 1}, "opacity": 0.4}
    trace = line(group.name(run), points, group.index, meta={"group": group.index}) | look
    return trace | {"hoverinfo": "skip", "showlegend": False}


def mean_accuracy(row: Row) -> float | None:
    """That of the levels; unknown in a round without evaluation."""
    value: float | None = row["accuracy"]
    return value


def endings(traces: Sequence[Trace], say: Callable[[float], str]) -> str:
    """The last value of each main curve, in words."""
    last = [f"{t['name']} {say(t['y'][-1])} at {t['x'][-1]:g}" for t in traces if t.get("hoverinfo") != "skip"]
    return "Last values: " + "; ".join(last) + "." if last else "No values yet."


def percent(value: float) -> str:
    """An accuracy."""
    return f"{100 * value:.1f} %"


def in_bytes(value: float) -> str:
    """A size."""
    return human(value, "B")


def number(value: float) -> str:
    """Anything else."""
    return f"{value:.3g}"


def over_rounds(title: str, **axis: Any) -> dict[str, Any]:
    """The axes of a curve over the rounds."""
    return {"hovermode": "x unified", "xaxis": ROUNDS, "yaxis": {"title": {"text": title}, **axis}}


def accuracy(groups: Sequence[Group]) -> Figure:
    """Mean accuracy of the levels over the rounds."""
    traces = curves(groups, lambda run: mean_accuracy)
    seeds = " Thin lines are single seeds." if any(len(group.runs) > 1 for group in groups) else ""
    return Figure(
        "accuracy",
        "Test accuracy",
        "Mean of the levels, after each evaluated round." + seeds,
        f"Curves of the test accuracy over the rounds. {endings(traces, percent)}",
        [Panel(traces, over_rounds("test accuracy", **PERCENT))],
        "percent",
    )


def loss(groups: Sequence[Group]) -> Figure:
    """Training loss over the rounds."""
    traces = curves(groups, lambda run: lambda row: row["loss"])
    return Figure(
        "loss",
        "Training loss",
        "Mean over the examples that the clients of a round trained on, while they trained.",
        f"Curves of the training loss over the rounds. {endings(traces, number)}",
        [Panel(traces, over_rounds("training loss", rangemode="tozero"))],
    )


def by_level(groups: Sequence[Group]) -> list[Figure]:
    """Accuracy of each level: curves, and the means of the last ten rounds."""
    levels = sorted({level for group in groups for run in group.runs for level in run.levels})
    limit = point_limit(groups)
    if len(groups) == 1:
        (group,) = groups
        found = {level: thinned(group.mean(level_value(level)), limit) for level in levels}
        traces = [line(f"level {level}", points, level) for level, points in found.items() if points[0]]
        panels = [Panel(traces, over_rounds("test accuracy", **PERCENT) | {"showlegend": True})]
        alt = endings(traces, percent)
    else:
        data = {level: curves(groups, level_value(level)) for level in levels}
        values = [y for traces in data.values() for trace in traces for y in trace["y"]]
        top = max(values, default=1)
        low = min(values, default=0)
        y = {**PERCENT, "range": [max(0, low - 0.05 * (top - low)), top + 0.05 * (top - low)]}
        panels = [
            Panel(traces, over_rounds("test accuracy", **y), f"level {level}", 250) for level, traces in data.items()
        ]
        alt = " ".join(f"Level {level}: {endings(traces, percent)}" for level, traces in data.items())
    note = "Level 0 is the smallest model, the last level the whole server model."
    several = any(len(group.runs) > 1 for group in groups)
    bars = [_bars(group, levels, single=len(groups) == 1) for group in groups]
    said = "; ".join(
        f"{bar['name']}: " + ", ".join(f"{x} {percent(y)}" for x, y in zip(bar["x"], bar["y"], strict=True))
        for bar in bars
    )
    y_axis = {"title": {"text": "test accuracy"}, **PERCENT, "range": [0, 1]}
    layout = {"barmode": "group", "xaxis": {"type": "category"}, "yaxis": y_axis}
    return [
        Figure(
            "levels-last-ten",
            "Accuracy by level, last ten rounds",
            "Mean of the evaluations in the last ten rounds."
            + (" Whiskers: 95 % interval over the seeds." if several else ""),
            f"Bars of the accuracy by level. {said}.",
            [Panel(bars, layout, height=300 if len(groups) > 1 else 340)],
            "percent",
            wide=len(groups) > 1,
        ),
        Figure(
            "levels",
            "Accuracy by level over the rounds",
            note
            + (" All panels have the same axes." if len(groups) > 1 else " Means over the seeds." if several else ""),
            f"Curves of the test accuracy of each level over the rounds. {alt}",
            panels,
            "percent",
            width=290 if len(groups) > 1 else 320,
            wide=len(groups) > 1,
        ),
    ]


def level_value(level: int) -> Callable[[ReportedRun], Value]:
    """The accuracy of a level in any run."""
    return lambda run: run.level(level)


def _tail(level: int) -> Callable[[ReportedRun], float | None]:
    return lambda run: run.last_ten(run.level(level))


PATTERNS = ("", "/", ".", "x", "\\", "-", "+")


def bar_marker(index: int) -> dict[str, Any]:
    """Colour and pattern of a bar: told apart by either."""
    shape = PATTERNS[index % len(PATTERNS)]
    pattern = {"shape": shape, "fillmode": "overlay", "fgcolor": "--surface", "size": 7, "solidity": 0.25}
    return {"color": f"--c{index % COLOURS}", "pattern": pattern}


def _bars(group: Group, levels: Sequence[int], single: bool) -> Trace:
    spreads = {level: group.spread(_tail(level)) for level in levels}
    known = {level: spread for level, spread in spreads.items() if spread is not None}
    colour = [f"--c{level % COLOURS}" for level in known] if single else f"--c{group.index % COLOURS}"
    trace: Trace = {
        "type": "bar",
        "name": group.label,
        "x": [f"level {level}" for level in known],
        "y": rounded([mean for mean, _ in known.values()]),
        "marker": bar_marker(0 if single else group.index) | {"color": colour},
        "meta": {"group": group.index},
    }
    if len(group.runs) > 1:
        deviations = rounded([half or 0.0 for _, half in known.values()])
        trace["error_y"] = {"type": "data", "array": deviations, "color": "--text", "thickness": 1.4, "width": 4}
    return trace
