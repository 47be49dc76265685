"""The tables of the report: results, similarity, sizes, rejected uploads, nodes, configs and environments."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

from incofl.analysis.runs import Groups, RecordedRun, plain
from incofl.config import Config
from incofl.costs import human
from incofl.engine.files import read_json
from incofl.errors import IncoflError, RunError
from incofl.statistics import estimate, plus_minus
from incofl.studies.compare import levels_of_devices
from incofl.studies.gains import answer, gain_table

NONE = "\N{EN DASH}"
ADVICE = "advice.json"  # in a folder of runs: what incofl advise said, tables by title
in_bytes = partial(human, unit="B")
FLEET = ("model.name", "data.name", "data.partition", "data.clients", "rounds")  # in which compared runs must agree


class Line(NamedTuple):
    """A line of a table."""

    cells: Mapping[str, object]  # by their headings
    group: int | None = None  # whose colour and marker stand in front
    kind: str = ""  # its look: of a group, of a seed, or of values that differ


def verdict(groups: Groups) -> tuple[str, list[Line]]:
    """Which method to use, in words, and what each level of devices gains over the best baseline.

    Nothing if there is no baseline among the runs, or if they differ in more than their methods.
    """
    runs = {(group.label, run.seed): run for group in groups for run in group.runs if run.judged}
    fleets = {tuple(run.values.get(key, "") for key in FLEET) for run in runs.values()}
    if len(fleets) != 1 or any(group.label != group.runs[0].method for group in groups):
        return "", []
    try:
        setting, baselines = levels_of_devices(runs)
    except (IncoflError, ImportError):  # of objects that only their script has
        return "", []
    if setting is None:
        return "", []
    head, *rows = gain_table(setting, baselines)
    return answer(setting, baselines), [Line(dict(zip(head, row, strict=True))) for row in rows]


def advice(groups: Groups) -> dict[str, list[Line]]:
    """By title, what ``incofl advise --try`` said of the devices and options that the runs are of; else nothing."""
    (folder, *others) = {run.path.parent for run in groups.runs}
    try:
        said = {} if others else read_json(folder / ADVICE, "")
        found = {
            title: [Line(dict(zip(head, row, strict=True))) for row in rows] for title, (head, *rows) in said.items()
        }
        return {title: lines for title, lines in found.items() if lines}
    except (RunError, TypeError, ValueError):
        return {}


def results(groups: Groups) -> list[Line]:
    """Returns a line per run; before those of several seeds, one with mean ± half width."""
    lines = []
    for group in groups:
        name = group.label if group.several else f"{group.label}, seed {group.runs[0].seed}"
        lines.append(Line(_result(name, group.runs, groups), group.index, "group" * group.several))
        seeds = group.runs if group.several else []
        lines += [Line(_result(f"seed {run.seed}", [run], groups), kind="seed") for run in seeds]
    return lines


def _result(name: str, runs: Sequence[RecordedRun], groups: Groups) -> dict[str, str]:
    def shown(values: Iterable[float | None]) -> str:
        form, scale = (".1f", 100) if groups.metric[1] == "percent" else (".3g", 1)
        return plus_minus(found, form, scale) if (found := estimate(values)) else NONE

    of = {key: [run.summary[key] for run in runs] for key in runs[0].summary}
    rounds = " to ".join(map(str, sorted({min(of["rounds"]), max(of["rounds"])})))
    return {
        "run": name,
        "rounds": rounds if len(runs) > 1 else f"{rounds} of {runs[0].values['rounds']}",
        "last": shown(of["accuracy"]),
        groups.measure: shown(of["accuracy_tail"]),
        "best": shown(of["accuracy_best"]),
        **{groups.called(level): shown(run.tail(level) for run in runs) for level in groups.levels},
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


def similarity(groups: Groups) -> list[list[Line]]:
    """Returns the mean CKA between client models by depth, as ``incofl analyze`` found it; a table per model."""
    known = defaultdict[tuple[str, ...], list[Line]](list)
    for run, (label, index) in groups.labels.items():
        found = run.json("analysis/similarity.json")
        if points := tuple(map(str, found.get("points") or [])):
            values = dict(zip(points, found.get("mean_by_depth") or [], strict=False))
            values["r with accuracy"] = found.get("correlation", {}).get(points[-1], {}).get("pearson")
            cells = {name: NONE if value is None else f"{value:.3f}" for name, value in values.items()}
            known[points].append(Line({"run": label} | cells, index))
    return list(known.values())


def sizes(groups: Groups) -> list[tuple[list[str], list[Line] | str]]:
    """Returns what each level is and costs, or why that is unknown, with the names of the groups that agree in it."""
    known: dict[str, tuple[list[str], list[Line] | str]] = {}
    for group in groups:
        found = group.runs[0].federation_or_reason
        told: list[Line] | str
        if isinstance(found, str):
            told = found
        else:
            told = [Line(cost.cells(found.clients_by_level[cost.level], "{:,}".format)) for cost in found.costs]
        known.setdefault(repr(told), ([], told))[0].append(group.label)
    return list(known.values())


def rejected(groups: Groups) -> list[Line]:
    """Returns every upload that was not accepted, and why."""
    return [
        Line({"run": label, "round": row["round"]} | entry, index)
        for run, (label, index) in groups.labels.items()
        for row in run.rows
        for entry in row["rejected"]
    ]


def nodes(groups: Groups) -> list[Line]:
    """Returns a line per node and client, over its rounds."""
    found = defaultdict[tuple[int, int, str], list[dict[str, Any]]](list)
    for run, (_, index) in groups.labels.items():
        for node in (node for row in run.rows for node in row.get("nodes") or []):
            found[index, int(node.get("client", -1)), str(node.get("node", NONE))].append(node)
    columns: dict[str, tuple[str, Callable[[list[float]], float], Callable[[float], str]]] = {
        "mean time": ("seconds", fmean, duration),
        "mean CPU time": ("cpu_seconds", fmean, duration),
        "peak memory": ("peak_memory", max, in_bytes),
        "down": ("bytes_down", sum, in_bytes),
        "up": ("bytes_up", sum, in_bytes),
    }
    lines = []
    for (index, client, name), entries in sorted(found.items()):
        cells = {"client": f"client {client}", "node": name, "turns": len(entries)}
        for column, (key, reduce, form) in columns.items():
            values = [float(entry[key]) for entry in entries if entry.get(key) is not None]
            cells[column] = form(reduce(values)) if values else NONE
        lines.append(Line(cells, index))
    return lines


def configs(groups: Groups) -> tuple[list[Line], list[Line]]:
    """Returns the keys in which the runs differ, or of one run those that are not as by default, and all keys."""
    first, *others = (run.values for run in groups.runs)
    usual = first if others else Config().flat()
    told = [key for key in first if any(one.get(key) != usual.get(key) for one in (first, *others))]
    values = attrgetter("values")
    return _facts(groups, values, told), _facts(groups, values, first)


def environments(groups: Groups) -> list[Line]:
    """Returns what the runs were computed with."""

    def found(run: RecordedRun) -> dict[str, Any]:
        facts = run.json("environment.json")
        again = facts.pop("resumed", [])
        others = [key for key in facts if any(later.get(key) != facts[key] for later in again)]
        return facts | {"resumed": f"{len(again)} times" + (f", with another {', '.join(others)}" if others else "")}

    return _facts(groups, found, dict.fromkeys(key for run in groups.runs for key in found(run)))


def _facts(groups: Groups, found: Callable[[RecordedRun], dict[str, Any]], keys: Iterable[str]) -> list[Line]:
    """Returns some facts of the runs, a column for each group; those that differ are marked."""
    columns = {group.label if len(groups) > 1 else "value": [found(run) for run in group.runs] for group in groups}
    lines = []
    for key in keys:
        values = {name: dict.fromkeys(plain(facts.get(key, NONE)) for facts in own) for name, own in columns.items()}
        kind = "differs" if len({value for own in values.values() for value in own}) > 1 else ""
        lines.append(Line({"key": key} | {name: ", ".join(own) for name, own in values.items()}, kind=kind))
    return lines
