import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from incofl.statistics import (
    Estimate,
    correlation,
    holm,
    paired,
    sign_test,
    student_quantile,
    tail,
    tail_mean,
    tail_name,
    visible_effect,
)

# Two-sided 95 % points of Student's t, as printed in tables (six to ten digits).
TABLE = {
    1: 12.7062047364,
    2: 4.3026527299,
    3: 3.1824463053,
    4: 2.7764451052,
    5: 2.5705818356,
    9: 2.2621571628,
    10: 2.2281388520,
    30: 2.0422724563,
    100: 1.9839715185,
    999: 1.9623414611,
    1000: 1.9623390808,
}


@pytest.mark.parametrize(("df", "expected"), TABLE.items())
def test_the_quantile_is_that_of_the_tables(df: int, expected: float) -> None:
    assert student_quantile(df) == pytest.approx(expected, abs=1e-9)


def test_agrees_with_scipy_everywhere() -> None:
    stats = pytest.importorskip("scipy.stats")
    found = [student_quantile(df) for df in range(1, 1001)]
    np.testing.assert_allclose(found, stats.t.ppf(0.975, np.arange(1, 1001)), rtol=1e-10)


def test_mean_and_half_width() -> None:
    assert Estimate.of([0.5]) == Estimate(0.5, None)
    mean, half = vars(Estimate.of([1.0, 2.0, 3.0])).values()  # standard deviation 1
    assert mean == 2.0
    assert half == pytest.approx(4.3026527299 / math.sqrt(3), abs=1e-9)


def test_a_paired_difference_counts_wins() -> None:
    found = paired([0.5, 0.7, 0.4], [0.4, 0.5, 0.4])
    assert found.mean == pytest.approx(0.1)
    assert found.half_width == pytest.approx(4.3026527299 * 0.1 / math.sqrt(3), abs=1e-9)
    assert found.wins == 2
    assert paired([1.0], [0.5]).half_width is None
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_sign_test() -> None:
    found = sign_test([1, 1, 1, 1, 1, -1, 0])
    assert (found.wins, found.losses, found.share) == (5, 1, 5 / 6)
    assert found.p_value == pytest.approx(2 * (1 + 6) / 2**6)
    assert sign_test([]) == sign_test([0.0])
    assert sign_test([]).share is None
    assert sign_test([]).p_value == sign_test([1, -1]).p_value == 1.0


def test_correlation_of_known_numbers() -> None:
    found = correlation([1, 2, 3, 4], [1, 3, 2, 4])
    assert found.points == 4
    assert found.pearson == pytest.approx(0.8)
    assert found.spearman == pytest.approx(0.8)
    cubes = correlation([1, 2, 3, 4], [1, 8, 27, 64])
    assert cubes.spearman == pytest.approx(1)
    assert cubes.pearson is not None
    assert 0.9 < cubes.pearson < 1
    assert correlation([1, 2], [1, 2]).pearson is None
    assert correlation([1, 1, 1], [1, 2, 3]).spearman is None


def test_correlation_leaves_unknown_values_out() -> None:
    found = correlation([0.1, 0.2, 0.4, None], [1, 2, 8, 3])
    assert found.points == 3
    assert found.pearson == pytest.approx(0.979864, abs=1e-6)
    assert found.spearman == pytest.approx(1)
    assert correlation([0.1, None, 0.3], [None, 1.0, 2.0]).points == 1


@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(-10, 10)), min_size=3, max_size=20))
def test_statistics_agree_with_scipy(pairs: list[tuple[int, float]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    x, y = [float(a) for a, _ in pairs], [round(b, 1) for _, b in pairs]
    found, signs = correlation(x, y), sign_test(x)
    if found.pearson is not None:
        assert found.pearson == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-9)
        assert found.spearman == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
    if signs.share is not None:
        assert signs.p_value == pytest.approx(stats.binomtest(signs.wins, signs.wins + signs.losses).pvalue)


def evaluations(rounds: range) -> list[dict[str, float]]:
    return [{"round": at, "accuracy": at / 100} for at in rounds]


@pytest.mark.parametrize(
    ("rounds", "judged", "name"),
    [
        (range(1, 2), [1], "round 1"),
        (range(1, 6), [5], "round 5"),
        (range(1, 21), [17, 18, 19, 20], "mean of rounds 17-20"),
        (range(1, 51), list(range(41, 51)), "mean of rounds 41-50"),
        (range(1, 501), list(range(491, 501)), "mean of rounds 491-500"),
        (range(5, 101, 5), [95, 100], "mean of rounds 95, 100"),
        (range(50, 501, 50), [500], "round 500"),
        (range(0), [], None),
    ],
)
def test_what_a_run_is_judged_by(rounds: range, judged: list[int], name: str | None) -> None:
    found = tail(evaluations(rounds))
    assert [row["round"] for row in found] == judged
    if name is not None:
        assert tail_name(found) == name
        assert tail_mean(evaluations(rounds)) == pytest.approx(np.mean(judged) / 100)


def test_what_a_run_is_judged_by_can_be_said() -> None:
    assert [row["round"] for row in tail(evaluations(range(2, 13, 2)), rounds=4)] == [10, 12]


@pytest.mark.parametrize(("pairs", "effect"), [(3, 3.264), (5, 1.682), (10, 0.996)])
def test_the_effect_that_can_be_seen(pairs: int, effect: float) -> None:
    """As tables of the power of a t test give it."""
    assert visible_effect(pairs) == pytest.approx(effect, abs=1e-3)


def test_the_power_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for pairs in (2, 3, 4, 6, 20, 100):
        for power in (0.5, 0.8, 0.95):
            shift = visible_effect(pairs, power) * math.sqrt(pairs)
            assert stats.nct.sf(student_quantile(pairs - 1), pairs - 1, shift) == pytest.approx(power, abs=1e-3)


def test_a_difference_knows_what_could_have_been_seen() -> None:
    assert paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]).visible_from == pytest.approx(visible_effect(3))
    assert paired([1.0], [0.0]).visible_from is None


def test_p_values_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for count in (2, 3, 4, 20, 21):
        gaps = rng.normal(0.3, 1, count)
        found = paired(gaps.tolist(), [0.0] * count).p_value
        assert found == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue, abs=1e-12)


def test_p_values_at_the_edges() -> None:
    assert paired([1.0], [0.0]).p_value is None
    assert paired([1.0, 2.0], [1.0, 2.0]).p_value == 1.0
    assert paired([2.0, 3.0], [1.0, 2.0]).p_value == pytest.approx(0.0, abs=1e-15)  # the same difference in all seeds


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 are 0.04, 0.06, 0.06, 0.04; none may be below an earlier one."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
