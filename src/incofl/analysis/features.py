"""The features of one class, as clients of three sizes see it: t-SNE of the inputs of their heads.

Where the sizes see the class alike, their points mix. A picture by t-SNE (van der Maaten and Hinton, JMLR 2008) can
mislead, so a number goes with it: the share of a point's nearest neighbours, among the features themselves, that belong
to the same client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from incofl.analysis.analyze import Findings, Options, first_seeds
from incofl.analysis.clients import Member, Replay, choose, watched
from incofl.analysis.plots import drawn, look
from incofl.analysis.runs import RecordedRun
from incofl.engine.worker import one_thread
from incofl.errors import RunError
from incofl.server import Server
from incofl.tensors import Inputs

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
    options, replay, federation = options or Options(), Replay(run), run.federation
    members, test = three_sizes(choose(federation, max(SIZES, len(federation.levels_in_use)))), federation.data.test
    if test.y.dim() != 1 or not federation.task.classes:
        raise RunError(f"{run.path}: its examples have no class of their own, expected a data set of classes")
    chosen = (test.y == LABEL).nonzero().flatten()[:MOST]
    if len(members) < 2 or len(chosen) * len(members) <= NEIGHBOURS:
        few = f"{len(members)} client(s) and {len(chosen)} test example(s) of class {LABEL}"
        raise RunError(f"{run.path}: {few} are too few")
    server, found = replay.server(options.round), []
    for member in members:
        options.watch(f"{run.name}: features of client {member.client}")
        found.append(head_input(replay, server, member, federation.data.pipeline.test(test.pick(chosen).x)))
    size = max(one.shape[1] for one in found)  # heads of different exits have different inputs
    rows = np.concatenate([np.pad(one, ((0, 0), (0, size - one.shape[1]))) for one in found])
    if not np.isfinite(rows).all():
        raise RunError(f"{run.path}: the features of its clients are not finite; the training diverged")
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


def head_input(replay: Replay, server: Server, member: Member, x: Inputs) -> np.ndarray:
    """Returns the input of a client's last linear layer in server coordinates: 0 in channels that it lacks."""
    with one_thread():
        module = replay.model(server, member)
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
        with watched(layers, inputs=True) as seen:
            replay.answers(module, x)
    if not seen:
        raise RunError(f"{replay.run.path}: its model has no linear layer, whose input would be its features")
    name, got = seen.popitem()
    weight = f"{name}.weight"
    full = torch.zeros(len(got), server.layout.shapes[weight][-1])
    full[:, replay.slice(server, member).index[weight][-1]] = got.flatten(1).float().cpu()
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

    with threadpool_limits(1):  # sums depend on the number of threads that share them
        tsne = TSNE(2, perplexity=min(PERPLEXITY, (len(rows) - 1) / 3), init="pca", random_state=seed)
        return np.asarray(tsne.fit_transform(rows))


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Draws the features of each run, and those of several runs next to each other."""
    findings = Findings(TITLE)
    found = findings.of_each(runs, lambda run: features(run, options))
    for run, one in found.items():
        who = ", ".join(str(member.client) for member in one.clients)
        row = {"run": run.name, "round": one.round, "class": one.label, "clients": who}
        findings.row(row | {"neighbours of the same client": one.own_neighbours, "by chance": one.by_chance})
        findings.json(run, "features.json", one)
        draw(findings.file(run, "features.png"), {run.name: one})
    if len(found) > 1:
        draw(findings.file(out, "features.png"), first_seeds(found))
    return findings


def draw(path: Path, found: Mapping[str, Features]) -> None:
    """Draws the points of each client in its colour, a panel for each run."""
    shown = list(found.items())[:MOST_PANELS]
    different = len({member.level for member in shown[0][1].clients}) > 1
    title = f"t-SNE of the features of class {LABEL}, from clients of {'different sizes' if different else 'one size'}"
    with drawn(path, title, (3.1, 3.0), len(shown), 3) as panels:
        for axes, (label, one) in zip(panels, shown, strict=False):
            for place, (member, points) in enumerate(zip(one.clients, one.points, strict=True)):
                name = f"a client of level {member.level}" if different else f"client {member.client}"
                axes.plot(*points.T, **look(place, ls="", ms=3.5, mew=0), alpha=0.7, label=name)
            axes.set(title=f"{label}: {one.own_neighbours:.0%} own neighbours", xticks=[], yticks=[])
            axes.set(xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
