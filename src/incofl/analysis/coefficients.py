"""InCo's coefficients over a run, from its ``metrics.jsonl`` alone: theta, beta, and the size of the change.

They are recorded for each deep layer and round, over the units of ``inco.granularity`` (kernels, or the tensor):
``theta`` (1 without optimisation) and ``beta`` are means, ``beta_positive`` is a share of units, ``norm_change`` the
Frobenius norm of what InCo adds to the update, ``norm_deep`` that of the update before. With ``+noise`` there are only
the norms, of Gaussian noise in place of InCo.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from incofl.analysis.analyze import Findings, Options, cell, first_seeds
from incofl.analysis.layers import Layers, Record
from incofl.analysis.plots import Axes, drawn, layer_axis, look
from incofl.analysis.runs import RecordedRun
from incofl.errors import RunError

KINDS = ("inco", "noise")
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

    def norm_of_change(self) -> dict[int, float]:
        """Returns the Frobenius norm of the change of all layers together, by round."""
        norms = np.sqrt(np.nansum(self.layers.numbers["norm_change"] ** 2, axis=0))
        return dict(zip(self.layers.rounds, norms.tolist(), strict=True))

    def unsteadiness(self) -> float | None:
        """Returns the mean size of the norm's change from a round to the next, over its mean: 0 for a constant."""
        values = np.array(list(self.norm_of_change().values()))
        return float(np.abs(np.diff(values)).mean() / values.mean()) if len(values) > 1 and values.mean() > 0 else None


def coefficients(run: RecordedRun) -> Coefficients | None:
    """Reads the coefficients; ``None`` for a run whose method has neither InCo nor noise."""
    kind = next((kind for kind in KINDS if any(row.get(kind) for row in run.rows)), None)
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


def mean(values: Iterable[float]) -> float | None:
    """Returns the mean; ``None`` of nothing."""
    known = list(values)
    return float(np.mean(known)) if known else None


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Draws theta, beta and the size of the change of each run with InCo or noise, and such runs next to each other."""
    findings = Findings("what is added to the updates of deep layers: means over layers and rounds")
    found = {run: one for run in runs if (one := coefficients(run)) is not None}
    if not found:
        raise RunError(f"coefficients: {runs[0].path} and the others are runs without InCo and without noise")
    for run, one in found.items():
        theta, _, units, rounds, change = (mean(one.layers.means(what).values()) for what in MEANS)
        row = {"run": run.name, "adds": one.what, "layers": len(one.layers.group_of), "theta": theta}
        row |= {"beta > 0": cell(units, ".1%"), "beta > 0 in rounds": cell(rounds, ".1%")}
        row |= {"norm": cell(mean(one.norm_of_change().values()), ".3g"), "relative": change}
        findings.row(row | {"unsteadiness": one.unsteadiness()})
        findings.json(run, "coefficients.json", summary(one))
        path = findings.file(run, "coefficients.png")
        draw_run(path, one, run.name) if one.kind == "inco" else draw_runs(path, {run.name: one})
    if len(settings := first_seeds(found)) > 1:
        draw_runs(findings.file(out, "coefficients.png"), settings)
    return findings


def summary(found: Coefficients) -> dict[str, Any]:
    """Returns the content of ``coefficients.json``."""
    norms, means = found.norm_of_change(), {what: found.layers.means(what) for what in MEANS}
    change = {"values": list(norms.values()), "mean": mean(norms.values()), "unsteadiness": found.unsteadiness()}
    by_layer = {name: {what: values.get(name) for what, values in means.items()} for name in found.layers.group_of}
    start = {"kind": found.kind, "optimise": found.optimise, "norm_of_change": change}
    return start | found.layers.json(mean=by_layer)


def draw_run(path: Path, found: Coefficients, name: str) -> None:
    """Draws theta and beta of each layer by round, the share of beta > 0 by layer, and the relative change."""
    layers, stages = found.layers, list(dict.fromkeys(found.layers.group_of.values()))
    looks = {layer: look(stages.index(stage), label=stage, ms=3.5) for layer, stage in layers.group_of.items()}
    title = f"{name}: InCo's coefficients, a line or points for each deep layer"
    with drawn(path, title, (4.6, max(2.6, 1.2 + 0.17 * len(looks))), 4, 2) as (theta, beta, share, change):
        for axes, what in ((theta, "theta"), (beta, "beta"), (change, "relative_change")):
            for style, values in zip(looks.values(), layers.numbers[what], strict=True):
                axes.plot(layers.rounds, values, **style, lw=0 if axes is beta else 1, alpha=0.8)
        theta.axhline(1, color="black", ls="--", lw=1, label="without optimisation")
        theta.set(xlabel="round", ylabel=r"$\theta$, mean over units", ylim=(0, None))
        if len(sizes := np.abs(np.concatenate([*layers.rows("beta").values()]))) and sizes.any():
            beta.set_yscale("symlog", linthresh=float(np.quantile(sizes[sizes > 0], 0.1)))
        beta.set(xlabel="round", ylabel=r"$\beta$, mean over units (signed log)")
        change.set(xlabel="round", ylabel="norm of change / norm of update", ylim=(0, None))
        _shares(share, [(found, looks)])


def draw_runs(path: Path, runs: Mapping[str, Coefficients]) -> None:
    """Draws the size of what each run adds by round, and the share of beta > 0 by layer where runs have InCo."""
    looks = {label: look(at, label=f"{label} ({found.what})") for at, (label, found) in enumerate(runs.items())}
    mixed = {label: found for label, found in runs.items() if found.kind == "inco"}
    rows = len({layer for found in mixed.values() for layer in found.layers.group_of})
    title = "InCo's coefficients by run" if mixed else "noise on deep layers"
    with drawn(path, title, (4.6, max(2.6, 0.6 + 0.18 * rows)), 1 + bool(mixed)) as (norm, *share):
        for label, found in runs.items():
            norm.plot(*zip(*found.norm_of_change().items(), strict=True), **looks[label])
        norm.set(xlabel="round", ylabel="Frobenius norm of what is added", ylim=(0, None))
        for axes in share:
            _shares(axes, [(one, dict.fromkeys(one.layers.group_of, looks[label])) for label, one in mixed.items()])


def _shares(axes: Axes, runs: Sequence[tuple[Coefficients, Mapping[str, dict[str, Any]]]]) -> None:
    """Draws the share of beta > 0 by layer, for runs with the look of each layer."""
    names = list(dict.fromkeys(layer for found, _ in runs for layer in found.layers.group_of))
    for found, looks in runs:
        for layer, share in found.layers.means("beta_positive").items():
            axes.plot(100 * share, names.index(layer), **looks[layer])
    axes.axvline(50, color="black", ls="--", lw=1)
    layer_axis(axes, names)
    low, high = axes.get_xlim()
    axes.set(xlim=(min(low, 40), max(high, 60)))  # otherwise chance would look like much
    axes.set_xlabel(r"units with $\beta > 0$, mean over rounds, in percent")
