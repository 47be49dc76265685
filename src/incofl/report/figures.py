"""The figures of the report as plain numbers; page.js draws them, in colours that suit the page's scheme."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import methodcaller
from statistics import fmean, median
from typing import Any, Literal

from incofl.costs import human
from incofl.engine.run_folder import Row
from incofl.report.runs import Group, Groups, Points, ReportedRun, Series, Unit, interval

NONE = "\N{EN DASH}"
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
    height: int = 340
    range: Sequence[float] | None = None  # of the vertical axis
    bars: Sequence[str] = ()  # their names in order


@dataclass(frozen=True)
class Figure:
    """One or more panels that say one thing."""

    id: str
    title: str
    caption: str  # how to read it
    alt: str  # what it says, for readers who cannot see it
    panels: Sequence[Panel]
    unit: Unit = "number"
    kind: Literal["lines", "bars", "dots"] = "lines"
    x: str = "round"  # label of the horizontal axis
    wide: bool = False


def say(value: float | None, unit: Unit) -> str:
    """Returns a number in words; a dash where there is none."""
    if value is None:
        return NONE
    return human(value, "B") if unit == "bytes" else f"{100 * value:.1f} %" if unit == "percent" else f"{value:.3g}"


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
        seeds = [Group(group.index, group.name(run), [run]) for run in group.runs if group.several]
        main = Group(group.index, f"{group.label}, mean of {len(seeds)}" if seeds else group.label, group.runs)
        for one in [*seeds, main]:
            x, y = one.mean(series)
            if x_of is not None:
                places = dict(zip(*one.mean(x_of), strict=True))
                x = [places[round] for round in x]
            curve = Curve(one.label, group.index, *thinned((x, y), limit), group=group.index, thin=one is not main)
            found.append(curve)
    return [curve for curve in found if curve.x]


def endings(found: Sequence[Curve], unit: Unit) -> str:
    """Returns the last value of each main curve, in words."""
    last = [f"{curve.name} {say(curve.y[-1], unit)} at {curve.x[-1]:g}" for curve in found if not curve.thin]
    return "Last values: " + "; ".join(last) + "." if last else "No values yet."


def in_row(*keys: str) -> Series:
    """Returns the sum of some numbers of each round's record; unknown in a round without them."""
    return lambda run: [None if row[keys[0]] is None else sum(row[key] for key in keys) for row in run.rows]


def over(table: str, key: str, reduce: Callable[[list[float]], float]) -> Series:
    """Returns a number over the mixed tensors (``inco``) or the nodes (``nodes``) of each round's record."""

    def value(row: Row) -> float | None:
        entries = row.get(table) or []
        found = [entry.get(key) for entry in (entries.values() if isinstance(entries, dict) else entries)]
        return float(reduce(known)) if (known := [number for number in found if number is not None]) else None

    return lambda run: map(value, run.rows)


def bytes_so_far(run: ReportedRun) -> Iterable[float]:
    """Returns the bytes up to each round."""
    return accumulate(row["bytes_up"] + row["bytes_down"] for row in run.rows)


METRIC = in_row("accuracy")  # or what takes its place in other tasks
# Figures of one panel with curves, by the section of the page: id, title, caption, value, unit and, unless it is the
# round, what the horizontal axis shows.
CURVES: dict[str, list[tuple[Any, ...]]] = {
    "curves": [
        ("accuracy", "Test {metric}", "Mean of the levels, after each evaluated round.", METRIC, "metric"),
        ("loss", "Training loss", "Mean over the examples, while clients trained on them.", in_row("loss"), "number"),
    ],
    "inco": [
        ("theta", "InCo's theta", "Weight of the shallow layer's update.", over("inco", "theta", fmean), "number"),
        ("beta", "Share of beta > 0", "One half: unrelated updates.", over("inco", "beta_positive", fmean), "percent"),
        ("norm-deep", "Norm of deep updates", "Before mixing.", over("inco", "norm_deep", fmean), "number"),
        ("norm-shallow", "Norm of shallow updates", "Before mixing.", over("inco", "norm_shallow", fmean), "number"),
    ],
    "communication": [
        ("bytes", "Bytes per round", "Down and up, uncompressed.", in_row("bytes_up", "bytes_down"), "bytes"),
        ("bytes-total", "Bytes in total", "Down and up, over the rounds so far.", bytes_so_far, "bytes"),
        ("accuracy-bytes", "Test {metric} by bytes", "By the bytes so far.", METRIC, "metric", bytes_so_far),
        ("seconds", "Seconds per round", "Compare runs on one machine only.", in_row("seconds"), "number"),
    ],
    "fleet": [
        ("slowest", "Seconds of the slowest node", "A round waits for it.", over("nodes", "seconds", max), "number"),
        ("median", "Seconds of the median node", "Of each round.", over("nodes", "seconds", median), "number"),
        ("memory", "Peak memory of a turn", "The largest of a round.", over("nodes", "peak_memory", max), "bytes"),
    ],
}


def draw(groups: Groups) -> dict[str, list[Figure]]:
    """Draws all figures, by the section of the page."""
    single = {section: of_section(section, groups) for section in CURVES}
    return single | {"levels": by_level(groups), "cohorts": [cohorts(groups)]}


def of_section(section: str, groups: Groups) -> list[Figure]:
    """Draws the curves of a section; nothing where no run has values."""
    seeds, found, (metric, its_unit) = " Thin lines are single seeds." * groups.several, [], groups.metric
    for id, title, caption, series, unit, *x_of in CURVES[section]:
        title, unit = title.format(metric=metric), its_unit if unit == "metric" else unit
        if lines := curves(groups, series, *x_of):
            x, alt = "bytes" if x_of else "round", f"Curves of {title}. {endings(lines, unit)}"
            found.append(Figure(id, title, caption + seeds, alt, [Panel(lines, title.lower())], unit, x=x))
    return found


def by_level(groups: Groups) -> list[Figure]:
    """Draws the accuracy (or other metric) of each level: bars of the last evaluations, and curves."""
    columns, said, wide, (metric, unit), how = [], [], len(groups) > 1, groups.metric, groups.measure
    names = {level: f"level {level}" for level in groups.levels}  # the smallest first, whichever run comes first
    for group in groups:
        found = {name: interval(run.tail(level) for run in group.runs) for level, name in names.items()}
        known = {name: one for name, one in found.items() if one is not None}
        half = digits(half or 0.0 for _, half in known.values()) if group.several else None
        means = [mean for mean, _ in known.values()]
        columns.append(Curve(group.label, group.index, list(known), digits(means), half, group.index))
        said.append(f"{group.label}: " + ", ".join(f"{name} {say(mean, unit)}" for name, (mean, _) in known.items()))
    whiskers = " Whiskers: 95 % confidence interval (Student's t over seeds)." * groups.several
    caption, alt = f"Test {metric}, {how}.{whiskers}", f"Bars of the {metric} by level. {'; '.join(said)}."
    y, title = f"test {metric}", f"{metric.capitalize()} by level"
    panels = [Panel(columns, y, range=[0, 1] if unit == "percent" else None, bars=list(names.values()))]
    bars = Figure("levels-last", f"{title}, {how}", caption, alt, panels, unit, "bars", "level", wide)
    lines = {level: curves(groups, methodcaller("level", level)) for level in names}
    alt = " ".join(f"Level {level}: {endings(found, unit)}" for level, found in lines.items())
    if wide:
        values = [value for found in lines.values() for curve in found for value in curve.y] or [0, 1]
        room = 0.05 * (max(values) - min(values))
        same = [max(0, min(values) - room), max(values) + room]
        panels = [Panel(found, y, names[level], 250, same) for level, found in lines.items()]
    else:
        panels = [Panel([Curve(names[k], k, found[-1].x, found[-1].y) for k, found in lines.items() if found], y)]
    note = "Level 0 is the smallest model, the last one the server model."
    return [bars, Figure("levels", f"{title} over the rounds", note, alt, panels, unit, wide=wide)]


def cohorts(groups: Groups) -> Figure:
    """Draws who took part in each round; runs with the same cohorts, as those of one seed have, are drawn once."""
    known = defaultdict[str, list[tuple[Group, ReportedRun]]](list)
    for group, run in groups.pairs:
        known[repr([(row["clients"], row["rejected"]) for row in run.rows])].append((group, run))
    rows = [row for run in groups.runs for row in run.rows]
    counts, rejected = [len(row["clients"]) for row in rows], sum(len(row["rejected"]) for row in rows)
    more = f" The first {SCHEDULES} of {len(known)} different schedules." if len(known) > SCHEDULES else ""
    shared = " Runs of one seed share their cohorts." if len(known) < len(groups.runs) else ""
    caption = f"A mark is a client's turn, coloured by its level; a cross is a rejected upload.{shared}{more}"
    alt = f"Clients by round: {min(counts)} to {max(counts)} uploads a round accepted, {rejected} rejected in all."
    panels = list(map(_turns, list(known.values())[:SCHEDULES]))
    return Figure("cohorts", "Who took part", caption, alt, panels, kind="dots", wide=True)


def _turns(same: Sequence[tuple[Group, ReportedRun]]) -> Panel:
    run, found = same[0][1], defaultdict[int, Points](lambda: ([], []))
    federation = run.federation_or_reason
    step = -(-sum(len(row["clients"]) for row in run.rows) // DOTS)  # of a long run, every second, third, ... round
    for row in run.rows[:: max(1, step)]:
        levels = {c: 0 if isinstance(federation, str) else federation.level_of(c) for c in row["clients"]}
        said = {int(node["client"]): int(node["level"]) for node in row.get("nodes") or [] if "level" in node}
        levels |= {client: level for client, level in said.items() if client in levels}
        for client, level in [*levels.items(), *((int(entry["client"]), BAD) for entry in row["rejected"])]:
            found[level][0].append(row["round"])
            found[level][1].append(client)
    dots = [Curve(f"level {level}", level, *found[level]) for level in sorted(found) if level != BAD]
    dots += [Curve("rejected", BAD, *found[BAD])] if BAD in found else []
    return Panel(dots, "client", ", ".join(group.name(run) for group, run in same), 380)
