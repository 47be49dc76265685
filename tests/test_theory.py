"""The paper's bounds: hand values, identities between them, and exact expectations on noisy parabolas."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "theory"))

from bounds import (
    Assumptions,
    client_drift,
    largest_lr,
    local_progress,
    lr_condition,
    round_drift,
    rounds_to,
    smallest_epsilon,
)
from parabolas import Round, Spread, check, cross_layer, federation, main

GIVEN = Assumptions(smoothness=2.0, sigma=1.0, rho=3.0, gamma=0.5)
NOISY = Assumptions(smoothness=1.0, sigma=5.0, rho=1.0, gamma=0.0)  # sigma > rho, as with heavy tails


def test_local_progress_by_hand() -> None:
    # 10 - (0.1 - 2 * 0.01 / 2) * 6 + 2 * 2 * 0.01 / 2 * 1 = 10 - 0.54 + 0.02
    assert local_progress(loss=10, squares=[4, 2], lr=0.1, given=GIVEN) == pytest.approx(9.48)


def test_client_drift_by_hand() -> None:
    # 2 * 0.01 * (2 * 9 + 1 + 0.5)
    assert client_drift(lr=0.1, given=GIVEN) == pytest.approx(0.39)


def test_round_drift_by_hand() -> None:
    # 9.48 + 2 * 0.1 * (0.5 + 9) + 2 * 0.01 * 19.5
    assert round_drift(loss=10, squares=[4, 2], lr=0.1, given=GIVEN) == pytest.approx(11.77)


def test_largest_lr_by_hand() -> None:
    # (2 * 27 - 4 * 9.5) / (2 (27 + 3 * 1 + 2 * 19.5)), and with 3 * 9 for 3 * 1
    assert largest_lr(squares=[9, 9, 9], given=GIVEN) == pytest.approx(16 / 138)
    assert largest_lr(squares=[9, 9, 9], given=GIVEN, derived=False) == pytest.approx(16 / 186)


def test_rounds_by_hand() -> None:
    # E = 3, eta = 0.01: 3 (1.98 * 9 - 0.02) - 4 * 9.5 - 0.04 * 19.5 = 14.62
    assert rounds_to(9, gap=5, steps=3, lr=0.01, given=GIVEN) == pytest.approx(10 / (0.01 * 14.62))
    # 1.98 * 40 - 3 * 0.02 - 2 * 2.02 * 0.5 - 4 * 1.02 * 9 = 40.4
    printed = rounds_to(40, gap=5, steps=3, lr=0.01, given=GIVEN, derived=False)
    assert printed == pytest.approx(10 / (0.03 * 40.4))
    # (2 * 40 - 38) / (2 (40 + 3 * 9 + 2 * 19.5))
    assert lr_condition(40, steps=3, given=GIVEN, derived=False) == pytest.approx(42 / 212)


def test_at_the_derived_largest_lr_the_bound_neither_falls_nor_rises() -> None:
    squares = [9.0, 8.5, 8.0]
    rate = largest_lr(squares=squares, given=GIVEN)
    assert rate is not None
    assert round_drift(loss=4, squares=squares, lr=rate, given=GIVEN) == pytest.approx(4)
    assert round_drift(loss=4, squares=squares, lr=0.9 * rate, given=GIVEN) < 4
    assert round_drift(loss=4, squares=squares, lr=1.1 * rate, given=GIVEN) > 4


def test_the_printed_largest_lr_is_too_large_when_sigma_exceeds_rho() -> None:
    squares = [1.0] * 10
    derived, printed = (largest_lr(squares=squares, given=NOISY, derived=d) for d in (True, False))
    assert derived == pytest.approx(16 / 314)
    assert printed == pytest.approx(16 / 74)
    assert round_drift(loss=4, squares=squares, lr=0.9 * 16 / 74, given=NOISY) > 4


def test_the_printed_condition_admits_rates_at_which_the_printed_rounds_have_no_answer() -> None:
    rate = lr_condition(3, steps=2, given=NOISY, derived=False)
    assert rate == pytest.approx(2 / (3 + 2 + 54))
    assert rounds_to(3, gap=1, steps=2, lr=0.9 * 2 / 59, given=NOISY, derived=False) is None


def test_rounds_and_the_derived_condition_end_together() -> None:
    rate = lr_condition(9, steps=4, given=GIVEN)
    assert rate is not None
    assert rounds_to(9, gap=1, steps=4, lr=0.999 * rate, given=GIVEN) is not None
    assert rounds_to(9, gap=1, steps=4, lr=1.001 * rate, given=GIVEN) is None


@pytest.mark.parametrize("derived", [True, False])
def test_rounds_grow_without_bound_towards_the_smallest_epsilon(derived: bool) -> None:
    least = smallest_epsilon(steps=4, lr=0.01, given=GIVEN, derived=derived)
    assert least is not None
    assert rounds_to(0.999 * least, gap=1, steps=4, lr=0.01, given=GIVEN, derived=derived) is None
    near, far = (rounds_to(f * least, gap=1, steps=4, lr=0.01, given=GIVEN, derived=derived) for f in (1.001, 2.0))
    assert near is not None
    assert far is not None
    assert near > 100 * far


def test_telescoped_rounds_give_the_derived_number() -> None:
    """T rounds whose squares are all epsilon, at the derived T: the bound uses up the whole gap."""
    rounds = rounds_to(9, gap=5, steps=3, lr=0.01, given=GIVEN)
    assert rounds is not None
    fall = 5 - round_drift(loss=5, squares=[9, 9, 9], lr=0.01, given=GIVEN)
    assert rounds * fall == pytest.approx(5)


@pytest.mark.parametrize("constant", ["sigma", "rho", "gamma", "smoothness"])
def test_every_constant_makes_the_bounds_worse(constant: str) -> None:
    worse = dataclasses.replace(GIVEN, **{constant: 1.1 * getattr(GIVEN, constant)})
    squares = [9.0] * 4
    assert round_drift(loss=1, squares=squares, lr=0.1, given=worse) > round_drift(
        loss=1, squares=squares, lr=0.1, given=GIVEN
    )
    for derived in (True, False):
        rates = [largest_lr(squares=[30.0] * 4, given=g, derived=derived) for g in (GIVEN, worse)]
        rounds = [rounds_to(50, gap=1, steps=4, lr=0.01, given=g, derived=derived) for g in (GIVEN, worse)]
        assert rates[0] is not None
        assert rates[1] is not None
        if derived or constant != "sigma":
            assert rates[1] < rates[0]
        assert rounds[0] is not None
        assert rounds[1] is not None
        assert rounds[1] > rounds[0]


def test_up_to_two_steps_no_learning_rate_is_promised() -> None:
    """||grad L|| <= rho by the assumptions themselves, so the numerator is at most 2 (E - 2) rho^2 - 4 Gamma."""
    given = dataclasses.replace(GIVEN, gamma=0.0)
    assert largest_lr(squares=[given.rho**2] * 2, given=given) is None
    assert largest_lr(squares=[given.rho**2] * 3, given=given) is not None


def test_the_printed_rate_promises_nothing_that_does_not_hold_at_once() -> None:
    """Whatever the learning rate: its smallest epsilon is above 2 rho^2, and rho^2 bounds every gradient already."""
    for lr in (1e-6, 1e-3, 0.1, 0.9):
        for steps in (1, 10, 1000):
            least = smallest_epsilon(steps=steps, lr=lr, given=GIVEN, derived=False)
            assert least is not None
            assert least > 2 * GIVEN.rho**2
    many = smallest_epsilon(steps=1000, lr=1e-3, given=GIVEN)
    assert many is not None
    assert many < GIVEN.rho**2 / 10
    assert smallest_epsilon(steps=10, lr=1.0, given=GIVEN) is None  # eta = 2 / L


def test_constants_are_not_negative() -> None:
    with pytest.raises(ValueError, match="rho is -1"):
        Assumptions(smoothness=1, sigma=1, rho=-1, gamma=0)


@pytest.mark.parametrize("end", ["analysis", "ascent"])
def test_expected_loss_lies_below_the_bound(end: Round) -> None:
    """Exact expectations, over seeds, learning rates, local steps and noise; with either sign of the last step."""
    margins = []
    for seed in range(10):
        for noise in (0.0, 0.1, 2.0):
            clients = federation(1, seed=seed, noise=noise)
            for lr in (0.001, 0.05, 0.5, 1.5):
                for steps in (1, 3, 20):
                    checked = check(clients, np.zeros(6), lr=lr, steps=steps, round=end)
                    margins.append((checked.bound - checked.after) / checked.before)
    assert min(margins) > 0


def test_the_mean_of_unequal_clients_is_not_covered() -> None:
    """The analysis has no averaging in it: with ten local steps the mean of the clients stays above the bound."""
    apart, alike = federation(apart=1.0), federation(1) * 5
    kinds: tuple[Round, ...] = ("averaged", "inco")
    for kind in kinds:
        outside = check(apart, np.zeros(6), lr=0.01, steps=10, round=kind)
        assert outside.after > outside.bound
        assert outside.after < outside.before  # nevertheless it learns
        inside = check(alike, np.zeros(6), lr=0.01, steps=1, round=kind)
        assert inside.after < inside.bound


def test_exact_expectations_agree_with_sampling() -> None:
    client, rng, lr = federation(1, noise=1.0)[0], np.random.default_rng(1), 0.3
    root, mix, samples = np.linalg.cholesky(client.noise), cross_layer(6), 200_000
    w = np.zeros((samples, 6))
    for along in (np.eye(6), np.eye(6), mix):
        gradient = (w - client.optimum) @ client.curvature + rng.standard_normal((samples, 6)) @ root.T
        w = w - lr * gradient @ along.T
    off = w - client.optimum
    sampled = np.einsum("ni,ij,nj->n", off, client.curvature, off) / 2
    end = client.step(client.walk(Spread(np.zeros(6), np.zeros((6, 6))), lr, 2)[-1], lr, mix)
    assert abs(sampled.mean() - client.loss(end)) < 5 * sampled.std() / samples**0.5


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "theory.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    assert [float(number) > 0 for number in capsys.readouterr().out.split()] == [True, True]


def test_the_page_prints_what_the_check_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "theory.md").read_text()
    main()
    printed = capsys.readouterr().out.splitlines()
    start = page.index(printed[0])
    lines = [line.split() for line in page[start:].splitlines()[1 : len(printed)]]
    for ours, theirs in zip(lines, (line.split() for line in printed[1:]), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a == b or float(a) == pytest.approx(float(b), abs=2e-4)
