"""The tables of the report as HTML: results, similarity, sizes, rejected uploads, nodes, configs and environments."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from statistics import fmean
from typing import Any

from incofl.analysis.runs import plain
from incofl.config import Config
from incofl.costs import human
from incofl.report.figures import NONE, say
from incofl.report.runs import Group, Groups, ReportedRun, Unit, interval

LINES, WHOLE = 200, 40  # longer tables are cut, and say so; longer than the second they scroll
COSTS = ["level", "blocks", "width", "parameters", "MACs", "down a round", "up a round", "training memory", "clients"]
in_bytes = partial(human, unit="B")


def swatch(index: int) -> str:
    """Returns the colour, dash and marker of a group, as its curves have them."""
    use = f'<use href="#dash{index % 6}"/><use href="#mark{index % 7}"/>'
    return f'<svg viewBox="0 0 34 12" aria-hidden="true" style="color:var(--c{index % 7})">{use}</svg>'


def row(cells: Sequence[str], kind: str = "", index: int | None = None) -> str:
    """Returns a row, named by its first cell; ``index`` is its group."""
    first, *rest = map(escape, cells)
    sign, body = "" if index is None else swatch(index), "".join(f"<td>{cell}</td>" for cell in rest)
    return f'<tr class="{kind}"><th scope="row">{sign}{first}</th>{body}</tr>'


def table(label: str, head: Sequence[str], rows: Sequence[str], kind: str = "") -> str:
    """Returns a table that scrolls by itself where it is too wide, by keyboard too; a long one is cut."""
    headings = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    cut = f"<p>The first {LINES} of {len(rows)} lines.</p>" if len(rows) > LINES else ""
    inside = f"<thead><tr>{headings}</tr></thead><tbody>{''.join(rows[:LINES])}</tbody>"
    size = "" if len(rows) > WHOLE else " whole"
    region = f'<div class="scroll{size}" tabindex="0" role="region" aria-label="{escape(label)}">'
    return f'{cut}{region}<table class="{kind}">{inside}</table></div>'


def results(groups: Groups) -> str:
    """Returns a line per run, and one per group of seeds before them: mean ± half width of the 95 % interval."""
    rows, (_, unit), levels = [], groups.metric, groups.levels
    for group in groups:
        if group.several:
            rows.append(row([group.label, *_result(group.runs, levels, unit)], "group", group.index))
        for run in group.runs:
            cells = [f"seed {run.seed}", *_result([run], levels, unit)]
            if group.several:
                rows.append(row(cells, "seed"))
            else:
                rows.append(row([f"{group.label}, {cells[0]}", *cells[1:]], index=group.index))
    head = ["run", "rounds", "last", groups.measure, "best", *(f"level {level}" for level in levels)]
    return table("Results", [*head, "bytes", "time", "rejected", "status"], rows, "dense")


def _result(runs: Sequence[ReportedRun], levels: Sequence[int], unit: Unit) -> list[str]:
    def shown(values: Iterable[float | None]) -> str:
        found = interval(values) or (None, None)
        return " ± ".join(say(value, unit).removesuffix(" %") for value in found if value is not None) or NONE

    of = {key: [run.summary[key] for run in runs] for key in runs[0].summary}
    rounds = " to ".join(map(str, sorted({min(of["rounds"]), max(of["rounds"])})))
    return [
        rounds if len(runs) > 1 else f"{rounds} of {runs[0].values['rounds']}",
        *(shown(of[key]) for key in ("last", "tail", "best")),
        *(shown(run.tail(level) for run in runs) for level in levels),
        in_bytes(fmean(of["bytes"])),
        duration(fmean(of["seconds"])),
        str(sum(of["rejected"])),
        of["status"][0] if len(set(of["status"])) == 1 else f"{of['status'].count('done')} done",
    ]


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def similarity(groups: Groups) -> str:
    """Returns the mean CKA between client models by depth, as ``incofl analyze`` found it; models apart."""
    known: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group in groups:
        for run in group.runs:
            found = run.json("analysis/similarity.json")
            if points := tuple(map(str, found.get("points") or [])):
                deep = (found.get("correlation") or {}).get(points[-1]) or {}
                values = [*(found.get("mean_by_depth") or []), deep.get("pearson")]
                cells = [NONE if value is None else f"{value:.3f}" for value in values]
                known[points].append(row([group.name(run), *cells], index=group.index))
    label = "Mean CKA between client models"
    return "".join(table(label, ["run", *points, "r with accuracy"], rows) for points, rows in known.items())


def sizes(groups: Groups) -> str:
    """Returns what each level is and costs; groups that agree in everything share a table."""
    known, parts = defaultdict[str, list[Group]](list), []
    for group in groups:
        found = group.runs[0].federation_or_reason
        known[found if isinstance(found, str) else repr((found.costs, found.clients_by_level))].append(group)
    for same in known.values():
        names, found = ", ".join(group.label for group in same), same[0].runs[0].federation_or_reason
        if isinstance(found, str):
            parts.append(f"<p>The sizes of {escape(names)} cannot be computed here: {escape(found)}</p>")
            continue
        rows = []
        for cost, count in zip(found.costs, found.clients_by_level, strict=True):
            shape = [str(cost.level), " ".join(map(str, cost.blocks)), f"{cost.width:g}"]
            traffic = [in_bytes(cost.bytes_down), in_bytes(cost.bytes_up), in_bytes(cost.memory)]
            rows.append(row([*shape, f"{cost.parameters:,}", f"{cost.macs:,}", *traffic, str(count)]))
        heading = f"<h3>{escape(names)}</h3>" if len(known) > 1 else ""
        parts.append(heading + table(f"Sizes of {names}", COSTS, rows))
    return "".join(parts)


def rejected(groups: Groups) -> str:
    """Returns every upload that was not accepted, and why."""
    rows = [
        row([group.name(run), str(record["round"]), str(entry["client"]), str(entry["reason"])], index=group.index)
        for group in groups
        for run in group.runs
        for record in run.rows
        for entry in record["rejected"]
    ]
    head = ["run", "round", "client", "reason"]
    return table("Rejected uploads", head, rows, "words") if rows else "<p>No upload was rejected.</p>"


def nodes(groups: Groups) -> str:
    """Returns a line per node and client, over its rounds."""
    found: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for group in groups:
        for node in (node for run in group.runs for record in run.rows for node in record.get("nodes") or []):
            found[group.index, int(node.get("client", -1)), str(node.get("node", NONE))].append(node)
    columns: dict[str, tuple[str, Callable[[list[float]], float], Callable[[float], str]]] = {
        "mean time": ("seconds", fmean, duration),
        "mean CPU time": ("cpu_seconds", fmean, duration),
        "peak memory": ("peak_memory", max, in_bytes),
        "down": ("bytes_down", sum, in_bytes),
        "up": ("bytes_up", sum, in_bytes),
    }
    rows = []
    for (index, client, name), entries in sorted(found.items()):
        cells = [f"client {client}", name, str(len(entries))]
        for key, reduce, form in columns.values():
            values = [float(entry[key]) for entry in entries if entry.get(key) is not None]
            cells.append(form(reduce(values)) if values else NONE)
        rows.append(row(cells, index=index))
    return table("Nodes", ["client", "node", "turns", *columns], rows)


def configs(groups: Groups) -> str:
    """Returns the keys in which the runs differ, or of one run those that are not as by default, and all keys."""
    flat = [run.values for run in groups.runs]
    usual, what = flat[0], "The keys in which the runs differ:"
    if len(flat) == 1:
        usual, what = Config().flat(), "The keys that are not as by default:"
    told = [key for key in flat[0] if any(one.get(key) != usual.get(key) for one in flat)]
    shown = f"<p>{what}</p>{_facts(what, groups, lambda run: run.values, told)}" if told else ""
    every = _facts("All keys", groups, lambda run: run.values, flat[0])
    return f"{shown}<details><summary>All {len(flat[0])} keys</summary>{every}</details>"


def environments(groups: Groups) -> str:
    """Returns what the runs were computed with."""

    def found(run: ReportedRun) -> dict[str, Any]:
        facts = run.json("environment.json")
        again = facts.pop("resumed", [])
        others = [key for key in facts if any(later.get(key) != facts[key] for later in again)]
        return facts | {"resumed": f"{len(again)} times" + (f", with another {', '.join(others)}" if others else "")}

    return _facts("Environment", groups, found, dict.fromkeys(key for run in groups.runs for key in found(run)))


def _facts(label: str, groups: Groups, found: Callable[[ReportedRun], dict[str, Any]], keys: Iterable[str]) -> str:
    """Returns some facts of the runs, a column for each group; those that differ are marked."""
    columns = {group.label: [found(run) for run in group.runs] for group in groups}
    rows = []
    for key in keys:
        values = [list(dict.fromkeys(plain(facts.get(key, NONE)) for facts in column)) for column in columns.values()]
        kind = "differs" if len({value for own in values for value in own}) > 1 else ""
        rows.append(row([key, *map(", ".join, values)], kind))
    return table(label, ["key", *(columns if len(columns) > 1 else ["value"])], rows, "code")


def tiles(groups: Groups) -> str:
    """Returns the numbers of a single run that people look for first."""
    (run,), (metric, unit) = groups.runs, groups.metric
    s = run.summary
    pairs = {
        f"{metric}, {groups.measure}": say(s["tail"], unit),
        f"{metric}, last evaluation": say(s["last"], unit),
        f"best {metric}": say(s["best"], unit),
        f"rounds, {s['status']}": f"{s['rounds']} of {run.values['rounds']}",
        "communication": in_bytes(s["bytes"]),
        "time": duration(s["seconds"]),
    }
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f'<dl class="tiles">{shown}</dl>'
