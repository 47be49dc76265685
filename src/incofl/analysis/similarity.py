"""How similar the models of clients are, at every depth: linear CKA between all pairs on one batch of test examples.

Linear CKA of two representations of the same examples, Kornblith et al., ICML 2019, is the cosine <K, L> / ||K|| ||L||
of the centred Gram matrices K = X X^T and L = Y Y^T. For unrelated representations of few examples and many features it
is far from 0. Nguyen et al., ICLR 2021, therefore use the unbiased HSIC of Song et al., JMLR 2012: the same cosine, of
matrices that are centred in another way (Székely and Rizzo, Annals of Statistics 2014). All of it is in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incofl.analysis.analyze import Findings, Options, evenly
from incofl.analysis.clients import EXAMPLES, Member, Replay, choose, common_points
from incofl.analysis.plots import HEAT, drawn, look
from incofl.analysis.runs import RecordedRun, by_seed
from incofl.data import Examples
from incofl.engine.worker import one_thread
from incofl.errors import ConfigError, RunError
from incofl.seeds import Purpose, torch_rng
from incofl.server import Server
from incofl.statistics import FEWEST_POINTS, Correlation, Estimate, correlation, paired

COLUMNS = 8192  # columns of a representation that are converted to float64 at a time
FEWEST = 4  # examples that the unbiased estimate needs
MOST = 2000  # examples, as matrices of examples by examples are held
MOST_ROWS = 6  # heat maps below each other
TITLE = "CKA between clients' models, mean over pairs; r and rho over the recorded rounds, at the deepest point"
ByDepth = tuple[float | None, ...]  # a mean at each point, from shallow to deep; None where there is no pair


@dataclass(frozen=True)
class Snapshot:
    """The mean similarity after a recorded round."""

    round: int
    mean_by_depth: ByDepth  # over all pairs of clients
    accuracy: float | None  # (or the first metric of the task) of the server on the test set, mean over the levels
    client_accuracy: float  # of the clients' models on the batch, their mean


@dataclass(frozen=True)
class Similarity:
    """The similarity of clients' models in one run."""

    round: int  # from the server after this round the clients trained
    points: tuple[str, ...]  # where models are compared, from shallow to deep
    clients: tuple[Member, ...]  # from the smallest level to the largest
    cka: np.ndarray  # by point, client and client
    mean_by_depth: ByDepth  # over all pairs
    within_level: ByDepth  # over pairs of one level
    between_levels: ByDepth  # over pairs of different levels
    debiased_by_depth: ByDepth  # over all pairs, without the bias of few examples and many features
    examples: int
    history: tuple[Snapshot, ...]  # the recorded rounds
    correlation: dict[str, Correlation]  # of mean CKA and accuracy over these rounds, by point

    @property
    def evaluated(self) -> list[Snapshot]:
        return [entry for entry in self.history if entry.accuracy is not None]

    @property
    def accuracy(self) -> float | None:
        return next(entry.accuracy for entry in self.history if entry.round == self.round)


Lines = Mapping[str, Sequence[ByDepth]]  # mean CKA of seeds, by label
Groups = Mapping[str, Sequence[Similarity]]  # results of seeds, by label


def similarity(run: RecordedRun, options: Options | None = None) -> Similarity:
    """Compares the clients' models of a run."""
    options, replay = options or Options(), Replay(run)
    members, test = choose(run.federation, options.clients), run.federation.data.test
    if len(members) < 2:
        raise RunError(f"{run.path}: has {len(members)} client(s) to compare, expected at least 2")
    if not FEWEST <= options.examples <= MOST:
        raise ConfigError(f"--examples: got {options.examples}, expected a whole number from {FEWEST} to {MOST}")
    drawn_by_seed = torch.randperm(len(test), generator=torch_rng(run.seed, Purpose.ANALYSIS, EXAMPLES))
    batch = test.pick(drawn_by_seed[: options.examples].sort().values)
    last = replay.server(options.round).round
    accuracy = {row["round"]: row["accuracy"] for row in run.rows}
    course = [r for r in replay.rounds if accuracy.get(r) is not None and r != last]
    history = []
    for r in [*evenly(course, options.history - 1), last]:
        options.watch(f"{run.name}: clients after round {r}")
        points, cka, debiased, metric = compare(replay, replay.server(r), members, batch)
        history.append(Snapshot(r, mean_over_pairs(cka), accuracy.get(r), metric))
    history.sort(key=lambda entry: entry.round)
    known = [entry.accuracy for entry in history]
    levels = np.array([member.level for member in members])
    same = levels[:, None] == levels
    return Similarity(
        round=last,
        points=tuple(points),
        clients=tuple(members),
        cka=cka,
        mean_by_depth=mean_over_pairs(cka),
        within_level=mean_over_pairs(cka, same),
        between_levels=mean_over_pairs(cka, ~same),
        debiased_by_depth=mean_over_pairs(debiased),
        examples=len(batch),
        history=tuple(history),
        correlation={p: correlation([e.mean_by_depth[at] for e in history], known) for at, p in enumerate(points)},
    )


def compare(
    replay: Replay, server: Server, members: Sequence[Member], batch: Examples
) -> tuple[list[str], np.ndarray, np.ndarray, float]:
    """Trains the clients and returns the points, CKA and debiased CKA by point and pair, and their mean metric."""
    points = common_points(server.layout, [replay.slice(server, member) for member in members])
    if not points:
        raise RunError(f"{replay.run.path}: its clients' models have no stage or block in common to be compared at")
    grams, metrics = [], []
    with one_thread():
        for member, blocks in zip(members, zip(*points.values(), strict=True), strict=True):
            outputs, metric = replay.outputs(replay.model(server, member), blocks, batch)
            grams.append([gram(output) for output in outputs])
            metrics.append(metric)
        by_point = list(zip(*grams, strict=True))
        plain, debiased = (np.stack([f(own).cpu().numpy() for own in by_point]) for f in (cka_matrix, debiased_matrix))
    return list(points), plain, debiased, float(np.mean(metrics))


def gram(x: Tensor) -> Tensor:
    """Returns the centred Gram matrix (n, n) of a representation (n, p)."""
    if x.dim() != 2 or len(x) < 2:
        raise ConfigError(f"CKA: got shape {tuple(x.shape)}, expected a row for each of at least 2 examples")
    total = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)
    for columns in x.tensor_split(-(-x.shape[1] // COLUMNS), 1):
        part = columns.double()
        part = part - part.mean(0)
        total.addmm_(part, part.T)
    return total


def cka_matrix(grams: Sequence[Tensor]) -> Tensor:
    """Returns the CKA of every pair of representations; not a number where a representation is constant."""
    if len({len(k) for k in grams}) != 1:
        raise ConfigError(f"CKA: got {[len(k) for k in grams]} examples, expected the same examples for all")
    flat = torch.stack([k.flatten() for k in grams])
    products = flat @ flat.T
    norms = products.diagonal().sqrt()
    return products / norms / norms[:, None]


def debiased_matrix(grams: Sequence[Tensor]) -> Tensor:
    """Returns the CKA of every pair by the unbiased HSIC, slightly below 0 at times where there is no similarity."""
    if len(grams[0]) < FEWEST:
        raise ConfigError(f"unbiased CKA: got {len(grams[0])} example(s), expected at least {FEWEST}")
    n, centred = len(grams[0]), []
    for k in (k - k.diag().diag() for k in grams):  # without the diagonal, which stays 0
        rows = k.sum(1) / (n - 2)
        centred.append((k - rows - rows[:, None] + rows.sum() / (n - 1)).fill_diagonal_(0))
    return cka_matrix(centred)


def mean_over_pairs(matrices: np.ndarray, chosen: np.ndarray | None = None) -> ByDepth:
    """Returns for each matrix the mean over (chosen) pairs of different clients; pairs without a value are left out."""
    pairs = np.triu(np.ones(matrices.shape[1:], dtype=bool), 1) & (True if chosen is None else chosen)
    known = [matrix[pairs & np.isfinite(matrix)] for matrix in matrices]
    return tuple(float(values.mean()) if len(values) else None for values in known)


def figures(runs: Sequence[RecordedRun], out: Path, options: Options | None = None) -> Findings:
    """Compares the clients' models of each run, and several runs with each other."""
    findings = Findings(TITLE)
    found = findings.of_each(runs, lambda run: similarity(run, options))
    for run, one in found.items():
        deep = one.correlation[one.points[-1]]
        row = {"run": run.name, "round": one.round, "accuracy": one.accuracy, "from": one.points[0]}
        row |= {"to": one.points[-1], "CKA shallow": one.mean_by_depth[0], "deep": one.mean_by_depth[-1]}
        row |= {"deep, same level": one.within_level[-1], "different levels": one.between_levels[-1]}
        row |= {"deep, debiased": one.debiased_by_depth[-1], "r with accuracy": deep.pearson}
        findings.row(row | {"rho": deep.spearman, "rounds": deep.points})
        findings.json(run, "similarity.json", one)
        lines = {"all pairs": [one.mean_by_depth], "same level": [one.within_level]}
        lines |= {"different levels": [one.between_levels], "all pairs, debiased": [one.debiased_by_depth]}
        title = f"{run.name}: similarity of {len(one.clients)} clients' models after round {one.round}"
        draw(findings, run, title, lines, {run.name: [one]})
        if len(one.evaluated) < FEWEST_POINTS:
            forgotten = f"clients of {run.method} remember what only the last checkpoint has"
            why = forgotten if Replay(run).remembers else "run it with record.every"
            few = f"{len(one.evaluated)} recorded round(s), too few for its course"
            findings.missing.append(f"{run.path}: {few}; {why}")
    if len(found) > 1:
        groups = {group.label: {run: found[run] for run in group.runs} for group in by_seed(list(found))}
        findings.json(out, "similarity.json", compared(groups))
        lines = {label: [one.mean_by_depth for one in members.values()] for label, members in groups.items()}
        title = "similarity of clients' models (bands: 95 % confidence interval over seeds)"
        draw(findings, out, title, lines, {label: list(members.values()) for label, members in groups.items()})
    return findings


def compared(groups: Mapping[str, Mapping[RecordedRun, Similarity]]) -> dict[str, Any]:
    """Returns by setting and depth the mean over seeds, and the difference to the first setting, paired by seed."""
    reference = {run.seed: one for run, one in next(iter(groups.values())).items()}
    settings = {}
    for label, members in groups.items():
        columns = _columns([one.mean_by_depth for one in members.values()])
        both = [(one, reference[run.seed]) for run, one in members.items() if run.seed in reference]
        pairs = [(one.mean_by_depth, other.mean_by_depth) for one, other in both if one.points == other.points]
        settings[label] = {
            "runs": [run.name for run in members],
            "points": next(iter(members.values())).points[: len(columns)],
            "by_depth": [Estimate.of(v) for v in columns],
            "accuracy": [one.accuracy for one in members.values()],
            "seeds_compared": len(pairs),
            "minus_first_by_depth": [paired(*v) for v in zip(*map(_columns, zip(*pairs, strict=True)), strict=True)],
        }
    runs = [one for members in groups.values() for one in members.values()]
    deep = correlation([one.mean_by_depth[-1] for one in runs], [one.accuracy for one in runs])
    return {"settings": settings, "deep_similarity_and_accuracy": deep}


def _columns(rows: Sequence[ByDepth]) -> list[list[float]]:
    """Returns the values of all seeds by point, as far as all have points; not a number where one is unknown."""
    return [[np.nan if value is None else value for value in column] for column in zip(*rows, strict=False)]


def draw(findings: Findings, where: RecordedRun | Path, title: str, lines: Lines, groups: Groups) -> None:
    """Draws the figures of one run, or of several next to each other."""
    names = [members[0].points for members in groups.values()]
    longest: Sequence[str] = max(names, key=len)
    if any(points != longest[: len(points)] for points in names):  # of different models
        longest = [str(number) for number in range(1, len(longest) + 1)]
    draw_by_depth(findings.file(where, "similarity.png"), title, longest, lines)
    draw_heat_maps(findings.file(where, "similarity-heatmaps.png"), groups)
    if courses := {label: members for label, members in groups.items() if len(members[0].evaluated) > 1}:
        draw_against_accuracy(findings.file(where, "similarity-accuracy.png"), longest, courses)


def draw_by_depth(path: Path, title: str, points: Sequence[str], lines: Lines) -> None:
    """Draws mean CKA by depth, a line for each label: the mean over its rows (seeds), with a band."""
    with drawn(path, title, (6.4, 2.8)) as (axes,):
        for place, (label, rows) in enumerate(lines.items()):
            known = {at: Estimate.of(v) for at, v in enumerate(_columns(rows)) if np.isfinite(v).all()}
            mean, half = np.array([(one.mean, one.half_width or 0.0) for one in known.values()]).reshape(-1, 2).T
            name, style = f"{label} ({len(rows)} seeds)" if len(rows) > 1 else label, look(place)
            axes.plot(list(known), mean, **style, ls="--" if "debiased" in label else "-", label=name)
            axes.fill_between(list(known), mean - half, mean + half, color=style["color"], alpha=0.15, lw=0)
        axes.set_xticks(range(len(points)), points, rotation=0 if len(points) < 7 else 40)
        axes.set(xlabel="where the models are compared, from shallow to deep", ylabel="mean CKA", ylim=(0, 1.02))


def draw_heat_maps(path: Path, groups: Groups) -> None:
    """Draws the CKA of every pair of clients, a panel for each point, lines between levels; runs below each other."""
    shown = {label: members[0] for label, members in list(groups.items())[:MOST_ROWS]}
    most, single = max(len(one.points) for one in shown.values()), len(shown) == 1
    title = f"CKA of every pair of clients after round {next(iter(shown.values())).round}, by level"
    with drawn(path, title, (1.9, 2.0), most * len(shown), 4 if single else most) as panels:
        for place, (label, one) in enumerate(shown.items()):
            levels = np.array([member.level for member in one.clients])
            middles = {str(level): float(np.flatnonzero(levels == level).mean()) for level in np.unique(levels)}
            for axes, point, cka in zip(panels[place * most :], one.points, one.cka, strict=False):
                image = axes.imshow(cka, vmin=0, vmax=1, cmap=HEAT)
                for edge in np.flatnonzero(np.diff(levels)) + 0.5:
                    axes.axhline(edge, color="white", lw=0.8)
                    axes.axvline(edge, color="white", lw=0.8)
                axes.set_xticks(list(middles.values()), list(middles))
                axes.set_yticks(list(middles.values()), list(middles))
                axes.set_title(f"{label}: {point}")
                axes.grid(visible=False)
        panels[0].figure.colorbar(image, ax=panels, label="CKA", shrink=0.8)


def draw_against_accuracy(path: Path, points: Sequence[str], groups: Groups) -> None:
    """Draws mean CKA against test accuracy over the recorded rounds, a panel for each point; seeds share a colour."""
    everyone = [one for members in groups.values() for one in members]
    title = "similarity of clients' models against accuracy, by recorded round; scales differ"
    with drawn(path, title, (2.3, 2.4), len(points)) as panels:
        for at, (point, axes) in enumerate(zip(points, panels, strict=False)):
            for place, (label, members) in enumerate(groups.items()):
                entries = [entry for one in members if at < len(one.points) for entry in one.evaluated]
                seen = [(entry.accuracy, y) for entry in entries if (y := entry.mean_by_depth[at]) is not None]
                axes.plot(*np.array(seen).reshape(-1, 2).T, **look(place, ls=""), alpha=0.8, label=label)
            r = everyone[0].correlation[point].pearson if len(everyone) == 1 else None
            axes.set(title=point if r is None else f"{point}: r = {r:.2f}", xlabel="test accuracy", ylabel="mean CKA")
            axes.locator_params(axis="x", nbins=4)
