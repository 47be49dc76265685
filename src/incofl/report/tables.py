"""The tables of the report as HTML: results, similarity, sizes, rejected uploads, nodes, configs and environments."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import fmean
from typing import Any

from incofl.analysis.runs import plain
from incofl.config import Config
from incofl.costs import human
from incofl.report.figures import NONE, Unit, metric_of, say
from incofl.report.runs import Group, ReportedRun, Sizes, interval, measure

LINES, WHOLE = 200, 40  # longer tables are cut, and say so; longer than the second they scroll


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


def results(groups: Sequence[Group]) -> str:
    """Returns a line per run, and one per group of seeds before them: mean ± half width of the 95 % interval."""
    levels = sorted({level for group in groups for run in group.runs for level in run.levels})
    rows, (_, unit) = [], metric_of(groups)
    for group in groups:
        several = len(group.runs) > 1
        if several:
            rows.append(row([group.label, *_result(group, levels, unit)], "group", group.index))
        for run in group.runs:
            name = f"seed {run.seed}" if several else f"{group.label}, seed {run.seed}"
            cells = _result(Group(group.index, name, [run]), levels, unit)
            rows.append(row([name, *cells], "seed" if several else "", None if several else group.index))
    head = ["run", "rounds", "last", measure(groups), "best", *(f"level {level}" for level in levels)]
    return table("Results", [*head, "bytes", "time", "rejected", "status"], rows, "dense")


def _result(group: Group, levels: Sequence[int], unit: Unit) -> list[str]:
    summaries = [run.summary for run in group.runs]

    def shown(values: Iterable[float | None]) -> str:
        if (found := interval(values)) is None:
            return NONE
        return " ± ".join(say(value, unit).removesuffix(" %") for value in found if value is not None)

    rounds = " to ".join(
        str(n) for n in sorted({min(s["rounds"] for s in summaries), max(s["rounds"] for s in summaries)})
    )
    states = [str(s["status"]) for s in summaries]
    status = states[0] if len(set(states)) == 1 else f"{states.count('done')} done"
    return [
        rounds if len(group.runs) > 1 else f"{rounds} of {group.runs[0].values['rounds']}",
        *(shown(summary[key] for summary in summaries) for key in ("last", "tail", "best")),
        *(shown(run.tail(level) for run in group.runs) for level in levels),
        human(fmean(s["bytes"] for s in summaries), "B"),
        duration(fmean(s["seconds"] for s in summaries)),
        str(sum(s["rejected"] for s in summaries)),
        status,
    ]


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def similarity(groups: Sequence[Group]) -> str:
    """Returns the mean CKA between client models by depth, as ``incofl analyze`` found it; models apart."""
    known: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group in groups:
        for run in group.runs:
            found = run.json("analysis/similarity.json")
            points, means = [str(point) for point in found.get("points") or []], found.get("mean_by_depth") or []
            deep = (found.get("correlation") or {}).get(points[-1] if points else "") or {}
            cells = [NONE if value is None else f"{value:.3f}" for value in [*means, deep.get("pearson")]]
            if points:
                known[tuple(points)].append(row([group.name(run), *cells], index=group.index))
    label = "Mean CKA between client models"
    return "".join(table(label, ["run", *points, "r with accuracy"], rows) for points, rows in known.items())


def sizes(groups: Sequence[Group]) -> str:
    """Returns what each level is and costs; groups that agree in everything share a table."""
    known: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        known[repr(group.sizes)].append(group)
    parts = []
    for same in known.values():
        names, found = ", ".join(group.label for group in same), same[0].sizes
        if isinstance(found, Sizes):
            parts.append((f"<h3>{escape(names)}</h3>" if len(known) > 1 else "") + _size_table(found, names))
        else:
            parts.append(f"<p>The sizes of {escape(names)} cannot be computed here: {escape(found)}</p>")
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
    rows = []
    for cost, count in zip(found.costs, found.clients, strict=True):
        in_bytes = [human(value, "B") for value in (cost.bytes_down, cost.bytes_up, cost.memory)]
        shape = [str(cost.level), " ".join(map(str, cost.blocks)), f"{cost.width:g}"]
        rows.append(row([*shape, f"{cost.parameters:,}", f"{cost.macs:,}", *in_bytes, str(count)]))
    return table(f"Sizes of {names}", head, rows)


def rejected(groups: Sequence[Group]) -> str:
    """Returns every upload that was not accepted, and why."""
    every = [(group, run, record) for group in groups for run in group.runs for record in run.rows]
    rows = [
        row([group.name(run), str(record["round"]), str(e["client"]), str(e["reason"])], index=group.index)
        for group, run, record in every
        for e in record["rejected"]
    ]
    head = ["run", "round", "client", "reason"]
    return table("Rejected uploads", head, rows, "words") if rows else "<p>No upload was rejected.</p>"


def nodes(groups: Sequence[Group]) -> str:
    """Returns a line per node and client, over its rounds."""
    found: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for group in groups:
        for node in (node for run in group.runs for record in run.rows for node in record.get("nodes") or []):
            found[group.index, int(node.get("client", -1)), str(node.get("node", NONE))].append(node)

    def size(value: float) -> str:
        return human(value, "B")

    columns: dict[str, tuple[str, Callable[[list[float]], float], Callable[[float], str]]] = {
        "mean time": ("seconds", fmean, duration),
        "mean CPU time": ("cpu_seconds", fmean, duration),
        "peak memory": ("peak_memory", max, size),
        "down": ("bytes_down", sum, size),
        "up": ("bytes_up", sum, size),
    }
    rows = []
    for (index, client, name), entries in sorted(found.items()):
        cells = [f"client {client}", name, str(len(entries))]
        for key, reduce, form in columns.values():
            values = [float(entry[key]) for entry in entries if entry.get(key) is not None]
            cells.append(form(reduce(values)) if values else NONE)
        rows.append(row(cells, index=index))
    return table("Nodes", ["client", "node", "turns", *columns], rows)


def configs(groups: Sequence[Group]) -> str:
    """Returns the keys in which the runs differ, or of one run those that are not as by default, and all keys."""
    flat = [run.values for group in groups for run in group.runs]
    usual, what = flat[0], "The keys in which the runs differ:"
    if len(flat) == 1:
        usual, what = Config().flat(), "The keys that are not as by default:"
    told = [key for key in flat[0] if any(one.get(key) != usual.get(key) for one in flat)]
    shown = f"<p>{what}</p>{_facts(what, groups, lambda run: run.values, told)}" if told else ""
    every = _facts("All keys", groups, lambda run: run.values, list(flat[0]))
    return f"{shown}<details><summary>All {len(flat[0])} keys</summary>{every}</details>"


def environments(groups: Sequence[Group]) -> str:
    """Returns what the runs were computed with."""

    def found(run: ReportedRun) -> dict[str, Any]:
        again = run.environment.get("resumed") or []
        facts = {key: value for key, value in run.environment.items() if key != "resumed"}
        others = [key for key in facts if any(later.get(key) != facts[key] for later in again)]
        with_others = f", with another {', '.join(others)}" if others else ""
        return facts | {"resumed": f"{len(again)} times{with_others}"}

    keys = dict.fromkeys(key for group in groups for run in group.runs for key in found(run))
    return _facts("Environment", groups, found, list(keys))


def _facts(
    label: str, groups: Sequence[Group], found: Callable[[ReportedRun], dict[str, Any]], keys: Sequence[str]
) -> str:
    """Returns some facts of the runs, a column for each group; those that differ are marked."""
    columns = {group.label: [found(run) for run in group.runs] for group in groups}
    head = ["key", *columns] if len(columns) > 1 else ["key", "value"]
    rows = []
    for key in keys:
        values = [list(dict.fromkeys(plain(facts.get(key, NONE)) for facts in column)) for column in columns.values()]
        kind = "differs" if len({value for own in values for value in own}) > 1 else ""
        rows.append(row([key, *map(", ".join, values)], kind))
    return table(label, head, rows, "code")


def tiles(run: ReportedRun) -> str:
    """Returns the numbers of a single run that people look for first."""
    s, alone = run.summary, Group(0, run.name, [run])
    metric, unit = metric_of([alone])
    pairs = {
        f"{metric}, {measure([alone])}": say(s["tail"], unit),
        f"{metric}, last evaluation": say(s["last"], unit),
        f"best {metric}": say(s["best"], unit),
        f"rounds, {s['status']}": f"{s['rounds']} of {run.values['rounds']}",
        "communication": human(s["bytes"], "B"),
        "time": duration(s["seconds"]),
    }
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f'<dl class="tiles">{shown}</dl>'
