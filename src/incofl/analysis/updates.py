"""The aggregated updates of a run: what its rounds did to shallow and deep layers.

The update of a round is the difference of the recorded server states before and after it; the paper calls it gradient.
It needs states of consecutive rounds: ``record.every = 1``, or ``record.window`` for some of them. Where levels keep a
layer for themselves (all of ``fedavg``'s), the update is the mean of what the levels see, at every position over the
clients of the cohort that hold it.

The layers are those that InCo pairs: ``Layout.shallow`` says for each deep layer which shallow one of the same shape
belongs to it. All that share one are a group: a stage of a ResNet, a block of a ViT.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from incofl.aggregate import Accumulator
from incofl.analysis.runs import Run
from incofl.analysis.smoothness import Array, Shape, describe, floor, quantiles, step
from incofl.analysis.trials import SignTest, sign_test
from incofl.engine.build import build_splitter, client_levels
from incofl.errors import RunError
from incofl.layout import Layout
from incofl.methods import find_method
from incofl.server import Server
from incofl.split import Slice, Splitter
from incofl.tensors import Tensors

Window = tuple[int, int]
MEASURES = ("roughness", "kurtosis", "step", "width")  # of each, less is smoother
NUMBERS = ("elements", "roughness", "kurtosis", "mean", "deviation", "quantiles")


def groups(layout: Layout) -> dict[str, list[str]]:
    """Each shallow layer with the deep ones that belong to it, from shallow to deep."""
    found: dict[str, list[str]] = {}
    for deep, shallow in layout.shallow.items():
        found.setdefault(shallow, []).append(deep)
    return found


def groups_of(layout: Layout) -> dict[str, str]:
    """Each layer that InCo pairs with the shallow one of its group; in groups, the shallow one first."""
    return {name: shallow for shallow, deep in groups(layout).items() for name in (shallow, *deep)}


def update_rounds(run: Run, window: Window | None = None) -> list[int]:
    """The rounds whose update can be told: the states before and after them were recorded.

    Args:
        run: of which they are.
        window: first and last round to look at; left out, all.
    """
    kept = set(run.recorded)
    first, last = window or (1, max(kept))
    rounds = [round for round in sorted(kept) if round - 1 in kept and first <= round <= last]
    if not rounds:
        raise RunError(
            f"{run.folder.path}: no two states of consecutive rounds from {first - 1} to {last} were recorded; "
            "run it with record.every=1 or record.window"
        )
    return rounds


def updates(run: Run, names: Collection[str], rounds: Sequence[int]) -> Iterator[tuple[int, Tensors]]:
    """The aggregated updates of some parameters, round by round; each state is read once."""
    cohorts = {row["round"]: row["clients"] for row in run.rows}
    splitter = build_splitter(run.config, run.model)
    after: Server | None = None
    for round in rounds:
        before = after if after is not None and after.round == round - 1 else run.server(round - 1)
        after = run.server(round)
        yield round, update_between(before, after, names, _holders(run, splitter, cohorts[round], round))


def update_between(
    before: Server, after: Server, names: Collection[str], holders: Mapping[int, tuple[Slice, int]]
) -> Tensors:
    """What a round did to some parameters.

    Args:
        before: the server before it.
        after: and after it.
        names: of the parameters.
        holders: per level of the cohort its slice, and how many clients it had; a layer that levels have for
            themselves is averaged over them.
    """
    private = {name for own in after.private.values() for name in own} & set(names)
    update = {name: after.shared[name] - before.shared[name] for name in names if name not in private}
    mean = Accumulator(before.layout)
    for level, (piece, clients) in holders.items():
        old, new = before.state(level), after.state(level)
        change = {name: new[name] - old[name] for name in private}
        mean.add(Part(piece, piece.look(change), clients))
    averaged = mean.mean().values
    return update | {name: averaged[name] for name in private if name in averaged}


def _holders(run: Run, splitter: Splitter, clients: Sequence[int], round: int) -> dict[int, tuple[Slice, int]]:
    """Per level of a cohort its slice and how many clients it had; needs no data files."""
    levels = client_levels(run.config, len(splitter.depths))
    fixed = {"smallest": 0, "largest": len(splitter.depths) - 1}.get(find_method(run.config.method).level)
    cohort = Counter(levels[client] if fixed is None else fixed for client in clients)
    return {level: (splitter.slice(run.layout, level, round - 1), count) for level, count in sorted(cohort.items())}


@dataclass(frozen=True)
class Layer:
    """The updates of one layer over the rounds.

    Attributes:
        group: the name of the shallow layer that it belongs to; its own if it is one.
        shapes: by round; a round in which nobody trained it is left out.
        steps: by round, how far the shape of its distribution is from that of the round before.
        widths: by round, the size of the base-2 logarithm of its width over that of the round before.
    """

    group: str
    shapes: Mapping[int, Shape]
    steps: Mapping[int, float]
    widths: Mapping[int, float]

    @property
    def floor(self) -> float:
        """The roughness that as many normal numbers have by chance."""
        return floor(max(shape.elements for shape in self.shapes.values()))

    def measure(self, what: str) -> dict[int, float]:
        """One of ``MEASURES`` by round."""
        if what in ("step", "width"):
            return dict(self.steps if what == "step" else self.widths)
        # A needle and a box are both unlike a bell, so of the kurtosis the size counts.
        return {round: abs(float(getattr(shape, what))) for round, shape in self.shapes.items()}


def layers(run: Run, rounds: Sequence[int]) -> dict[str, Layer]:
    """Describes the updates of all layers that InCo pairs, in groups, the shallow one first.

    Groups of which only shallow or only deep layers can be described are left out.
    """
    group_of = groups_of(run.layout)
    shapes: dict[str, dict[int, Shape]] = {name: {} for name in group_of}
    steps: dict[str, dict[int, float]] = {name: {} for name in group_of}
    widths: dict[str, dict[int, float]] = {name: {} for name in group_of}
    last: dict[str, Array] = {}
    for round, update in updates(run, group_of, rounds):
        for name, value in update.items():
            if (described := describe(value.numpy())) is None:
                continue
            shapes[name][round], z = described
            reference = quantiles(z)
            if round - 1 in shapes[name]:
                steps[name][round] = step(last[name], reference)
                widths[name][round] = abs(math.log2(shapes[name][round].scale / shapes[name][round - 1].scale))
            last[name] = reference
    compared = {
        group_of[name] for name in group_of if name != group_of[name] and shapes[name] and shapes[group_of[name]]
    }
    return {
        name: Layer(group, shapes[name], steps[name], widths[name])
        for name, group in group_of.items()
        if shapes[name] and group in compared
    }


@dataclass(frozen=True)
class Smoother:
    """How often the update of the shallow layer is smoother than that of a deep one, by one measure.

    Attributes:
        pairs: the test over all pairs of a deep layer and a round. Rounds of a run are not independent, so its p-value
            is too small.
        layers: the careful test: a deep layer has one vote, the median over its rounds.
        by_group: the share of pairs in each group.
    """

    pairs: SignTest
    layers: SignTest
    by_group: Mapping[str, float]


def shallow_smoother(found: Mapping[str, Layer], what: str) -> Smoother:
    """Tests the paper's observation that updates of shallow layers are smoother than those of deep ones."""
    excess: dict[str, list[float]] = {}  # of each deep layer over its shallow one, round by round
    for name, layer in found.items():
        if name != layer.group and layer.group in found:
            shallow, deep = found[layer.group].measure(what), layer.measure(what)
            excess[name] = [deep[round] - shallow[round] for round in deep.keys() & shallow.keys()]
    excess = {name: values for name, values in excess.items() if values}
    by_group: dict[str, list[float]] = {}
    for name, values in excess.items():
        by_group.setdefault(found[name].group, []).extend(values)
    return Smoother(
        pairs=sign_test([value for values in excess.values() for value in values]),
        layers=sign_test([float(np.median(values)) for values in excess.values()]),
        by_group={group: float(np.mean(np.array(values) > 0)) for group, values in by_group.items()},
    )


def summary(found: Mapping[str, Layer], rounds: Sequence[int]) -> dict[str, Any]:
    """What ``updates.json`` holds."""

    def described(name: str, layer: Layer) -> dict[str, Any]:
        return {
            "group": layer.group,
            "role": "shallow" if name == layer.group else "deep",
            "floor": layer.floor,
            "rounds": list(layer.shapes),
            **{key: [getattr(s, key) for s in layer.shapes.values()] for key in NUMBERS},
            "step": [layer.steps.get(round) for round in layer.shapes],
            "width": [layer.widths.get(round) for round in layer.shapes],
        }

    return {
        "rounds": list(rounds),
        "layers": {name: described(name, layer) for name, layer in found.items()},
        "shallow_smoother": {what: asdict(shallow_smoother(found, what)) for what in MEASURES},
    }
