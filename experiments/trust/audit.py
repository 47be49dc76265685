"""A membership audit of NAME+privacy: what an attacker can learn of one client stays below what the accountant states.

usage: python experiments/trust/audit.py [--trials N] [--rounds R] [--noise Z]

The attacker sees every model of a run, knows all clients but one, and made that one's upload: the canary, a vector of
the largest length that is allowed, at positions that few clients hold, where noise that is sized for the whole cohort
would be too small. It guesses from the moves along the canary whether the client took part. In half of the trials it
does. From the rates of right and wrong guesses follows a lower bound of epsilon, with 95 % confidence (Clopper and
Pearson; half of the trials choose the threshold, the other half judge it).

As a check that the audit can fail, the same is done with a mean that divides by the number of holders in the cohort,
with noise for the whole cohort: there the bound exceeds the stated epsilon.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import beta

from incofl.config import make_config
from incofl.engine.build import build
from incofl.engine.federation import Federation
from incofl.methods.privacy import Privacy, epsilon_of
from incofl.server import Server
from incofl.tensors import Tensors, length
from incofl.upload import Upload

DELTA, COHORT, CLIENTS = 1e-5, 4, 10
CONFIG = {
    "method": "heteroavg+privacy",
    "cohort": COHORT,
    "data": {"clients": CLIENTS, "limit": 300},
    "model": {"name": "tiny-resnet", "options": {"norm": "group"}},
    "split": {"levels": 3},
}


def canary_of(federation: Federation, client: int) -> Upload:
    """An upload of norm 1 at the positions that only the largest level holds."""
    level, layout = federation.level_of(client), federation.model.layout
    slice_, below = federation.slice(level, 0), federation.slice(level - 1, 0)
    update = {
        name: torch.full(shape, 0.0 if name in below.index else 1.0)
        for name, shape in slice_.shapes.items()
        if name in layout.parameters
    }
    total = length(update)
    return Upload(client, level, slice_, {name: value / total for name, value in update.items()}, {}, 10, 1)


def scores(
    federation: Federation, trials: int, rounds: int, noise: float, naive: bool
) -> tuple[list[float], list[float]]:
    """What the attacker measures in trials without and with the canary."""
    rule = federation.method.server
    mean = Privacy(noise=noise, clip=1.0, delta=DELTA)
    client = CLIENTS - 1
    canary = canary_of(federation, client)
    found: tuple[list[float], list[float]] = [], []
    for trial in range(trials):
        member = trial % 2
        server: Server = mean.start(dataclasses.replace(federation.start(), seed=trial))
        score = 0.0
        for round_ in range(rounds):
            server = dataclasses.replace(server, round=round_)
            drawn = [job.client for job in federation.schedule(round_, COHORT, server=server)]
            came = [canary] if member and client in drawn else []
            moved = naive_mean(server, came, noise) if naive else mean.aggregate(rule, server, [came]).shared.values
            score += sum(float((moved[name] * value).sum()) for name, value in full(server, canary).items())
        found[member].append(score)
    return found


def naive_mean(server: Server, uploads: list[Upload], noise: float) -> Tensors:
    """The mean over the holders that came, with noise as for a mean over the whole cohort."""
    rng = torch.Generator().manual_seed(server.seed * 1000 + server.round)
    names = sorted(server.layout.parameters)  # the order of a set differs from process to process
    moved = {name: torch.randn(server.layout.shapes[name], generator=rng) * noise / COHORT for name in names}
    for upload in uploads:
        upload.slice.put(upload.update, moved)  # the only holder
    return moved


def full(server: Server, upload: Upload) -> Tensors:
    """An upload in server coordinates."""
    zeros = {name: torch.zeros(server.layout.shapes[name]) for name in upload.update}
    upload.slice.put(upload.update, zeros)
    return zeros


def lower_bound(without: Sequence[float], with_it: Sequence[float], confidence: float = 0.95) -> float:
    """The least epsilon that such scores are compatible with."""
    thresholds = np.quantile([*without[::2], *with_it[::2]], np.linspace(0.02, 0.98, 97))
    best = max(thresholds, key=lambda t: epsilon_at(without[::2], with_it[::2], t, 0.5))
    return epsilon_at(without[1::2], with_it[1::2], best, confidence)


def epsilon_at(without: Sequence[float], with_it: Sequence[float], threshold: float, confidence: float) -> float:
    """The bound from one threshold: from guesses that the client took part, and from guesses that it did not."""
    level = 1 - (1 - confidence) / 2  # two intervals
    high = [np.array(scores) > threshold for scores in (without, with_it)]
    found = 0.0
    for wrong, right in ((high[0], high[1]), (~high[1], ~high[0])):
        n, m, false, true = len(wrong), len(right), int(wrong.sum()), int(right.sum())
        most_false = float(beta.ppf(level, false + 1, n - false)) if false < n else 1.0
        least_true = float(beta.ppf(1 - level, true, m - true + 1)) if true else 0.0
        if least_true > DELTA:
            found = max(found, math.log((least_true - DELTA) / most_false))
    return found


def audit(trials: int, rounds: int, noise: float) -> dict[str, float]:
    """The stated epsilon, and the lower bounds of what is built and of the naive mean."""
    federation = build(make_config({**CONFIG, "privacy": {"noise": noise}}))
    stated = epsilon_of(noise, DELTA, "poisson", COHORT, CLIENTS, rounds)
    bounds = {
        name: lower_bound(*scores(federation, trials, rounds, noise, name == "naive")) for name in ("ours", "naive")
    }
    return {"stated": stated, **bounds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--noise", type=float, default=2.0)
    given = parser.parse_args()
    result = audit(given.trials, given.rounds, given.noise)
    print(
        f"{given.trials} trials of {given.rounds} rounds, noise {given.noise:g}, {COHORT} of {CLIENTS} clients a round"
    )
    print(f"stated epsilon at delta {DELTA:g}: {result['stated']:.2f}")
    print(f"lower bound, 95 % confidence: {result['ours']:.2f}")
    print(f"lower bound of a mean over the holders that came: {result['naive']:.2f}")
