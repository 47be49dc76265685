"""The figures of the report as plain numbers; page.js draws them, in colours that suit the page's scheme."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import methodcaller
from statistics import fmean, median
from typing import Any, Literal

from incofl.analysis.runs import Group, Groups, Points, RecordedRun, Series, Unit
from incofl.engine.run_folder import Row
from incofl.statistics import estimate

BAD = -1  # the look of what went wrong
DOTS = 4000  # turns of clients that are drawn one by one
SCHEDULES = 4  # panels of cohorts


@dataclass(frozen=True)
class Curve:
    """A curve, a row of bars or some dots."""

    name: str
    look: int  # colour, dash and marker (or pattern) follow from it
    x: Sequence[Any]
    y: Sequence[float]
    half: Sequence[float] | None = None  # half widths of the 95 % confidence intervals
    group: int | None = None  # the button that hides it
    thin: bool = False  # a single seed, behind the mean


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    curves: Sequence[Curve]
    y: str  # label of the vertical axis
    title: str = ""
    bars: Sequence[str] = ()  # their names in order


@dataclass(frozen=True)
class Figure:
    """One or more panels that say one thing."""

    id: str
    title: str
    caption: str  # how to read it
    panels: Sequence[Panel]
    unit: Unit = "number"
    kind: Literal["lines", "bars", "dots"] = "lines"
    x: str = "round"  # label of the horizontal axis


def digits(values: Iterable[float]) -> list[float]:
    """Rounds to five digits: more cannot be seen, and weigh."""
    return [float(f"{value:.5g}") for value in values]


def thinned(points: Points, limit: int) -> Points:
    """Returns at most about ``limit`` points, evenly, the last one among them."""
    x, y = points
    keep = range(len(x) - 1, -1, -max(1, -(-len(x) // limit)))[::-1]
    return [x[i] for i in keep], digits(y[i] for i in keep)


def curves(groups: Groups, series: Series, x_of: Series | None = None) -> list[Curve]:
    """Makes a curve for each group over the rounds, or over another value of a round.

    Of several seeds it is their mean, with each seed as a thin line behind it.
    """
    limit, found = max(60, min(400, 6000 // len(groups.runs))), []  # keeps the page light
    for group in groups:
        seeds = [Group(group.index, group.label_of(run), [run]) for run in group.runs if group.several]
        main = Group(group.index, f"{group.label}, mean of {len(seeds)}" if seeds else group.label, group.runs)
        for one in [*seeds, main]:
            x, y = one.mean(series)
            if x_of is not None:
                places = dict(zip(*one.mean(x_of), strict=True))
                x = [places[round] for round in x]
            found.append(Curve(one.label, one.index, *thinned((x, y), limit), group=one.index, thin=one is not main))
    return [curve for curve in found if curve.x]


def over(table: str, reduce: Callable[[list[float]], float], *keys: str) -> Series:
    """Returns a number over values of each round's record, of its mixed tensors (``inco``) or of its ``nodes``."""

    def value(row: Row) -> float | None:
        entries = (row.get(table) or []) if table else [row]
        entries = entries.values() if isinstance(entries, dict) else entries
        known = [entry[key] for entry in entries for key in keys if entry.get(key) is not None]
        return float(reduce(known)) if known else None

    return lambda run: map(value, run.rows)


def bytes_so_far(run: RecordedRun) -> Iterable[float]:
    """Returns the bytes up to each round."""
    return accumulate(row["bytes_up"] + row["bytes_down"] for row in run.rows)


METRIC = over("", sum, "accuracy")  # or what takes its place in other tasks
# Figures of one panel with curves, by the section of the page: id, title, caption, value, unit and, unless it is the
# round, what the horizontal axis shows.
CURVES: dict[str, list[tuple[Any, ...]]] = {
    "curves": [
        ("accuracy", "Test {metric}", "Mean of the levels, after each evaluated round.", METRIC, "metric"),
        ("loss", "Training loss", "Mean over examples, while clients train on them.", over("", sum, "loss"), "number"),
    ],
    "inco": [
        ("theta", "InCo's theta", "Weight of the shallow layer's update.", over("inco", fmean, "theta"), "number"),
        ("beta", "Share of beta > 0", "One half: unrelated updates.", over("inco", fmean, "beta_positive"), "percent"),
        ("norm-deep", "Norm of deep updates", "Before mixing.", over("inco", fmean, "norm_deep"), "number"),
        ("norm-shallow", "Norm of shallow updates", "Before mixing.", over("inco", fmean, "norm_shallow"), "number"),
    ],
    "communication": [
        ("bytes", "Bytes per round", "Down and up, uncompressed.", over("", sum, "bytes_up", "bytes_down"), "bytes"),
        ("bytes-total", "Bytes in total", "Down and up, over the rounds so far.", bytes_so_far, "bytes"),
        ("accuracy-bytes", "Test {metric} by bytes", "By the bytes so far.", METRIC, "metric", bytes_so_far),
        ("seconds", "Seconds per round", "Compare runs on one machine only.", over("", sum, "seconds"), "number"),
    ],
    "fleet": [
        ("slowest", "Seconds of the slowest node", "A round waits for it.", over("nodes", max, "seconds"), "number"),
        ("median", "Seconds of the median node", "Of each round.", over("nodes", median, "seconds"), "number"),
        ("memory", "Peak memory of a turn", "The largest of a round.", over("nodes", max, "peak_memory"), "bytes"),
    ],
}


def of_section(section: str, groups: Groups) -> list[Figure]:
    """Draws the curves of a section; nothing where no run has values."""
    seeds, found, (metric, its_unit) = " Thin lines are single seeds." * groups.several, [], groups.metric
    for id, title, caption, series, unit, *x_of in CURVES[section]:
        title, unit = title.format(metric=metric), its_unit if unit == "metric" else unit
        if lines := curves(groups, series, *x_of):
            panels, x = [Panel(lines, title.lower())], "bytes" if x_of else "round"
            found.append(Figure(id, title, caption + seeds, panels, unit, x=x))
    return found


def by_level(groups: Groups) -> list[Figure]:
    """Draws the accuracy (or other metric) of each level: bars of the last evaluations, and curves."""
    columns, (metric, unit), how = [], groups.metric, groups.measure
    names = {level: groups.called(level) for level in groups.levels}  # the smallest first, whichever run comes first
    for group in groups:
        known = {name: one for k, name in names.items() if (one := estimate(run.tail(k) for run in group.runs))}
        half = digits(one.half_width or 0.0 for one in known.values()) if group.several else None
        means = digits(one.mean for one in known.values())
        columns.append(Curve(group.label, group.index, list(known), means, half, group.index))
    whiskers = " Whiskers: 95 % confidence interval (Student's t over seeds)." * groups.several
    y, title = f"test {metric}", f"{metric.capitalize()} by level"
    panels = [Panel(columns, y, bars=list(names.values()))]
    bars = Figure("levels-last", f"{title}, {how}", f"Test {metric}, {how}.{whiskers}", panels, unit, "bars", "level")
    lines = {level: curves(groups, methodcaller("level", level)) for level in names}
    if len(groups) > 1:
        panels = [Panel(found, y, names[level]) for level, found in lines.items()]
    else:
        panels = [Panel([Curve(names[k], k, found[-1].x, found[-1].y) for k, found in lines.items() if found], y)]
    note = "The first is the smallest model, the last the server model."
    return [bars, Figure("levels", f"{title} over the rounds", note, panels, unit)]


def cohorts(groups: Groups) -> Figure:
    """Draws who took part in each round; runs with the same cohorts, as those of one seed have, are drawn once."""
    known = defaultdict[str, list[RecordedRun]](list)
    for run in groups.runs:
        known[repr([(row["clients"], row["rejected"]) for row in run.rows])].append(run)
    shared = " Runs of one seed share their cohorts." * (len(known) < len(groups.runs))
    more = f" The first {SCHEDULES} of {len(known)} different schedules." * (len(known) > SCHEDULES)
    caption = f"A mark is a client's turn, coloured by its level; a cross is a rejected upload.{shared}{more}"
    shown = list(known.values())[:SCHEDULES]
    panels = [_turns(same[0], ", ".join(groups.labels[run][0] for run in same)) for same in shown]
    return Figure("cohorts", "Who took part", caption, panels, kind="dots")


def _turns(run: RecordedRun, title: str) -> Panel:
    turns, dots = [], []
    federation = run.federation_or_reason
    step = -(-sum(len(row["clients"]) for row in run.rows) // DOTS)  # of a long run, every second, third, ... round
    for row in run.rows[:: max(1, step)]:
        levels = {c: 0 if isinstance(federation, str) else federation.level_of(c) for c in row["clients"]}
        told = {int(node["client"]): int(node["level"]) for node in row.get("nodes") or [] if "level" in node}
        turns += [(told.get(client, level), row["round"], client) for client, level in levels.items()]
        turns += [(BAD, row["round"], int(entry["client"])) for entry in row["rejected"]]
    for look in sorted({turn[0] for turn in turns}, key=lambda look: (look == BAD, look)):
        own = [turn for turn in turns if turn[0] == look]
        name = "rejected" if look == BAD else f"level {look}"
        dots.append(Curve(name, look, [round for _, round, _ in own], [client for *_, client in own]))
    return Panel(dots, "client", title)
