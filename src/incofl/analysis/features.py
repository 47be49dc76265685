"""The feature space of one class, as clients of three sizes see it: t-SNE of what their heads get.

Van der Maaten and Hinton, "Visualizing Data using t-SNE", JMLR 2008. Where the sizes see the class alike, their points
mix; where each has a space of its own, they lie apart. A picture by t-SNE can mislead, so a number goes with it: of the
nearest neighbours of a point among the features themselves, how many belong to the same client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from incofl.analysis.clients import Member, Replay, choose
from incofl.analysis.findings import Findings, Options, of_each, own_folder
from incofl.analysis.groups import by_seed
from incofl.analysis.plots import colour, drawn, marker, panels
from incofl.analysis.runs import Run
from incofl.engine.checkpoint import write_json
from incofl.engine.worker import one_thread
from incofl.errors import RunError
from incofl.split import Slice
from incofl.split.slice import Index

MOST = 150  # examples of the class
NEIGHBOURS = 10
PERPLEXITY = 30.0
SIZES = 3
MOST_PANELS = 6


@dataclass(frozen=True)
class Features:
    """One class as three clients see it.

    Attributes:
        round: from the server after so many rounds the clients trained.
        label: the class.
        clients: who, from small to large.
        points: by client and example, the coordinates of t-SNE.
        own_neighbours: share of the nearest neighbours of a point that belong to its client.
        by_chance: the same if the clients were mixed.
    """

    round: int
    label: int
    clients: tuple[Member, ...]
    points: np.ndarray
    own_neighbours: float
    by_chance: float

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        clients = [
            vars(member) | {"points": np.round(own, 3).tolist()}
            for member, own in zip(self.clients, self.points, strict=True)
        ]
        numbers = {"own_neighbours": round(self.own_neighbours, 6), "by_chance": round(self.by_chance, 6)}
        return {"round": self.round, "class": self.label, "clients": clients, **numbers}


def features(run: Run, options: Options | None = None, label: int = 0) -> Features:
    """The features of a class under clients of the smallest, the middle and the largest level."""
    options = options or Options()
    replay = Replay(run)
    members = three_sizes(choose(replay.federation, max(SIZES, len(replay.federation.levels_in_use))))
    test = replay.federation.data.test
    if test.y.dim() != 1:
        raise RunError(f"{replay.name}: its texts have no class of their own, expected a data set of classes")
    chosen = (test.y == label).nonzero().flatten()[:MOST]
    if len(members) < 2 or len(chosen) * len(members) <= NEIGHBOURS:
        raise RunError(
            f"{replay.name}: {len(members)} client(s) and {len(chosen)} test example(s) of class {label} are too few"
        )
    server = replay.server(run.recorded[-1] if options.round is None else options.round)
    x = replay.federation.data.pipeline.test(test.x[chosen])
    found = []
    with one_thread():
        for member in members:
            options.watch(f"{run.name}: features of client {member.client}")
            module, piece = replay.model(server, member), replay.slice(server, member)
            found.append(head_input(replay, module, piece, x))
    size = max(own.shape[1] for own in found)
    rows = np.concatenate([np.pad(own, ((0, 0), (0, size - own.shape[1]))) for own in found])
    if not np.isfinite(rows).all():
        raise RunError(f"{replay.name}: the features of its clients are not finite; the training diverged")
    own, chance = own_neighbours(rows, np.repeat(np.arange(len(members)), len(chosen)))
    points = embed(rows, run.config.seed).reshape(len(members), len(chosen), 2)
    return Features(server.round, label, tuple(members), points, own, chance)


def three_sizes(members: Sequence[Member]) -> list[Member]:
    """A client of the smallest, the middle and the largest level; of one level, the first three."""
    levels = sorted({member.level for member in members})
    if len(levels) == 1:
        return list(members[:SIZES])
    wanted = sorted({levels[0], levels[len(levels) // 2], levels[-1]})
    return [next(member for member in members if member.level == level) for level in wanted]


def head_input(replay: Replay, module: nn.Module, piece: Slice, x: Tensor) -> np.ndarray:
    """What the last linear layer of a model gets, where the server has it: 0 in channels that a client lacks."""
    seen: list[tuple[str, Tensor]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: seen.append((name, inputs[0])))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        replay.logits(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise RunError(f"{replay.name}: its model has no linear layer, so its features cannot be told from its answers")
    name, got = seen[-1]
    weight = f"{name}.weight"
    whole = replay.federation.model.layout.shapes[weight][-1]
    full = torch.zeros(len(x), whole)
    index: Index = piece.index[weight][-1]
    full[:, index] = got.flatten(1).float().cpu()
    return full.numpy()


def own_neighbours(rows: np.ndarray, owner: np.ndarray) -> tuple[float, float]:
    """The share of nearest neighbours of the same owner, and what it would be by chance."""
    distances = torch.cdist(torch.from_numpy(rows).double(), torch.from_numpy(rows).double())
    distances.fill_diagonal_(torch.inf)
    nearest = distances.topk(NEIGHBOURS, largest=False).indices.numpy()
    share = float((owner[nearest] == owner[:, None]).mean())
    return share, float((np.bincount(owner).mean() - 1) / (len(owner) - 1))


def embed(rows: np.ndarray, seed: int) -> np.ndarray:
    """The rows in a plane."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    tsne = TSNE(2, perplexity=min(PERPLEXITY, (len(rows) - 1) / 3), init="pca", random_state=seed)
    with threadpool_limits(1):  # sums depend on how many threads share them
        plane: np.ndarray = tsne.fit_transform(rows)
    return plane


def figures(runs: Sequence[Run], out: Path, options: Options | None = None) -> Findings:
    """Of each run its features, of several runs their pictures beside each other."""
    files: list[Path] = []
    found, missing = of_each("features", runs, lambda run: features(run, options))
    analysed = [run for run in runs if run.folder.path in found]
    for run in analysed:
        folder, result = own_folder(run), found[run.folder.path]
        files += [folder / "features.json", folder / "features.png"]
        write_json(files[-2], result.to_json())
        draw(files[-1], {run.name: result})
    if len(analysed) > 1:
        files.append(out / "features.png")
        draw(files[-1], {label: found[group[0].folder.path] for label, group in by_seed(analysed).items()})
    table = [("run", "round", "class", "clients", "neighbours of the same client", "by chance")]
    for run in analysed:
        one = found[run.folder.path]
        who = ", ".join(str(member.client) for member in one.clients)
        table.append(
            (run.name, str(one.round), str(one.label), who, f"{one.own_neighbours:.3f}", f"{one.by_chance:.3f}")
        )
    title = f"features of one class: share of the {NEIGHBOURS} nearest neighbours that belong to the same client"
    return Findings(title, table, files, missing)


def draw(path: Path, found: Mapping[str, Features]) -> None:
    """The points of each client in its colour, a panel for each run."""
    shown = dict(list(found.items())[:MOST_PANELS])
    columns = min(len(shown), 3)
    width, height = max(3.1 * columns + 1.5, 5.4), 3.0 * -(-len(shown) // columns) + 0.7
    first = next(iter(shown.values()))
    different = len({member.level for member in first.clients}) > 1
    sizes = "clients of different sizes" if different else "clients of one size"
    title = f"t-SNE of the features of class {first.label}, from {sizes}"
    with drawn(path, width, height, title) as figure:
        for axes, (label, one) in zip(panels(figure, len(shown), columns), shown.items(), strict=True):
            for place, (member, points) in enumerate(zip(one.clients, one.points, strict=True)):
                (x, y), name = points.T, f"level {member.level}" if different else f"client {member.client}"
                axes.scatter(x, y, s=14, color=colour(place), marker=marker(place), alpha=0.7, lw=0, label=name)
            axes.set(title=f"{label}: {one.own_neighbours:.0%} own neighbours", xticks=[], yticks=[])
            axes.set(xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", title="a client of" if different else None)
