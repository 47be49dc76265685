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
from typing import Any

import numpy as np

from incofl.analysis.analyze import Findings, Options, cell, own
from incofl.analysis.layers import Layers, Record
from incofl.analysis.plots import Axes, drawn, layer_axis, legend, look
from incofl.analysis.runs import RecordedRun, by_seed
from incofl.errors import RunError

KINDS = ("inco", "noise")
# Means over the rounds; rounds_positive is the share of rounds in which the mean of beta is above 0.
MEANS = ("theta", "beta", "beta_positive", "rounds_positive", "relative_change")
TITLE = "what is added to the updates of deep layers: means over layers and rounds"
HEADINGS = ["run", "adds", "layers", "theta", "beta > 0", "beta > 0 in rounds", "norm", "relative", "unsteadiness"]


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

    def means(self, what: str) -> dict[str, float]:
        """Returns the mean of a number over the rounds, by layer."""
        rows = self.layers.rows(what) if what in self.layers.numbers else {}
        return {name: float(row.mean()) for name, row in rows.items()}

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
    return Coefficients(
        kind, kind == "inco" and bool(run.values.get("inco.optimise", True)), Layers.of(group_of, records)
    )


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
    findings = Findings(TITLE, [HEADINGS])
    found = {run: one for run in runs if (one := coefficients(run)) is not None}
    if not found:
        raise RunError(f"coefficients: {runs[0].path} and the others are runs without InCo and without noise")
    for run, one in found.items():
        findings.json(own(run, "coefficients.json"), summary(one))
        path, norms = findings.file(own(run, "coefficients.png")), one.norm_of_change()
        if one.kind == "inco":
            draw_run(path, one, run.name)
        else:
            draw_runs(path, {run.name: one})
        theta, _, units, rounds, change = (mean(one.means(what).values()) for what in MEANS)
        numbers = [
            cell(theta),
            cell(units, ".1%"),
            cell(rounds, ".1%"),
            cell(mean(norms.values()), ".3g"),
            cell(change),
        ]
        count = str(len(one.layers.group_of))
        findings.table.append([run.name, one.what, count, *numbers, cell(one.unsteadiness())])
    if len(groups := by_seed(list(found))) > 1:
        draw_runs(findings.file(out / "coefficients.png"), {label: found[group[0]] for label, group in groups.items()})
    return findings


def summary(found: Coefficients) -> dict[str, Any]:
    """Returns the content of ``coefficients.json``."""
    norms, means = found.norm_of_change(), {what: found.means(what) for what in MEANS}
    change = {"values": list(norms.values()), "mean": mean(norms.values()), "unsteadiness": found.unsteadiness()}
    by_layer = {name: {what: values.get(name) for what, values in means.items()} for name in found.layers.group_of}
    start = {"kind": found.kind, "optimise": found.optimise, "norm_of_change": change}
    return start | found.layers.json(mean=by_layer)


def draw_run(path: Path, found: Coefficients, name: str) -> None:
    """Draws theta and beta of each layer by round, the share of beta > 0 by layer, and the relative change."""
    layers, stages = found.layers, list(dict.fromkeys(found.layers.group_of.values()))
    title = f"{name}: InCo's coefficients, a line or points for each deep layer"
    with drawn(path, 10, max(6.4, 3.6 + 0.17 * len(layers.group_of)), title) as figure:
        (theta, beta), (share, change) = figure.subplots(2, 2)
        for axes, what in ((theta, "theta"), (beta, "beta"), (change, "relative_change")):
            style = {"ls": "", "ms": 3.5} if axes is beta else {"lw": 1, "ms": 3, "markevery": _every(layers.rounds)}
            for stage, values in zip(layers.group_of.values(), layers.numbers[what], strict=True):
                known = np.isfinite(values)
                rounds = np.array(layers.rounds)[known]
                axes.plot(rounds, values[known], **look(stages.index(stage), **style), alpha=0.8)
        theta.axhline(1, color="black", ls="--", lw=1, label="without optimisation")
        theta.set(xlabel="round", ylabel=r"$\theta$, mean over units", ylim=(0, None))
        theta.legend(fontsize=8)
        if len(sizes := np.abs(np.concatenate([*layers.rows("beta").values()]))) and sizes.any():
            beta.set_yscale("symlog", linthresh=float(np.quantile(sizes[sizes > 0], 0.1)))
        beta.axhline(0, color="black", lw=0.8)
        beta.set(xlabel="round", ylabel=r"$\beta$, mean over units (signed log)")
        _shares(share, [found], [stages.index(stage) for stage in layers.group_of.values()])
        change.set(xlabel="round", ylabel="norm of change / norm of update", ylim=(0, None))
        legend(figure, {stage: look(at, ms=4) for at, stage in enumerate(stages)}, len(stages))


def _every(rounds: Sequence[int]) -> int:
    """Returns a step so that a long line has about a dozen markers."""
    return max(1, len(rounds) // 12)


def _shares(axes: Axes, runs: Sequence[Coefficients], looks: Sequence[int] | None = None) -> None:
    """Draws the share of beta > 0 by layer, a look for each run, or for each layer."""
    names = list(dict.fromkeys(layer for found in runs for layer in found.layers.group_of))
    for place, found in enumerate(runs):
        for layer, share in found.means("beta_positive").items():
            at = names.index(layer)
            axes.plot(100 * share, at, **look(looks[at] if looks else place))
    axes.axvline(50, color="black", ls="--", lw=1)
    layer_axis(axes, names, 7)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 40), max(high, 60))  # otherwise chance would look like much
    axes.set_xlabel(r"units with $\beta > 0$, mean over rounds, in percent")


def draw_runs(path: Path, runs: Mapping[str, Coefficients]) -> None:
    """Draws the share of beta > 0 by layer where runs have InCo, and the size of what each run adds by round."""
    runs = dict(sorted(runs.items(), key=lambda entry: entry[1].kind))  # InCo first, so that looks agree
    mixed = [found for found in runs.values() if found.kind == "inco"]
    rows = len({layer for found in mixed for layer in found.layers.group_of})
    title = "InCo's coefficients by run" if mixed else "noise on deep layers"
    with drawn(path, 10 if mixed else 5.5, max(3.8, 1.8 + 0.18 * rows), title) as figure:
        *shares, norm = figure.subplots(1, 1 + bool(mixed), squeeze=False)[0]
        for axes in shares:
            _shares(axes, mixed)
        for place, found in enumerate(runs.values()):
            norms = found.norm_of_change()
            norm.plot(list(norms), list(norms.values()), **look(place, markevery=_every(list(norms))))
        norm.set(xlabel="round", ylabel="Frobenius norm of what is added", ylim=(0, None))
        legend(figure, {f"{label} ({one.what})": look(at) for at, (label, one) in enumerate(runs.items())}, 3)
