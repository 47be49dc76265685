"""The tables of the report as HTML: results, similarity, sizes, rejected uploads, nodes, configs and environments."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from statistics import fmean
from typing import Any

from incofl.analysis.runs import plain
from incofl.config import Config
from incofl.costs import human
from incofl.report.figures import NONE, say
from incofl.report.runs import Groups, ReportedRun, interval

LINES, WHOLE = 200, 40  # longer tables are cut, and say so; longer than the second they scroll
in_bytes = partial(human, unit="B")
Line = tuple[Mapping[str, object], str, int | None]  # cells by their headings, class, and the group that the line is of


def swatch(index: int) -> str:
    """Returns the colour, dash and marker of a group, as its curves have them."""
    use = f'<use href="#dash{index % 6}"/><use href="#mark{index % 7}"/>'
    return f'<svg viewBox="0 0 34 12" aria-hidden="true" style="color:var(--c{index % 7})">{use}</svg>'


def table(label: str, lines: Sequence[Line], kind: str = "") -> str:
    """Returns a table that scrolls by itself where it is too wide, by keyboard too; a long one is cut."""
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in lines[0][0])
    cut = f"<p>The first {LINES} of {len(lines)} lines.</p>" if len(lines) > LINES else ""
    body = ""
    for cells, own, index in lines[:LINES]:
        first, *rest = (escape(str(cell)) for cell in cells.values())
        named = f'<th scope="row">{"" if index is None else swatch(index)}{first}</th>'
        body += f'<tr class="{own}">{named}{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
    size = "" if len(lines) > WHOLE else " whole"
    region = f'<div class="scroll{size}" tabindex="0" role="region" aria-label="{escape(label)}">'
    inside = f"<thead><tr>{headings}</tr></thead><tbody>{body}</tbody>"
    return f'{cut}{region}<table class="{kind}">{inside}</table></div>'


def results(groups: Groups) -> str:
    """Returns the numbers of a single run; else a line per run, after one per group of seeds with mean ± half width."""
    if len(groups.runs) == 1:
        facts = _result(groups[0].label, groups.runs, groups).items()
        tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
        return f'<dl class="tiles">{tiles}</dl>'
    lines: list[Line] = []
    for group in groups:
        name = group.label if group.several else f"{group.label}, seed {group.runs[0].seed}"
        lines.append((_result(name, group.runs, groups), "group" * group.several, group.index))
        seeds = group.runs if group.several else []
        lines += [(_result(f"seed {run.seed}", [run], groups), "seed", None) for run in seeds]
    return table("Results", lines, "dense")


def _result(name: str, runs: Sequence[ReportedRun], groups: Groups) -> dict[str, str]:
    def shown(values: Iterable[float | None]) -> str:
        found = interval(values) or ()
        return " ± ".join(say(value, unit).removesuffix(" %") for value in found if value is not None) or NONE

    of, (_, unit) = {key: [run.summary[key] for run in runs] for key in runs[0].summary}, groups.metric
    rounds = " to ".join(map(str, sorted({min(of["rounds"]), max(of["rounds"])})))
    return {
        "run": name,
        "rounds": rounds if len(runs) > 1 else f"{rounds} of {runs[0].values['rounds']}",
        "last": shown(of["accuracy"]),
        groups.measure: shown(of["accuracy_tail"]),
        "best": shown(of["accuracy_best"]),
        **{f"level {level}": shown(run.tail(level) for run in runs) for level in groups.levels},
        "bytes": in_bytes(fmean(of["bytes_down"]) + fmean(of["bytes_up"])),
        "time": duration(fmean(of["seconds"])),
        "rejected": str(sum(of["rejected"])),
        "status": of["status"][0] if len(set(of["status"])) == 1 else f"{of['status'].count('done')} done",
    }


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def similarity(groups: Groups) -> str:
    """Returns the mean CKA between client models by depth, as ``incofl analyze`` found it; models apart."""
    known = defaultdict[tuple[str, ...], list[Line]](list)
    for run in groups.runs:
        found = run.json("analysis/similarity.json")
        if points := tuple(map(str, found.get("points") or [])):
            values = dict(zip(points, found.get("mean_by_depth") or [], strict=False))
            values["r with accuracy"] = found.get("correlation", {}).get(points[-1], {}).get("pearson")
            cells = {name: NONE if value is None else f"{value:.3f}" for name, value in values.items()}
            known[points].append(({"run": run.label} | cells, "", run.index))
    return "".join(table("Mean CKA between client models", lines) for lines in known.values())


def sizes(groups: Groups) -> str:
    """Returns what each level is and costs; groups that agree in everything share a table."""
    known = defaultdict[str, list[str]](list)
    for group in groups:
        found, lines = group.runs[0].federation_or_reason, list[Line]()
        if isinstance(found, str):
            known[f"<p>The sizes cannot be computed here: {escape(found)}</p>"].append(group.label)
            continue
        for cost, count in zip(found.costs, found.clients_by_level, strict=True):
            cells = {"level": cost.level, "blocks": " ".join(map(str, cost.blocks)), "width": f"{cost.width:g}"}
            cells |= {"parameters": f"{cost.parameters:,}", "MACs": f"{cost.macs:,}"}
            cells |= {"down a round": in_bytes(cost.bytes_down), "up a round": in_bytes(cost.bytes_up)}
            lines.append((cells | {"training memory": in_bytes(cost.memory), "clients": count}, "", None))
        known[table("Sizes", lines)].append(group.label)
    heading = "<h3>{}</h3>" if len(known) > 1 else ""
    return "".join(heading.format(escape(", ".join(names))) + text for text, names in known.items())


def rejected(groups: Groups) -> str:
    """Returns every upload that was not accepted, and why."""
    every = ((run, row, entry) for run in groups.runs for row in run.rows for entry in row["rejected"])
    lines: list[Line] = [({"run": run.label, "round": row["round"]} | e, "", run.index) for run, row, e in every]
    return table("Rejected uploads", lines, "words") if lines else "<p>No upload was rejected.</p>"


def nodes(groups: Groups) -> str:
    """Returns a line per node and client, over its rounds."""
    found = defaultdict[tuple[int, int, str], list[dict[str, Any]]](list)
    for run in groups.runs:
        for node in (node for row in run.rows for node in row.get("nodes") or []):
            found[run.index, int(node.get("client", -1)), str(node.get("node", NONE))].append(node)
    columns: dict[str, tuple[str, Callable[[list[float]], float], Callable[[float], str]]] = {
        "mean time": ("seconds", fmean, duration),
        "mean CPU time": ("cpu_seconds", fmean, duration),
        "peak memory": ("peak_memory", max, in_bytes),
        "down": ("bytes_down", sum, in_bytes),
        "up": ("bytes_up", sum, in_bytes),
    }
    lines: list[Line] = []
    for (index, client, name), entries in sorted(found.items()):
        cells = {"client": f"client {client}", "node": name, "turns": len(entries)}
        for column, (key, reduce, form) in columns.items():
            values = [float(entry[key]) for entry in entries if entry.get(key) is not None]
            cells[column] = form(reduce(values)) if values else NONE
        lines.append((cells, "", index))
    return table("Nodes", lines)


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
    columns = {group.label if len(groups) > 1 else "value": [found(run) for run in group.runs] for group in groups}
    lines: list[Line] = []
    for key in keys:
        values = {name: dict.fromkeys(plain(facts.get(key, NONE)) for facts in own) for name, own in columns.items()}
        kind = "differs" if len({value for own in values.values() for value in own}) > 1 else ""
        lines.append(({"key": key} | {name: ", ".join(own) for name, own in values.items()}, kind, None))
    return table(label, lines, "code")
