"""The report's tables: results, sizes, rejected uploads, nodes, configs and environments."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import Any

from incofl.analysis.report_figures import percent
from incofl.analysis.report_page import Cells, scroll, table
from incofl.analysis.report_runs import Group, ReportedRun, Sizes, plain
from incofl.config import Config
from incofl.costs import human

NONE = "\N{EN DASH}"
# Longer tables are cut, and say so.
LINES = 200


def results(groups: Sequence[Group]) -> str:
    """A line per run, and one per group of seeds before them."""
    levels = sorted({level for group in groups for run in group.runs for level in run.levels})
    rows: list[Cells] = []
    for group in groups:
        several = len(group.runs) > 1
        if several:
            rows.append(Cells([group.label, *_mean_line(group, levels)], "group", group.index))
        for run in group.runs:
            seed = f"seed {run.config.seed}"
            name = [seed] if several else [f"{group.label}, {seed}"]
            rows.append(Cells([*name, *_run_line(run, levels)], *(("seed",) if several else ("", group.index))))
    head = ["run", "rounds", "last", "last ten", "best", *(f"level {level}" for level in levels)]
    return scroll(table([*head, "bytes", "time", "rejected", "status"], rows, "dense"), "Results", whole=True)


def _known(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}"


def _run_line(run: ReportedRun, levels: Sequence[int]) -> list[str]:
    s = run.summary
    return [
        f"{s['rounds']} of {run.config.rounds}",
        *(_known(s["accuracy"]), _known(s["accuracy_last_ten"]), _known(s["accuracy_best"])),
        *(_known(run.last_ten(run.level(level))) for level in levels),
        *(human(s["bytes_up"] + s["bytes_down"], "B"), duration(s["seconds"]), str(s["rejected"]), s["status"]),
    ]


def _mean_line(group: Group, levels: Sequence[int]) -> list[str]:
    def over(value: Callable[[ReportedRun], float | None]) -> str:
        spread = group.spread(value)
        if spread is None:
            return NONE
        mean, half = spread
        return f"{100 * mean:.1f}" + ("" if half is None else f" ± {100 * half:.1f}")

    def mean(key: str) -> float:
        return fmean(run.summary[key] for run in group.runs)

    def total(key: str) -> Callable[[ReportedRun], float | None]:
        return lambda run: run.summary[key]

    def level(number: int) -> Callable[[ReportedRun], float | None]:
        return lambda run: run.last_ten(run.level(number))

    rounds = sorted({run.summary["rounds"] for run in group.runs})
    done = sum(run.status == "done" for run in group.runs)
    return [
        " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))),
        *(over(total(key)) for key in ("accuracy", "accuracy_last_ten", "accuracy_best")),
        *(over(level(number)) for number in levels),
        *(human(mean("bytes_up") + mean("bytes_down"), "B"), duration(mean("seconds"))),
        *(
            str(sum(run.summary["rejected"] for run in group.runs)),
            "done" if done == len(group.runs) else f"{done} done",
        ),
    ]


def duration(seconds: float) -> str:
    """In the unit that suits."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def sizes(groups: Sequence[Group]) -> str:
    """What each level is and costs; groups that agree in everything share a table."""
    known: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        known[repr(group.sizes)].append(group)
    parts = []
    for same in known.values():
        names, found = ", ".join(group.label for group in same), same[0].sizes
        if isinstance(found, str):
            parts.append(f"<p>The sizes of {escape(names)} cannot be computed here: {escape(found)}</p>")
            continue
        parts.append((f"<h3>{escape(names)}</h3>" if len(known) > 1 else "") + _size_table(found, names))
    return "".join(parts)


def _size_table(found: Sizes, names: str) -> str:
    head = [
        "level",
        "blocks",
        "width",
        "parameters",
        "MACs",
        "down a round",
        "up a round",
        "training memory",
        "clients",
    ]
    rows = [
        Cells(
            [
                *(str(cost.level), " ".join(map(str, cost.blocks)), f"{cost.width:g}", f"{cost.parameters:,}"),
                *(f"{cost.macs:,}", human(cost.bytes_down, "B"), human(cost.bytes_up, "B"), human(cost.memory, "B")),
                str(count),
            ]
        )
        for cost, count in zip(found.costs, found.clients, strict=True)
    ]
    return scroll(table(head, rows), f"Sizes of {names}", whole=True)


def rejected(groups: Sequence[Group]) -> str:
    """Every upload that was not taken, and why."""
    rows = [
        Cells([group.name(run), str(row["round"]), str(entry["client"]), str(entry["reason"])], swatch=group.index)
        for group in groups
        for run in group.runs
        for row in run.rows
        for entry in row["rejected"]
    ]
    if not rows:
        return "<p>No upload was rejected.</p>"
    cut = f"<p>The first {LINES} of {len(rows)} rejected uploads.</p>" if len(rows) > LINES else ""
    return cut + scroll(table(["run", "round", "client", "reason"], rows[:LINES], text=(3,)), "Rejected uploads")


def nodes(groups: Sequence[Group]) -> str:
    """A line per node and client, over its rounds."""
    found: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for group in groups:
        for run in group.runs:
            for row in run.rows:
                for node in row.get("nodes") or []:
                    key = group.index, int(node.get("client", -1)), str(node.get("node", NONE))
                    found[key].append(node)
    if not found:
        return ""

    def over(entries: list[dict[str, Any]], key: str, reduce: Callable[[list[float]], float]) -> float | None:
        values = [float(entry[key]) for entry in entries if entry.get(key) is not None]
        return reduce(values) if values else None

    def said(value: float | None, say: Callable[[float], str]) -> str:
        return NONE if value is None else say(value)

    rows = []
    for (index, client, node), entries in sorted(found.items()):
        cells = [f"client {client}", node, str(len(entries))]
        cells += [said(over(entries, key, fmean), duration) for key in ("seconds", "cpu_seconds")]
        cells += [said(over(entries, "peak_memory", max), lambda v: human(v, "B"))]
        cells += [said(over(entries, key, sum), lambda v: human(v, "B")) for key in ("bytes_down", "bytes_up")]
        rows.append(Cells(cells, swatch=index))
    head = ["client", "node", "turns", "mean time", "mean CPU time", "peak memory", "down", "up"]
    cut = f"<p>The first {LINES} of {len(rows)} nodes.</p>" if len(rows) > LINES else ""
    return cut + scroll(table(head, rows[:LINES], text=(1,)), "Nodes")


def configs(groups: Sequence[Group]) -> str:
    """The keys in which the runs differ, and all keys."""
    flat = [[run.config.flat() for run in group.runs] for group in groups]
    keys = list(dict.fromkeys(key for runs in flat for run in runs for key in run))

    def cells(key: str) -> list[str]:
        return [", ".join(dict.fromkeys(plain(run.get(key, "")) for run in runs)) for runs in flat]

    head = ["key", *(group.label for group in groups)] if len(groups) > 1 else ["key", "value"]
    differing = [key for key in keys if len({plain(run.get(key, "")) for runs in flat for run in runs}) > 1]
    text = range(1, len(head))
    if sum(len(group.runs) for group in groups) > 1:
        told, what = differing, "The keys in which the runs differ:"
    else:
        usual = Config().flat()
        told, what = [key for key in keys if flat[0][0][key] != usual.get(key)], "The keys that are not as by default:"
    rows = [Cells([key, *cells(key)], "differs" if key in differing else "") for key in told]
    said = f"<p>{what}</p>{scroll(table(head, rows, 'code', text), what, whole=True)}" if rows else ""
    every = [Cells([key, *cells(key)], "differs" if key in differing else "") for key in keys]
    note = " (those that differ are marked)" if differing else ""
    return (
        f"{said}<details><summary>All {len(keys)} keys{note}</summary>"
        f"{scroll(table(head, every, 'code', text), 'All keys')}</details>"
    )


def environments(groups: Sequence[Group]) -> str:
    """What the runs were computed with; runs that agree share a column."""
    known: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for group in groups:
        for run in group.runs:
            facts = {key: value for key, value in run.environment.items() if key != "resumed"}
            again = run.environment.get("resumed") or []
            others = [key for key in facts if any(later.get(key) != facts[key] for later in again)]
            facts["resumed"] = f"{len(again)} times" + (f", with another {', '.join(others)}" if others else "")
            known.setdefault(repr(facts), (facts, []))[1].append(group.name(run))
    columns = list(known.values())
    keys = list(dict.fromkeys(key for facts, _ in columns for key in facts))
    total = sum(len(names) for _, names in columns)
    heads = ["value"] if len(columns) == 1 else [_some(names) for _, names in columns]
    rows = []
    for key in keys:
        values = [plain(facts.get(key, NONE)) for facts, _ in columns]
        rows.append(Cells([key, *values], "differs" if len(set(values)) > 1 else ""))
    said = "<p>The same for all runs.</p>" if total > 1 and len(columns) == 1 else ""
    return said + scroll(
        table(["environment", *heads], rows, "code", range(1, len(heads) + 1)), "Environment", whole=True
    )


def _some(names: Sequence[str]) -> str:
    return "; ".join(names) if len(names) < 4 else f"{names[0]}; {names[1]}; {len(names) - 2} more"


def _percent(value: float | None) -> str:
    return NONE if value is None else percent(value)


def tiles(run: ReportedRun) -> str:
    """The numbers of a single run that people look for first."""
    s = run.summary
    pairs = [
        (_percent(s["accuracy_last_ten"]), "accuracy, last ten rounds"),
        (_percent(s["accuracy"]), "accuracy, last evaluation"),
        (_percent(s["accuracy_best"]), "best accuracy"),
        (f"{s['rounds']} of {run.config.rounds}", f"rounds, {s['status']}"),
        (human(s["bytes_up"] + s["bytes_down"], "B"), "communication"),
        (duration(s["seconds"]), "time"),
    ]
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{escape(d)}</dt><dd>{escape(v)}</dd></div>" for v, d in pairs)
        + "</dl>"
    )
