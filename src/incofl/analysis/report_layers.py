"""The report's figures of layers: their similarity between client models, and InCo's coefficients."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from incofl.analysis.report_figures import (
    PERCENT,
    Figure,
    Panel,
    Trace,
    curves,
    endings,
    line,
    number,
    over_rounds,
    percent,
)
from incofl.analysis.report_runs import Group, ReportedRun, Value
from incofl.engine.run_folder import Row

# A heat map has at most so many columns: a screen shows no more.
COLUMNS = 120


def heat_map(x: Sequence[Any], y: Sequence[Any], z: Sequence[Sequence[float | None]], unit: str, **more: Any) -> Trace:
    """A matrix in colours that everyone can order by lightness."""
    cells = [[None if v is None or not math.isfinite(v) else float(f"{v:.4g}") for v in row] for row in z]
    bar = {"title": {"text": unit, "side": "right"}, "thickness": 10, "outlinewidth": 0, "tickfont": {"size": 11}}
    return {"type": "heatmap", "x": list(x), "y": list(y), "z": cells, "colorscale": "Viridis", "colorbar": bar, **more}


def similarity(groups: Sequence[Group]) -> list[Figure]:
    """CKA between client models: mean by depth, heat maps, and against the accuracy over the rounds."""
    found = [(group, run, run.similarity) for group in groups for run in group.runs if run.similarity]
    depth = [
        line(group.name(run), points, group.index, meta={"group": group.index})
        for group, run, s in found
        if (points := _known(s.get("points") or [], s.get("mean_by_depth") or []))[0]
    ]
    figures = []
    if depth:
        said = "; ".join(
            f"{t['name']}: from {t['y'][0]:.2f} at {t['x'][0]} to {t['y'][-1]:.2f} at {t['x'][-1]}" for t in depth
        )
        axes = {
            "hovermode": "x unified",
            "xaxis": {"type": "category"},
            "yaxis": {"title": {"text": "mean CKA"}, "hoverformat": ".3f"},
        }
        figures.append(
            Figure(
                "similarity-depth",
                "Similarity of client models by depth",
                "Mean linear CKA over all pairs of client models, from shallow to deep layers; 1: the same features.",
                f"Curves of the mean CKA by depth. {said}.",
                [Panel(depth, axes)],
            )
        )
    history = [_history(group, run, s["history"]) for group, run, s in found if len(s.get("history") or []) > 1]
    if history:
        axes = {
            "hovermode": "closest",
            "xaxis": {"title": {"text": "mean CKA of the deepest layer"}, "hoverformat": ".3f"},
            "yaxis": {"title": {"text": "test accuracy"}, **PERCENT},
        }
        figures.append(
            Figure(
                "similarity-accuracy",
                "Similarity and accuracy over the rounds",
                "A point is a round for which weights were kept. " + _correlations(found),
                f"Test accuracy against the CKA of the deepest layer, a point per round. {endings(history, percent)}",
                [Panel(history, axes)],
                table="long",
            )
        )
    shown: set[int] = set()
    for group, run, s in found:
        if group.index in shown or not s.get("cka"):
            continue
        shown.add(group.index)
        figures.append(_cka(group, run, s))
    return figures


def _known(points: list[Any], values: list[float | None]) -> tuple[list[Any], list[float]]:
    """Points with their values; where a representation was constant there is none."""
    known = [(point, value) for point, value in zip(points, values, strict=False) if value is not None]
    return [point for point, _ in known], [value for _, value in known]


def _history(group: Group, run: ReportedRun, history: list[dict[str, Any]]) -> Trace:
    kept = [
        entry
        for entry in history
        if entry.get("mean_by_depth") and None not in (entry["mean_by_depth"][-1], entry.get("accuracy"))
    ]
    points = [entry["mean_by_depth"][-1] for entry in kept], [entry["accuracy"] for entry in kept]
    trace = line(group.name(run), points, group.index, meta={"group": group.index})
    trace["text"] = [f"round {entry['round']}" for entry in kept]
    trace["hovertemplate"] = "%{text}<br>CKA %{x:.3f}, accuracy %{y:.1%}<extra>" + group.name(run) + "</extra>"
    return trace | {"mode": "markers"}


def _correlations(found: Sequence[tuple[Group, ReportedRun, dict[str, Any]]]) -> str:
    """What the analysis says of the deepest layer, in words."""
    said = []
    for group, run, s in found:
        values = s.get("correlation") or {}
        deepest = values.get((s.get("points") or [None])[-1]) or {}
        numbers = [f"{k} {v:.2f}" for k in ("pearson", "spearman") if isinstance(v := deepest.get(k), int | float)]
        said += [f"{group.name(run)}: {', '.join(numbers)}"] if numbers else []
    return f"Correlation: {'; '.join(said)}." if said else ""


def _cka(group: Group, run: ReportedRun, s: dict[str, Any]) -> Figure:
    who = [f"{c.get('client')} (level {c.get('level')})" for c in s.get("clients") or []]
    panels, said = [], []
    for at, matrix in enumerate(s["cka"]):
        names = who if len(who) == len(matrix) else [str(i) for i in range(len(matrix))]
        point = (s.get("points") or [])[at] if at < len(s.get("points") or []) else f"point {at}"
        trace = heat_map(names, names, matrix, "CKA", zmin=0, zmax=1)
        trace["hovertemplate"] = "client %{x}<br>client %{y}<br>CKA %{z:.3f}<extra></extra>"
        axis = {
            "type": "category",
            "showgrid": False,
            "ticks": "",
            "title": {"text": "client"},
            "showticklabels": len(names) <= 12,
        }
        layout = {"xaxis": axis | {"tickangle": -60}, "yaxis": axis | {"autorange": "reversed"}, "hovermode": "closest"}
        panels.append(Panel([trace], layout, point, 330))
        others = [v for i, line_ in enumerate(matrix) for j, v in enumerate(line_) if i != j and v is not None]
        said.append(f"{point} {fmean(others):.2f}" if others else point)
    after = f" after round {s['round']}" if s.get("round") else ""
    examples = f", on {s['examples']} test examples" if s.get("examples") else ""
    more = " One seed stands for all." if len(group.runs) > 1 else ""
    return Figure(
        f"cka-{group.index}",
        f"Similarity between clients: {group.name(run)}",
        f"Linear CKA of each pair of client models{after}{examples}; clients from small to large.{more}",
        f"Heat maps of the CKA between client models. Means over the pairs: {', '.join(said)}.",
        panels,
        width=300,
        table="matrix",
        wide=True,
    )


def _mean_of(key: str) -> Value:
    """The mean of a coefficient over the mixed tensors of a round."""

    def value(row: Row) -> float | None:
        found = [entry[key] for entry in (row.get("inco") or {}).values() if entry.get(key) is not None]
        return fmean(found) if found else None

    return value


def coefficients(groups: Sequence[Group]) -> list[Figure]:
    """InCo's theta and beta: means over the rounds, and each mixed tensor; none for runs without InCo."""
    mixing = [group for group in groups if any(row.get("inco") for run in group.runs for row in run.rows)]
    if not mixing:
        return []
    theta = curves(mixing, lambda run: _mean_of("theta"))
    share = curves(mixing, lambda run: _mean_of("beta_positive"))
    half = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": 0.5,
        "y1": 0.5,
        "line": {"color": "--muted", "dash": "dot", "width": 1},
    }
    return [
        Figure(
            "theta",
            "InCo: theta",
            "How much of the shallow layer's update is added to the deep layer's: mean over the mixed tensors.",
            f"Curves of the mean theta over the rounds. {endings(theta, number)}",
            [Panel(theta, over_rounds("theta", rangemode="tozero", hoverformat=".3f"))],
        ),
        Figure(
            "beta",
            "InCo: share of beta > 0",
            "Where beta is positive, the updates of the deep and the shallow layer point the same way; at one half "
            "(dotted) they are as good as unrelated.",
            f"Curves of the share of beta above zero over the rounds. {endings(share, percent)}",
            [Panel(share, over_rounds("share of beta > 0", **PERCENT) | {"shapes": [half]})],
            "percent",
        ),
        *(_tensors(group) for group in mixing),
    ]


COEFFICIENTS = {
    "theta": "theta",
    "beta_positive": "share of beta > 0",
    "norm_deep": "norm of the deep update",
    "norm_shallow": "norm of the shallow update",
}


def _tensors(group: Group) -> Figure:
    run = group.runs[0]
    rows = [row for row in run.rows if row.get("inco")]
    rows = rows[:: -(-len(rows) // COLUMNS)]
    names = list(dict.fromkeys(name for row in rows for name in row["inco"]))
    panels, said = [], []
    for key, title in COEFFICIENTS.items():
        z = [[row["inco"].get(name, {}).get(key) for row in rows] for name in names]
        values = [v for cells in z for v in cells if v is not None]
        if not values:
            continue
        trace = heat_map([row["round"] for row in rows], names, z, "")
        trace["hovertemplate"] = "%{y}<br>round %{x}: %{z:.3g}<extra></extra>"
        if key == "beta_positive":  # around one half, where updates are unrelated
            far = max(abs(v - 0.5) for v in values) or 0.5
            trace |= {"zmin": 0.5 - far, "zmax": 0.5 + far, "colorscale": "--diverging"}
        y = {
            "type": "category",
            "autorange": "reversed",
            "showgrid": False,
            "tickfont": {"size": 11},
            "automargin": True,
        }
        layout = {"xaxis": {"title": {"text": "round"}, "showgrid": False}, "yaxis": y, "hovermode": "closest"}
        panels.append(Panel([trace], layout, title, max(260, 17 * len(names) + 90)))
        said.append(f"{title}: from {min(values):.3g} to {max(values):.3g}")
    seeds = f" Seed {run.config.seed} alone." if len(group.runs) > 1 else ""
    return Figure(
        f"inco-{group.index}",
        f"InCo by tensor: {group.label}",
        f"Each row is a mixed tensor, shallow at the top; empty where nobody in the cohort held it.{seeds}",
        f"Heat maps over rounds and {len(names)} mixed tensors. {'; '.join(said)}.",
        panels,
        width=430,
        table="matrix",
        wide=True,
    )
