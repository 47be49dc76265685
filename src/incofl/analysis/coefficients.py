"""InCo's coefficients over a run, from its ``metrics.jsonl`` alone: theta, beta, and the size of the change.

They are recorded for each deep layer and round, over the units of ``inco.granularity`` (kernels, or the tensor):
``theta`` (1 without optimisation) and ``beta`` are means, ``beta_positive`` is a share of units, ``norm_change`` the
Frobenius norm of what InCo adds to the update, ``norm_deep`` that of the update before. With ``+noise`` there are only
the norms, of Gaussian noise in place of InCo.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from incofl.analysis.analyze import Findings, Options, cell, first_seeds
from incofl.analysis.layers import Array, Layers, Record
from incofl.analysis.plots import drawn, layer_axis, look
from incofl.analysis.runs import RecordedRun
from incofl.errors import RunError

# Means over the rounds; rounds_positive is the share of rounds in which the mean of beta is above 0.
MEANS = ("theta", "beta", "beta_positive", "rounds_positive", "relative_change")


@dataclass(frozen=True)
class Coefficients:
    """What the transform of a run recorded, by deep layer; those that levels have for themselves name their level."""

    kind: str  # inco or noise
    optimise: bool  # whether theta was computed; without optimisation it is 1
    layers: Layers  # in groups by stage

    @property
    def what(self) -> str:
        """What the transform adds, in words."""
        return "noise" if self.kind == "noise" else "InCo" if self.optimise else "InCo without optimisation"

    def unsteadiness(self) -> float | None:
        """Returns the mean size of the norm's change from a round to the next, over its mean: 0 for a constant."""
        values = norms(self.layers)
        return float(np.abs(np.diff(values)).mean() / values.mean()) if len(values) > 1 and values.mean() > 0 else None


def norms(layers: Layers) -> Array:
    """Returns the Frobenius norm of the change of some layers together, by round."""
    return np.asarray(np.sqrt(np.nansum(layers.numbers["norm_change"] ** 2, axis=0)))


def coefficients(run: RecordedRun) -> Coefficients | None:
    """Reads the coefficients; ``None`` for a run whose method has neither InCo nor noise."""
    kind = next((kind for kind in ("inco", "noise") if any(row.get(kind) for row in run.rows)), None)
    if kind is None:
        return None
    records: dict[str, dict[int, Record]] = {}
    for row in run.rows:
        for name, record in (row.get(kind) or {}).items():
            records.setdefault(name, {})[row["round"]] = derived(record)
    layout = run.layout
    parts = layout.stages if len(layout.stages) > 1 else tuple((block,) for block in layout.blocks)
    stage = {block: f"stage {number}" for number, part in enumerate(parts, start=1) for block in part}
    group_of = {name: stage.get(layout.block_of[name.partition(",")[0]] or "", "stage 1") for name in records}
    optimise = kind == "inco" and bool(run.values.get("inco.optimise", True))
    return Coefficients(kind, optimise, Layers.of(group_of, records))


def derived(record: Record) -> dict[str, float]:
    """Adds to the numbers of a layer in a round whether beta is above 0, and norm_change / norm_deep."""
    found = {key: float(value) for key, value in record.items()}
    found |= {"rounds_positive": float(found["beta"] > 0)} if "beta" in found else {}
    return found | ({"relative_change": found["norm_change"] / deep} if (deep := found.get("norm_deep")) else {})


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Draws theta, beta and the size of the change of each run with InCo or noise, and such runs next to each other."""
    findings = Findings("what is added to the updates of deep layers: means over layers and rounds")
    found = {run: one for run in runs if (one := coefficients(run)) is not None}
    if not found:
        raise RunError("no run has InCo or noise")
    for run, one in found.items():
        means = [list(one.layers.means(what).values()) for what in MEANS]
        theta, _, units, rounds, change = (float(np.mean(values)) if values else None for values in means)
        row = {"run": run.name, "adds": one.what, "layers": len(one.layers.group_of), "theta": theta}
        row |= {"beta > 0": cell(units, ".1%"), "beta > 0 in rounds": cell(rounds, ".1%")}
        row |= {"norm": cell(float(norms(one.layers).mean()), ".3g"), "relative": change}
        findings.row(row | {"unsteadiness": one.unsteadiness()})
        findings.json(run, "coefficients.json", summary(one))
        stages = dict.fromkeys(one.layers.group_of.values())
        title = f"{run.name}: coefficients of {one.what}, a line or points for each deep layer"
        draw(findings.file(run, "coefficients.png"), title, {stage: one.layers.group(stage) for stage in stages})
    if len(settings := first_seeds(found)) > 1:
        series = {f"{label} ({one.what})": one.layers for label, one in settings.items()}
        draw(findings.file(out, "coefficients.png"), "coefficients by run", series)
    return findings


def summary(found: Coefficients) -> dict[str, Any]:
    """Returns the content of ``coefficients.json``."""
    values, means = norms(found.layers), {what: found.layers.means(what) for what in MEANS}
    change = {"values": values, "mean": values.mean(), "unsteadiness": found.unsteadiness()}
    by_layer = {name: {what: values.get(name) for what, values in means.items()} for name in found.layers.group_of}
    start = {"kind": found.kind, "optimise": found.optimise, "norm_of_change": change}
    return start | found.layers.json(mean=by_layer)


def draw(path: Path, title: str, series: Mapping[str, Layers]) -> None:
    """Draws the norm of each series of layers, and numbers of each of their layers; of noise there is only the norm."""
    names = list(dict.fromkeys(name for layers in series.values() for name in layers.group_of))
    betas = [np.abs(row) for layers in series.values() for row in layers.rows("beta").values()]
    size = (3.7, max(2.6, 0.9 + 0.17 * len(names)))
    with drawn(path, title, size, 5 if betas else 2, 3) as (norm, change, *panels):
        by_round = dict(zip(("relative_change", "theta", "beta"), (change, *panels), strict=False))
        for place, (label, layers) in enumerate(series.items()):
            style, rounds = look(place, label=label, lw=1, ms=3.5, alpha=0.7), np.array(layers.rounds)
            norm.plot(rounds, norms(layers), **style)
            for what, axes in by_round.items():
                for known, values in ((np.isfinite(row), row) for row in layers.numbers.get(what, ())):
                    axes.plot(rounds[known], values[known], **style, ls="" if what == "beta" else "-")
            for name, positive in layers.means("beta_positive").items():
                panels[2].plot(100 * positive, names.index(name), **style)
        norm.set(xlabel="round", ylabel="Frobenius norm of what is added", ylim=(0, None))
        change.set(xlabel="round", ylabel="norm of change / norm of update", ylim=(0, None))
        if betas:
            theta, beta, share, *_ = panels
            theta.axhline(1, color="black", ls="--", lw=1, label="theta without optimisation; beta > 0 by chance")
            theta.set(xlabel="round", ylabel=r"$\theta$, mean over units", ylim=(0, None))
            if (sizes := np.concatenate(betas)).any():
                beta.set_yscale("symlog", linthresh=float(np.quantile(sizes[sizes > 0], 0.1)))
            beta.set(xlabel="round", ylabel=r"$\beta$, mean over units (signed log)")
            low, high = share.get_xlim()
            share.set(
                xlim=(min(low, 40), max(high, 60)), xlabel=r"units with $\beta > 0$, mean over rounds, in percent"
            )
            share.axvline(50, color="black", ls="--", lw=1)
            layer_axis(share, names)
