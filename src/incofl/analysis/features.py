"""The features of one class, as clients of three sizes see it: t-SNE of the inputs of their heads.

Van der Maaten and Hinton, "Visualizing Data using t-SNE", JMLR 2008. Where the sizes see the class alike, their points
mix; where each has a space of its own, they lie apart. A picture by t-SNE can mislead, so a number goes with it: the
share of a point's nearest neighbours, among the features themselves, that belong to the same client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from incofl.analysis.analyze import Findings, Options, cell, own
from incofl.analysis.clients import Member, Replay, choose, watched
from incofl.analysis.plots import drawn, look, panels
from incofl.analysis.runs import RecordedRun, by_seed
from incofl.engine.worker import one_thread
from incofl.errors import RunError
from incofl.inputs import Inputs
from incofl.split import Slice

LABEL = 0  # the class
MOST = 150  # examples of the class
NEIGHBOURS = 10
PERPLEXITY = 30.0
SIZES = 3
MOST_PANELS = 6
TITLE = f"features of one class: share of the {NEIGHBOURS} nearest neighbours that belong to the same client"


@dataclass(frozen=True)
class Features:
    """One class as three clients see it."""

    round: int  # from the server after this round the clients trained
    label: int
    clients: tuple[Member, ...]  # from small to large
    points: np.ndarray  # coordinates of t-SNE by client and example
    own_neighbours: float  # share of the nearest neighbours of a point that belong to its client
    by_chance: float  # the same if the clients' features were mixed


def features(run: RecordedRun, options: Options | None = None) -> Features:
    """Computes the features of the class under clients of the smallest, the middle and the largest level."""
    options, replay = options or Options(), Replay(run)
    members = three_sizes(choose(replay.federation, max(SIZES, len(replay.federation.levels_in_use))))
    test = replay.federation.data.test
    if test.y.dim() != 1 or not replay.federation.task.classes:
        raise RunError(f"{replay.name}: its examples have no class of their own, expected a data set of classes")
    chosen = (test.y == LABEL).nonzero().flatten()[:MOST]
    if len(members) < 2 or len(chosen) * len(members) <= NEIGHBOURS:
        few = f"{len(members)} client(s) and {len(chosen)} test example(s) of class {LABEL}"
        raise RunError(f"{replay.name}: {few} are too few")
    server = replay.server(options.round)
    x, found = replay.federation.data.pipeline.test(test.pick(chosen).x), []
    with one_thread():
        for member in members:
            options.watch(f"{run.name}: features of client {member.client}")
            found.append(head_input(replay, replay.model(server, member), replay.slice(server, member), x))
    size = max(one.shape[1] for one in found)
    rows = np.concatenate([np.pad(one, ((0, 0), (0, size - one.shape[1]))) for one in found])
    if not np.isfinite(rows).all():
        raise RunError(f"{replay.name}: the features of its clients are not finite; the training diverged")
    points = embed(rows, run.seed).reshape(len(members), len(chosen), 2)
    shares = own_neighbours(rows, np.repeat(np.arange(len(members)), len(chosen)))
    return Features(server.round, LABEL, tuple(members), points, *shares)


def three_sizes(members: Sequence[Member]) -> list[Member]:
    """Chooses a client of the smallest, the middle and the largest level; of one level, the first three."""
    levels = sorted({member.level for member in members})
    if len(levels) == 1:
        return list(members[:SIZES])
    wanted = sorted({levels[0], levels[len(levels) // 2], levels[-1]})
    return [next(member for member in members if member.level == level) for level in wanted]


def head_input(replay: Replay, module: nn.Module, slice_: Slice, x: Inputs) -> np.ndarray:
    """Returns the input of a model's last linear layer in server coordinates: 0 in channels that a client lacks."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    with watched(layers, inputs=True) as seen:
        replay.answers(module, x)
    if not seen:
        raise RunError(f"{replay.name}: its model has no linear layer, so its features cannot be told from its answers")
    name, got = seen.popitem()
    weight = f"{name}.weight"
    full = torch.zeros(len(got), replay.federation.model.layout.shapes[weight][-1])
    full[:, slice_.index[weight][-1]] = got.flatten(1).float().cpu()
    return full.numpy()


def own_neighbours(rows: np.ndarray, owner: np.ndarray) -> tuple[float, float]:
    """Returns the share of nearest neighbours that have the same owner, and what it would be by chance."""
    distances = torch.cdist(torch.from_numpy(rows).double(), torch.from_numpy(rows).double())
    distances.fill_diagonal_(torch.inf)
    nearest = distances.topk(NEIGHBOURS, largest=False).indices.numpy()
    share = float((owner[nearest] == owner[:, None]).mean())
    return share, float((np.bincount(owner).mean() - 1) / (len(owner) - 1))


def embed(rows: np.ndarray, seed: int) -> np.ndarray:
    """Returns the rows in a plane."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    tsne = TSNE(2, perplexity=min(PERPLEXITY, (len(rows) - 1) / 3), init="pca", random_state=seed)
    with threadpool_limits(1):  # sums depend on the number of threads that share them
        plane: np.ndarray = tsne.fit_transform(rows)
    return plane


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Draws the features of each run, and those of several runs next to each other."""
    findings = Findings(TITLE, [("run", "round", "class", "clients", "neighbours of the same client", "by chance")])
    found = findings.of_each(runs, lambda run: features(run, options))
    for run, one in found.items():
        findings.json(own(run, "features.json"), one)
        draw(findings.file(own(run, "features.png")), {run.name: one})
        who = ", ".join(str(member.client) for member in one.clients)
        shares = map(cell, (one.own_neighbours, one.by_chance))
        findings.table.append((run.name, str(one.round), str(one.label), who, *shares))
    if len(found) > 1:
        first = {label: found[group[0]] for label, group in by_seed(list(found)).items()}
        draw(findings.file(out / "features.png"), first)
    return findings


def draw(path: Path, found: Mapping[str, Features]) -> None:
    """Draws the points of each client in its colour, a panel for each run."""
    shown = dict(list(found.items())[:MOST_PANELS])
    columns = min(len(shown), 3)
    width, height = max(3.1 * columns + 1.5, 5.4), 3.0 * -(-len(shown) // columns) + 0.7
    different = len({member.level for member in next(iter(shown.values())).clients}) > 1
    sizes = "different sizes" if different else "one size"
    with drawn(path, width, height, f"t-SNE of the features of class {LABEL}, from clients of {sizes}") as figure:
        for axes, (label, one) in zip(panels(figure, len(shown), columns), shown.items(), strict=True):
            for place, (member, points) in enumerate(zip(one.clients, one.points, strict=True)):
                name = f"level {member.level}" if different else f"client {member.client}"
                axes.scatter(points[:, 0], points[:, 1], s=14, **look(place), alpha=0.7, lw=0, label=name)
            axes.set(title=f"{label}: {one.own_neighbours:.0%} own neighbours", xticks=[], yticks=[])
            axes.set(xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", title="a client of" if different else None)
