"""How similar the models of clients are, at every depth: linear CKA between all pairs on one batch of test examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from incofl.analysis.cka import cka_matrix, debiased_matrix, gram
from incofl.analysis.clients import Member, Replay, choose
from incofl.analysis.findings import Options
from incofl.analysis.representations import Point, common_points, draw_examples, last_held, outputs_at
from incofl.analysis.runs import Run
from incofl.data.dataset import Examples
from incofl.engine.worker import one_thread
from incofl.errors import RunError
from incofl.server import Server

FEWEST_ROUNDS = 3  # of which a correlation says something


@dataclass(frozen=True)
class Snapshot:
    """The mean similarity after a recorded round.

    Attributes:
        round: how many rounds were finished.
        mean_by_depth: mean CKA over all pairs of clients, by point.
        accuracy: of the server's models on the test set, the mean over the levels.
        client_accuracy: of the clients' models on the batch, their mean.
    """

    round: int
    mean_by_depth: tuple[float | None, ...]
    accuracy: float | None
    client_accuracy: float


@dataclass(frozen=True)
class Similarity:
    """The similarity of clients' models in one run.

    Attributes:
        round: from the server after so many rounds the clients trained.
        points: where they are compared, from shallow to deep.
        clients: who, from the smallest level to the largest.
        cka: by point, client and client.
        mean_by_depth: over all pairs, by point.
        within_level: over pairs of one level; ``None`` where there is no pair.
        between_levels: over pairs of different levels.
        debiased_by_depth: over all pairs, by the estimate without the bias of few examples and many features.
        examples: of the test set, on which they are compared.
        history: the same over the recorded rounds.
        remembers: whether clients remember something, so that most recorded rounds cannot be computed again.
    """

    round: int
    points: tuple[str, ...]
    clients: tuple[Member, ...]
    cka: np.ndarray
    mean_by_depth: tuple[float | None, ...]
    within_level: tuple[float | None, ...]
    between_levels: tuple[float | None, ...]
    debiased_by_depth: tuple[float | None, ...]
    examples: int
    history: tuple[Snapshot, ...] = ()
    remembers: bool = False

    @property
    def evaluated(self) -> list[Snapshot]:
        """The part of the history for which the accuracy is known."""
        return [entry for entry in self.history if entry.accuracy is not None]

    @property
    def correlation(self) -> dict[str, dict[str, float | int | None]]:
        """Of CKA and accuracy, at each point."""
        accuracy = [entry.accuracy for entry in self.evaluated]
        return {
            point: correlate([entry.mean_by_depth[place] for entry in self.evaluated], accuracy)
            for place, point in enumerate(self.points)
        }

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "round": self.round,
            "points": list(self.points),
            "clients": [vars(member) for member in self.clients],
            "cka": [[[plain(value) for value in row] for row in matrix] for matrix in self.cka],
            **{name: list(getattr(self, name)) for name in MEANS},
            "examples": self.examples,
            "history": [vars(entry) | {"mean_by_depth": list(entry.mean_by_depth)} for entry in self.history],
            "correlation": self.correlation,
        }


MEANS = ("mean_by_depth", "within_level", "between_levels", "debiased_by_depth")


def similarity(run: Run, options: Options | None = None) -> Similarity:
    """Compares the clients' models of a run."""
    options = options or Options()
    replay = Replay(run)
    members = choose(replay.federation, options.clients)
    if len(members) < 2:
        raise RunError(f"{replay.name}: has {len(members)} client(s) to compare, expected at least 2")
    batch = draw_examples(replay.federation, options.examples)
    last = run.recorded[-1] if options.round is None else options.round
    accuracy = {row["round"]: row["accuracy"] for row in run.rows}
    course = [r for r in replay.rounds if accuracy.get(r) is not None and r != last]
    found: dict[int, Compared] = {}
    for r in [last, *spread(course, options.history - 1)]:
        options.watch(f"{run.name}: clients after round {r}")
        found[r] = compare(replay, replay.server(r), members, batch)
    levels = np.array([member.level for member in members])
    same, now = levels[:, None] == levels, found[last]
    return Similarity(
        round=last,
        points=tuple(point.name for point in now.points),
        clients=tuple(members),
        cka=now.cka,
        mean_by_depth=mean_over_pairs(now.cka),
        within_level=mean_over_pairs(now.cka, same),
        between_levels=mean_over_pairs(now.cka, ~same),
        debiased_by_depth=mean_over_pairs(now.debiased),
        examples=len(batch),
        history=tuple(
            Snapshot(r, mean_over_pairs(then.cka), accuracy.get(r), then.accuracy) for r, then in sorted(found.items())
        ),
        remembers=replay.remembers,
    )


@dataclass(frozen=True)
class Compared:
    """Clients' models after one round: CKA by point, client and client, and their mean accuracy."""

    points: list[Point]
    cka: np.ndarray
    debiased: np.ndarray
    accuracy: float


def compare(replay: Replay, server: Server, members: Sequence[Member], batch: Examples) -> Compared:
    """Trains the clients and compares their models on a batch."""
    pieces = [replay.slice(server, member) for member in members]
    layout = replay.federation.model.layout
    points = common_points(layout, pieces)
    if not points:
        raise RunError(f"{replay.name}: its clients' models have no stage or block in common to be compared at")
    grams: list[list[Tensor]] = []
    right = 0
    with one_thread():
        for member, piece in zip(members, pieces, strict=True):
            module = replay.model(server, member)
            outputs, correct = outputs_at(replay, module, [last_held(layout, piece, point) for point in points], batch)
            grams.append([gram(output) for output in outputs])
            right += correct
        by_point = list(zip(*grams, strict=True))
        cka, debiased = (
            np.stack([matrix(own).cpu().numpy() for own in by_point]) for matrix in (cka_matrix, debiased_matrix)
        )
    return Compared(points, cka, debiased, right / (len(members) * batch.y.numel()))


def spread(rounds: Sequence[int], count: int) -> list[int]:
    """At most so many of them, evenly, the first and the last among them."""
    if count < 1:
        return []
    if len(rounds) <= count:
        return list(rounds)
    places = np.linspace(0, len(rounds) - 1, count).round().astype(int) if count > 1 else [len(rounds) - 1]
    return [rounds[place] for place in places]


def mean_over_pairs(matrices: np.ndarray, chosen: np.ndarray | None = None) -> tuple[float | None, ...]:
    """For each matrix the mean over pairs of different clients, of the chosen ones; pairs without a value left out."""
    pairs = np.triu(np.ones(matrices.shape[1:], dtype=bool), 1)
    if chosen is not None:
        pairs &= chosen
    return tuple(
        plain(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else None
        for values in (matrix[pairs] for matrix in matrices)
    )


def correlate(cka: Sequence[float | None], accuracy: Sequence[float | None]) -> dict[str, float | int | None]:
    """Pearson's and Spearman's coefficients, where there are enough different values."""
    pairs = [(a, b) for a, b in zip(cka, accuracy, strict=True) if a is not None and b is not None]
    x, y = np.array(pairs).reshape(-1, 2).T
    if len(pairs) < FEWEST_ROUNDS or np.ptp(x) == 0 or np.ptp(y) == 0:
        return {"pearson": None, "spearman": None, "rounds": len(pairs)}
    return {
        "pearson": plain(stats.pearsonr(x, y).statistic),
        "spearman": plain(stats.spearmanr(x, y).statistic),
        "rounds": len(pairs),
    }


def plain(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return round(float(value), 6) if math.isfinite(value) else None
