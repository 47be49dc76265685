"""Every example belongs to exactly one client, and alpha means what it says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from incofl.data.partition import make_partition, natural_partition
from incofl.errors import DataError

LABELS = torch.arange(5_000) % 10


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.integers(1, 60), st.sampled_from(["iid", "dirichlet"]), st.floats(0.3, 10), st.integers(0, 10**6))
def test_all_indices_exactly_once(clients: int, kind: str, alpha: float, seed: int) -> None:
    parts = make_partition(LABELS, clients, kind, alpha, rng(seed))  # type: ignore[arg-type]
    assert len(parts) == clients
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(LABELS)))
    assert min(map(len, parts)) >= 10


@pytest.mark.parametrize(("examples", "least"), [(1_000, 10), (100, 2)])
def test_nobody_gets_fewer_than_ten_examples_or_half_a_fair_share(examples: int, least: int) -> None:
    """20 clients at alpha 0.2: one draw leaves somebody with less nearly always, so it is drawn again."""
    smallest = [min(map(len, make_partition(LABELS[:examples], 20, "dirichlet", 0.2, rng(seed)))) for seed in range(20)]
    assert min(smallest) == least


def test_iid_shares_are_equal() -> None:
    assert {len(part) for part in make_partition(LABELS, 30, "iid", 0.5, rng())} == {166, 167}


def top_share(alpha: float) -> float:
    """Mean share of a client's most frequent class."""
    parts = make_partition(torch.arange(50_000) % 10, 100, "dirichlet", alpha, rng())
    shares = [float(torch.bincount(torch.arange(50_000)[part] % 10).max()) / len(part) for part in parts]
    return float(np.mean(shares))


def test_skew_is_that_of_the_papers_partitions() -> None:
    """50,000 examples, 100 clients: 0.42 at alpha 0.5 and 0.31 at alpha 1 in the files the paper used."""
    assert top_share(0.5) == pytest.approx(0.42, abs=0.03)
    assert top_share(1.0) == pytest.approx(0.31, abs=0.03)
    assert top_share(1000.0) < 0.15


def test_the_same_seed_gives_the_same_partition() -> None:
    first, second = (make_partition(LABELS, 10, "dirichlet", 0.5, rng(4)) for _ in range(2))
    other = make_partition(LABELS, 10, "dirichlet", 0.5, rng(5))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_more_clients_than_examples() -> None:
    with pytest.raises(DataError, match=r"data.clients: got 5001, expected at most 5000"):
        make_partition(LABELS, 5001, "iid", 0.5, rng())


def test_an_impossible_skew_ends_with_advice() -> None:
    with pytest.raises(
        DataError, match=r"data.alpha: got 0.001 for 100 clients.*raise data.alpha or lower data.clients"
    ):
        make_partition(LABELS, 100, "dirichlet", 0.001, rng())


class TestNatural:
    groups = torch.tensor([0, 1, 1, 2, 2, 2, 3, 1])

    def test_the_largest_parts_in_a_random_order(self) -> None:
        parts = natural_partition(self.groups, 2, np.random.default_rng(0))
        assert sorted(part.tolist() for part in parts) == [[1, 2, 7], [3, 4, 5]]
        orders = {tuple(len(p) for p in natural_partition(self.groups, 4, np.random.default_rng(s))) for s in range(9)}
        assert len(orders) > 1  # or the largest parts would all go to the smallest clients

    def test_refused(self) -> None:
        rng = np.random.default_rng(0)
        with pytest.raises(DataError, match=r"data.clients: got 5, expected at most 4"):
            natural_partition(self.groups, 5, rng)
        with pytest.raises(DataError, match=r"data.partition: got 'natural', expected 'dirichlet', 'iid' or 'virtual'"):
            natural_partition(None, 5, rng)
        with pytest.raises(DataError, match=r"data.partition: got 'dirichlet', expected 'natural' or 'iid'"):
            make_partition(torch.zeros(8, 3, dtype=torch.long), 2, "dirichlet", 0.5, rng)
