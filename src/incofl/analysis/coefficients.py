"""InCo's coefficients over a run, from its ``metrics.jsonl`` alone: theta, beta, and the size of the change.

For each deep layer and round the run has recorded, over the units of ``inco.granularity`` (kernels, or the tensor):

    theta            the mean weight of the shallow layer's update; 1 without optimisation
    beta             the mean of <g_0, g_k>
    beta_positive    the share of units with beta > 0
    norm_change      the Frobenius norm of what InCo adds to the update; norm_deep that of the update before

Runs with ``+noise`` have norm_change and norm_deep too: of Gaussian noise in the place of InCo.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from incofl.analysis.runs import Run

Kind = Literal["inco", "noise"]
FIELDS: dict[Kind, tuple[str, ...]] = {
    "inco": ("theta", "beta", "beta_positive", "norm_deep", "norm_shallow", "norm_change"),
    "noise": ("norm_deep", "norm_change"),
}


@dataclass(frozen=True)
class Coefficients:
    """What the transform of a run recorded.

    Attributes:
        kind: ``inco`` or ``noise``.
        optimise: whether theta was computed; false: the ablation without optimisation, in which it is 1.
        layers: per deep layer and number its value in each round; a round in which the layer was not mixed is left out.
            Layers that levels have for themselves are named with their level.
    """

    kind: Kind
    optimise: bool
    layers: Mapping[str, Mapping[str, Mapping[int, float]]]


def coefficients(run: Run) -> Coefficients | None:
    """Reads them; none for a run whose method has neither InCo nor noise."""
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
    return Coefficients(kind, kind == "inco" and run.config.inco.optimise, layers)


@dataclass(frozen=True)
class OfLayer:
    """A layer over all rounds.

    Attributes:
        theta: mean over the rounds.
        beta: likewise.
        beta_positive: mean share of units with beta > 0.
        rounds_positive: share of rounds in which the mean of beta is above 0.
        relative_change: mean of norm_change / norm_deep.
    """

    theta: float | None
    beta: float | None
    beta_positive: float | None
    rounds_positive: float | None
    relative_change: float | None


def of_layer(layer: Mapping[str, Mapping[int, float]]) -> OfLayer:
    """Means over the rounds."""

    def mean(values: Sequence[float]) -> float | None:
        return float(np.mean(values)) if values else None

    beta = list(layer.get("beta", {}).values())
    deep, change = layer.get("norm_deep", {}), layer.get("norm_change", {})
    return OfLayer(
        theta=mean(list(layer.get("theta", {}).values())),
        beta=mean(beta),
        beta_positive=mean(list(layer.get("beta_positive", {}).values())),
        rounds_positive=mean([float(value > 0) for value in beta]),
        relative_change=mean([change[round] / deep[round] for round in change if deep.get(round)]),
    )


def norm_of_change(found: Coefficients) -> dict[int, float]:
    """The Frobenius norm of the change of all layers together, by round."""
    squares: dict[int, float] = {}
    for layer in found.layers.values():
        for round, norm in layer.get("norm_change", {}).items():
            squares[round] = squares.get(round, 0.0) + norm**2
    return {round: square**0.5 for round, square in sorted(squares.items())}


def unsteadiness(norms: Mapping[int, float]) -> float | None:
    """The mean size of the change of a norm from a round to the next, over its mean: 0 for a constant."""
    values = np.array([norms[round] for round in sorted(norms)])
    return float(np.abs(np.diff(values)).mean() / values.mean()) if len(values) > 1 and values.mean() > 0 else None


def summary(found: Coefficients) -> dict[str, Any]:
    """What ``coefficients.json`` holds."""
    norms = norm_of_change(found)
    return {
        "kind": found.kind,
        "optimise": found.optimise,
        "norm_of_change": {
            "rounds": list(norms),
            "values": list(norms.values()),
            "mean": float(np.mean(list(norms.values()))) if norms else None,
            "unsteadiness": unsteadiness(norms),
        },
        "layers": {
            name: asdict(of_layer(layer))
            | {"by_round": {field: {str(r): v for r, v in values.items()} for field, values in layer.items()}}
            for name, layer in found.layers.items()
        },
    }
