"""The figures of InCo's coefficients: of one run, and of runs with and without optimisation or with noise."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from incofl.analysis.coefficients import Coefficients, norm_of_change, of_layer
from incofl.analysis.plots import colour, drawn, marker


def draw_run(path: Path, found: Coefficients, stage_of: Mapping[str, int], name: str) -> None:
    """Theta and beta of each layer over the rounds, share of beta > 0 by layer, relative size of the change.

    Args:
        path: of the picture.
        found: what the run recorded.
        stage_of: of each layer, for its colour.
        name: of the run.
    """
    title = f"{name}: InCo's coefficients, a line or points for each deep layer"
    with drawn(path, 10, max(6.4, 3.6 + 0.17 * len(found.layers)), title) as figure:
        (theta, beta), (share, change) = figure.subplots(2, 2)
        for layer, values in found.layers.items():
            hue = colour(stage_of[layer])
            for axes, series in ((theta, values["theta"]), (beta, values["beta"]), (change, _relative(values))):
                rounds, mark = list(series), marker(stage_of[layer])
                style = {"ls": "", "ms": 3.5} if axes is beta else {"lw": 1, "ms": 3, "markevery": _every(rounds)}
                axes.plot(rounds, list(series.values()), color=hue, marker=mark, alpha=0.8, **style)
        theta.axhline(1, color="black", ls="--", lw=1, label="without optimisation")
        theta.set(xlabel="round", ylabel=r"$\theta$, mean over units", ylim=(0, None))
        theta.legend(fontsize=8)
        sizes = [abs(v) for values in found.layers.values() for v in values["beta"].values() if v]
        if sizes:
            beta.set_yscale("symlog", linthresh=float(np.quantile(sizes, 0.1)))
        beta.axhline(0, color="black", lw=0.8)
        beta.set(xlabel="round", ylabel=r"$\beta$, mean over units (signed log)")
        _shares(share, {name: found}, {name: 0}, stage_of)
        change.set(xlabel="round", ylabel="norm of change / norm of update", ylim=(0, None))
        stages = sorted({stage_of[layer] for layer in found.layers})
        handles = [
            Line2D([], [], color=colour(stage), marker=marker(stage), ms=4, label=f"stage {stage + 1}")
            for stage in stages
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _every(rounds: Sequence[int]) -> int:
    """So that a long line has about a dozen markers."""
    return max(1, len(rounds) // 12)


def _relative(layer: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    deep = layer["norm_deep"]
    return {round: norm / deep[round] for round, norm in layer["norm_change"].items() if deep.get(round)}


def _shares(
    axes: Axes, runs: Mapping[str, Coefficients], places: Mapping[str, int], stage_of: Mapping[str, int] | None = None
) -> None:
    """Share of beta > 0 by layer, a mark for each run, coloured by stage if there is one run."""
    names = list(dict.fromkeys(layer for found in runs.values() for layer in found.layers))
    for label, found in runs.items():
        for layer, values in found.layers.items():
            if (share := of_layer(values).beta_positive) is not None:
                place = places[label]
                hue = colour(place if stage_of is None else stage_of[layer])
                axes.plot(100 * share, names.index(layer), marker(place), color=hue, ms=5)
    axes.axvline(50, color="black", ls="--", lw=1)
    axes.set_yticks(range(len(names)), [name.removesuffix(".weight") for name in names], fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 40), max(high, 60))  # else chance would look like much
    axes.set_xlabel(r"units with $\beta > 0$, mean over rounds, in percent")


def draw_runs(path: Path, runs: Mapping[str, Coefficients]) -> None:
    """Several runs: share of beta > 0 by layer where there is InCo, and the size of what was added by round."""
    mixed = {label: found for label, found in runs.items() if found.kind == "inco"}
    rows = len({layer for found in mixed.values() for layer in found.layers})
    title = "InCo's coefficients by run" if mixed else "noise on deep layers"
    places = {label: place for place, label in enumerate(runs)}
    with drawn(path, 10 if mixed else 5.5, max(3.8, 1.8 + 0.18 * rows), title) as figure:
        norm = figure.subplots(1, 1 + bool(mixed), squeeze=False)[0]
        if mixed:
            _shares(norm[0], mixed, places)
        for label, found in runs.items():
            norms, place = norm_of_change(found), places[label]
            hue, every = colour(place), _every(list(norms))
            norm[-1].plot(list(norms), list(norms.values()), color=hue, marker=marker(place), markevery=every)
        norm[-1].set(xlabel="round", ylabel="Frobenius norm of what is added", ylim=(0, None))
        handles = [
            Line2D([], [], color=colour(place), marker=marker(place), label=f"{label} ({_what(runs[label])})")
            for label, place in places.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)))


def _what(found: Coefficients) -> str:
    if found.kind == "noise":
        return "noise"
    return "InCo" if found.optimise else "InCo without optimisation"
