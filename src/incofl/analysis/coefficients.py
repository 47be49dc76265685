"""InCo's coefficients over a run, from its ``metrics.jsonl`` alone: theta, beta, and the size of the change.

For each deep layer and round the run has recorded, over the units of ``inco.granularity`` (kernels, or the tensor):

    theta            mean weight of the shallow layer's update; 1 without optimisation
    beta             mean of <g_0, g_k>
    beta_positive    share of units with beta > 0
    norm_change      Frobenius norm of what InCo adds to the update; norm_deep is that of the update before

Runs with ``+noise`` have norm_change and norm_deep too, of Gaussian noise in place of InCo.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from incofl.analysis.analyze import Findings, Options, cell, own
from incofl.analysis.plots import Axes, drawn, layer_axis, legend, look
from incofl.analysis.runs import RecordedRun, by_seed
from incofl.errors import RunError

Kind = Literal["inco", "noise"]
FIELDS: dict[Kind, tuple[str, ...]] = {
    "inco": ("theta", "beta", "beta_positive", "norm_deep", "norm_shallow", "norm_change"),
    "noise": ("norm_deep", "norm_change"),
}
Layer = Mapping[str, Mapping[int, float]]  # the values of each field by round
TITLE = "what is added to the updates of deep layers: means over layers and rounds"
HEADINGS = ["run", "adds", "layers", "theta", "beta > 0", "beta > 0 in rounds", "norm", "relative", "unsteadiness"]


@dataclass(frozen=True)
class Coefficients:
    """What the transform of a run recorded. Layers that levels have for themselves are named with their level."""

    kind: Kind
    optimise: bool  # whether theta was computed; without optimisation it is 1
    layers: Mapping[str, Layer]  # rounds in which a layer was not mixed are left out

    @property
    def what(self) -> str:
        """What the transform adds, in words."""
        return "noise" if self.kind == "noise" else "InCo" if self.optimise else "InCo without optimisation"


def coefficients(run: RecordedRun) -> Coefficients | None:
    """Reads the coefficients; ``None`` for a run whose method has neither InCo nor noise."""
    kind = next((kind for kind in FIELDS if any(row.get(kind) for row in run.rows)), None)
    if kind is None:
        return None
    layers: dict[str, dict[str, dict[int, float]]] = {}
    for row in run.rows:
        for name, record in (row.get(kind) or {}).items():
            layer = layers.setdefault(name, {field: {} for field in FIELDS[kind]})
            for field in FIELDS[kind]:
                if field in record:  # runs of older versions lack some
                    layer[field][row["round"]] = float(record[field])
    return Coefficients(kind, kind == "inco" and run.config.methods["inco"].optimise, layers)


def relative_change(layer: Layer) -> dict[int, float]:
    """Returns norm_change / norm_deep by round."""
    deep = layer.get("norm_deep", {})
    return {round: norm / deep[round] for round, norm in layer.get("norm_change", {}).items() if deep.get(round)}


def of_layer(layer: Layer) -> dict[str, float | None]:
    """Returns means over the rounds; ``rounds_positive`` is the share of rounds whose mean of beta is above 0."""
    means = {field: _mean(layer.get(field, {}).values()) for field in ("theta", "beta", "beta_positive")}
    positive = _mean(float(value > 0) for value in layer.get("beta", {}).values())
    return means | {"rounds_positive": positive, "relative_change": _mean(relative_change(layer).values())}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def norm_of_change(found: Coefficients) -> dict[int, float]:
    """Returns the Frobenius norm of the change of all layers together, by round."""
    squares: dict[int, float] = {}
    for layer in found.layers.values():
        for round, norm in layer.get("norm_change", {}).items():
            squares[round] = squares.get(round, 0.0) + norm**2
    return {round: square**0.5 for round, square in sorted(squares.items())}


def unsteadiness(norms: Mapping[int, float]) -> float | None:
    """Returns the mean size of a norm's change from a round to the next, over its mean: 0 for a constant."""
    values = np.array([norms[round] for round in sorted(norms)])
    return float(np.abs(np.diff(values)).mean() / values.mean()) if len(values) > 1 and values.mean() > 0 else None


def summary(found: Coefficients) -> dict[str, Any]:
    """Returns the content of ``coefficients.json``."""
    norms = norm_of_change(found)
    change = {"rounds": list(norms), "values": list(norms.values()), "mean": _mean(norms.values())}
    return {
        "kind": found.kind,
        "optimise": found.optimise,
        "norm_of_change": change | {"unsteadiness": unsteadiness(norms)},
        "layers": {name: of_layer(layer) | {"by_round": layer} for name, layer in found.layers.items()},
    }


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Draws theta, beta and the size of the change of each run with InCo or noise, and such runs next to each other."""
    findings = Findings(TITLE, [HEADINGS])
    found = {run: one for run in runs if (one := coefficients(run)) is not None}
    if not found:
        raise RunError(f"coefficients: {runs[0].path} and the others are runs without InCo and without noise")
    for run, one in found.items():
        findings.json(own(run, "coefficients.json"), summary(one))
        path, norms = findings.file(own(run, "coefficients.png")), norm_of_change(one)
        if one.kind == "inco":
            draw_run(path, one, _stages(run, one), run.name)
        else:
            draw_runs(path, {run.name: one})
        layers = [of_layer(layer) for layer in one.layers.values()]
        forms = {"theta": ".3f", "beta_positive": ".1%", "rounds_positive": ".1%", "relative_change": ".3f"}
        means = [cell(_mean(layer[field] for layer in layers), form) for field, form in forms.items()]
        numbers = [*means[:3], cell(_mean(norms.values()), ".3g"), means[3], cell(unsteadiness(norms))]
        findings.table.append([run.name, one.what, str(len(layers)), *numbers])
    if len(groups := by_seed(list(found))) > 1:
        draw_runs(findings.file(out / "coefficients.png"), {label: found[group[0]] for label, group in groups.items()})
    return findings


def _stages(run: RecordedRun, found: Coefficients) -> dict[str, int]:
    """Returns the stage of each layer; a model of one stage is divided by blocks."""
    layout = run.layout
    parts = layout.stages if len(layout.stages) > 1 else tuple((block,) for block in layout.blocks)
    place = {block: number for number, part in enumerate(parts) for block in part}
    return {name: place.get(layout.block_of[name.partition(",")[0]] or "", 0) for name in found.layers}


def draw_run(path: Path, found: Coefficients, stage_of: Mapping[str, int], name: str) -> None:
    """Draws theta and beta of each layer by round, the share of beta > 0 by layer, and the relative change."""
    title = f"{name}: InCo's coefficients, a line or points for each deep layer"
    with drawn(path, 10, max(6.4, 3.6 + 0.17 * len(found.layers)), title) as figure:
        (theta, beta), (share, change) = figure.subplots(2, 2)
        for layer, values in found.layers.items():
            for axes, series in ((theta, values["theta"]), (beta, values["beta"]), (change, relative_change(values))):
                style = {"ls": "", "ms": 3.5} if axes is beta else {"lw": 1, "ms": 3, "markevery": _every(series)}
                axes.plot(list(series), list(series.values()), **look(stage_of[layer]), alpha=0.8, **style)
        theta.axhline(1, color="black", ls="--", lw=1, label="without optimisation")
        theta.set(xlabel="round", ylabel=r"$\theta$, mean over units", ylim=(0, None))
        theta.legend(fontsize=8)
        if sizes := [abs(v) for values in found.layers.values() for v in values["beta"].values() if v]:
            beta.set_yscale("symlog", linthresh=float(np.quantile(sizes, 0.1)))
        beta.axhline(0, color="black", lw=0.8)
        beta.set(xlabel="round", ylabel=r"$\beta$, mean over units (signed log)")
        _shares(share, {name: found}, stage_of)
        change.set(xlabel="round", ylabel="norm of change / norm of update", ylim=(0, None))
        stages = sorted(set(stage_of.values()))
        legend(figure, {f"stage {stage + 1}": look(stage, ms=4) for stage in stages}, len(stages))


def _every(rounds: Mapping[int, float]) -> int:
    """Returns a step so that a long line has about a dozen markers."""
    return max(1, len(rounds) // 12)


def _shares(axes: Axes, runs: Mapping[str, Coefficients], stage_of: Mapping[str, int] | None = None) -> None:
    """Draws the share of beta > 0 by layer, a mark for each run, coloured by stage if there is one run."""
    names = list(dict.fromkeys(layer for found in runs.values() for layer in found.layers))
    for place, found in enumerate(runs.values()):
        for layer, values in found.layers.items():
            if (share := of_layer(values)["beta_positive"]) is not None:
                axes.plot(100 * share, names.index(layer), **look(stage_of[layer] if stage_of else place), ms=5)
    axes.axvline(50, color="black", ls="--", lw=1)
    layer_axis(axes, names, 7)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 40), max(high, 60))  # otherwise chance would look like much
    axes.set_xlabel(r"units with $\beta > 0$, mean over rounds, in percent")


def draw_runs(path: Path, runs: Mapping[str, Coefficients]) -> None:
    """Draws the share of beta > 0 by layer where runs have InCo, and the size of what each run adds by round."""
    runs = dict(sorted(runs.items(), key=lambda entry: entry[1].kind))  # InCo first, so that looks agree
    mixed = {label: found for label, found in runs.items() if found.kind == "inco"}
    rows = len({layer for found in mixed.values() for layer in found.layers})
    title = "InCo's coefficients by run" if mixed else "noise on deep layers"
    with drawn(path, 10 if mixed else 5.5, max(3.8, 1.8 + 0.18 * rows), title) as figure:
        *shares, norm = figure.subplots(1, 1 + bool(mixed), squeeze=False)[0]
        for axes in shares:
            _shares(axes, mixed)
        for place, found in enumerate(runs.values()):
            norms = norm_of_change(found)
            norm.plot(list(norms), list(norms.values()), **look(place), markevery=_every(norms))
        norm.set(xlabel="round", ylabel="Frobenius norm of what is added", ylim=(0, None))
        looks = {f"{label} ({found.what})": look(place) for place, (label, found) in enumerate(runs.items())}
        legend(figure, looks, 3)
