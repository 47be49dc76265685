"""Populations of any size."""

import numpy as np
import pytest
import torch

from incofl.data.partition import VirtualPartition
from incofl.engine.federation import ClientLevels
from tests.federations import run_rounds, tiny_federation

LABELS = torch.arange(5_000) % 10


def partition(alpha: float = 0.5, clients: int = 1_000_000) -> VirtualPartition:
    return VirtualPartition(LABELS, clients, alpha, 100, lambda client: np.random.default_rng((3, client)))


def test_a_client_is_always_the_same_and_unlike_others() -> None:
    first, again, other = partition()[999_999], partition()[999_999], partition()[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first) == 100
    assert 0 <= int(first.min()) <= int(first.max()) < len(LABELS)
    assert len(partition()) == 1_000_000
    with pytest.raises(IndexError):
        partition()[1_000_000]


def test_examples_are_drawn_class_by_class() -> None:
    """Shares by Dirichlet, numbers by these shares, then of each class so many with replacement, from one stream."""
    rng = np.random.default_rng((3, 7))
    counts = rng.multinomial(100, rng.dirichlet(np.full(10, 0.5)))
    members = [np.flatnonzero(LABELS.numpy() == c) for c in range(10)]
    by_hand = [own[rng.integers(0, len(own), n)] for own, n in zip(members, counts, strict=True) if n]
    assert partition()[7].tolist() == np.concatenate(by_hand).tolist()


def test_alpha_means_what_it_says() -> None:
    """Mean share of a client's most frequent class: near 1 for a tiny alpha, near 0.1 for a large one."""

    def top(alpha: float) -> float:
        parts = partition(alpha)[:200]
        return float(np.mean([int(torch.bincount(LABELS[part]).max()) / 100 for part in parts]))

    assert top(0.01) > 0.9
    assert top(1000.0) < 0.2
    assert 0.35 < top(0.5) < 0.55


def test_levels_by_counts() -> None:
    levels = ClientLevels.grouped((2, 0, 3))
    assert [levels[client] for client in range(5)] == [0, 0, 2, 2, 2]
    assert len(levels) == 5
    with pytest.raises(IndexError):  # or a loop over it would never end
        levels[5]


def test_a_million_clients_train() -> None:
    federation = tiny_federation("data.partition=virtual", "data.clients=1000000", "data.examples=20")
    assert len(federation.levels) == 1_000_000
    assert federation.levels.counts == (333_334, 333_333, 333_333)
    assert [federation.levels[c] for c in (0, 333_333, 333_334, 999_999)] == [0, 0, 1, 2]
    jobs = federation.schedule(0, 50)
    assert len({job.client for job in jobs}) == 50
    assert max(job.client for job in jobs) > 100_000
    first, last = (run_rounds(federation, 1)[i] for i in (0, -1))
    assert not torch.equal(first.shared["fc.bias"], last.shared["fc.bias"])
