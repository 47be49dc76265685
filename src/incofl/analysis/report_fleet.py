"""The report's figures of clients: what each level costs, who took part, and what nodes say of themselves."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from incofl.analysis.report_figures import (
    BYTES,
    COLOURS,
    SI,
    SYMBOLS,
    Figure,
    Panel,
    Trace,
    bar_marker,
    curves,
    endings,
    number,
    over_rounds,
)
from incofl.analysis.report_runs import Group, ReportedRun, Sizes, Value
from incofl.engine.run_folder import Row

# Up to so many turns of clients are drawn one by one.
DOTS = 4000


def sizes(groups: Sequence[Group]) -> list[Figure]:
    """Parameters and multiply-accumulates of each level; groups that agree are drawn once."""
    known: dict[tuple[tuple[int, int], ...], list[Group]] = defaultdict(list)
    for group in groups:
        if isinstance(group.sizes, Sizes):
            known[tuple((cost.parameters, cost.macs) for cost in group.sizes.costs)].append(group)
    if not known:
        return []
    panels, said = [], []
    for at, (title, unit) in enumerate((("parameters", ""), ("MACs, forward, one example", ""))):
        traces: list[Trace] = []
        for values, same in known.items():
            index, name = same[0].index, ", ".join(group.label for group in same)
            traces.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": [f"level {level}" for level in range(len(values))],
                    "y": [value[at] for value in values],
                    "marker": bar_marker(index) if len(known) > 1 else {"color": "--muted"},
                    "hovertemplate": f"%{{x}}: %{{y:.3s}}{unit}<extra></extra>",
                }
            )
            said.append(f"{title} of {name}: " + ", ".join(number(value[at]) for value in values))
        y = {"title": {"text": title}, **SI, "rangemode": "tozero"}
        layout = {"barmode": "group", "xaxis": {"type": "category"}, "yaxis": y, "showlegend": len(known) > 1}
        panels.append(Panel(traces, layout, height=300))
    return [
        Figure(
            "sizes",
            "Parameters and multiply-accumulates by level",
            "What a client of each level holds and computes; a training step costs about three forward passes.",
            f"Bars by level. {'; '.join(said)}.",
            panels,
            wide=True,
        )
    ]


def cohorts(groups: Sequence[Group]) -> list[Figure]:
    """Who took part in each round; runs with the same cohorts, as those of one seed have, are drawn once."""
    known: dict[str, list[tuple[Group, ReportedRun]]] = defaultdict(list)
    for group in groups:
        for run in group.runs:
            known[repr([(row["clients"], row["rejected"]) for row in run.rows])].append((group, run))
    last = max(row["round"] for group in groups for run in group.runs for row in run.rows)
    panels = [_turns(same, last) for same in list(known.values())[:4]]
    more = f" The first 4 of {len(known)} different schedules." if len(known) > 4 else ""
    shared = " Runs of one seed share their cohorts." if any(len(same) > 1 for same in known.values()) else ""
    counts = [len(row["clients"]) for group in groups for run in group.runs for row in run.rows]
    rejected = sum(len(row["rejected"]) for group in groups for run in group.runs for row in run.rows)
    return [
        Figure(
            "cohorts",
            "Who took part",
            f"A mark is a client's turn, coloured by its level; a cross is an upload that was rejected.{shared}{more}",
            f"Clients by round: {min(counts)} to {max(counts)} uploads a round accepted, {rejected} rejected in all.",
            panels,
            width=430,
            wide=True,
        )
    ]


def _turns(same: Sequence[tuple[Group, ReportedRun]], last: int) -> Panel:
    (group, run), *_ = same
    levels = group.sizes if isinstance(group.sizes, Sizes) else None
    by_level: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    refused: tuple[list[int], list[int]] = [], []
    for row in run.rows:
        said = {int(node["client"]): int(node["level"]) for node in row.get("nodes") or [] if "level" in node}
        for client in row["clients"]:
            x, y = by_level[said.get(client, levels.level_of(client) if levels else 0)]
            x.append(row["round"])
            y.append(client)
        for entry in row["rejected"]:
            refused[0].append(row["round"])
            refused[1].append(int(entry["client"]))
    title = ", ".join(g.name(r) for g, r in same)
    if sum(len(x) for x, _ in by_level.values()) > DOTS:
        counts = [len(by_level[level][0]) for level in sorted(by_level)]
        names = [f"level {level}" for level in sorted(by_level)]
        bar = {"type": "bar", "name": "turns", "x": names, "y": counts, "marker": {"color": "--c0"}}
        return Panel([bar], {"xaxis": {"type": "category"}, "yaxis": {"title": {"text": "turns"}, **SI}}, title)
    traces: list[Trace] = []
    for level in sorted(by_level):
        marker = {"color": f"--c{level % COLOURS}", "symbol": SYMBOLS[level % 4], "size": 7}
        x, y = by_level[level]
        name = f"level {level}" if levels else "trained"
        traces.append({"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker})
    if refused[0]:
        marker = {"color": "--bad", "symbol": "x-thin", "size": 10, "line": {"width": 2.5, "color": "--bad"}}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "rejected",
                "x": refused[0],
                "y": refused[1],
                "marker": marker,
            }
        )
    for trace in traces:
        trace["hovertemplate"] = "round %{x}, client %{y}"
    layout = {"hovermode": "closest", "showlegend": True, "xaxis": {"title": {"text": "round"}, "range": [0, last + 1]}}
    return Panel(traces, layout | {"yaxis": {"title": {"text": "client"}, "zeroline": False}}, title, 380)


def fleet(groups: Sequence[Group]) -> list[Figure]:
    """What the nodes said of themselves, where the engine asks them."""
    watched = [group for group in groups if any(row.get("nodes") for run in group.runs for row in run.rows)]
    if not watched:
        return []
    slowest = curves(watched, lambda run: _over_nodes("seconds", max))
    typical = curves(watched, lambda run: _over_nodes("seconds", median))
    memory = curves(watched, lambda run: _over_nodes("peak_memory", max))
    seconds = [("slowest node", slowest), ("median node", typical)]
    top = 1.05 * max((y for trace in slowest for y in trace["y"]), default=1)
    return [
        Figure(
            "nodes-seconds",
            "Seconds of a client's turn",
            "The slowest and the median node of each round: a round waits for the slowest.",
            "Curves over the rounds. " + " ".join(f"{title}: {endings(t, number)}" for title, t in seconds),
            [Panel(t, over_rounds("seconds", range=[0, top], hoverformat=".3~g"), title, 280) for title, t in seconds],
            wide=True,
        ),
        Figure(
            "nodes-memory",
            "Peak memory of a client's turn",
            "The largest over the nodes of a round.",
            "Curves over the rounds. " + endings(memory, number),
            [Panel(memory, over_rounds("peak memory", **BYTES, rangemode="tozero"))],
            "bytes",
        ),
    ]


def _over_nodes(key: str, reduce: Callable[[list[float]], float]) -> Value:
    def value(row: Row) -> float | None:
        found = [node[key] for node in row.get("nodes") or [] if node.get(key) is not None]
        return float(reduce(found)) if found else None

    return value
