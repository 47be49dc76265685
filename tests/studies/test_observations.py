"""The observations by hand, on cases that show them and on cases that do not."""

from pathlib import Path

import pytest

from incofl.engine.run import run
from incofl.studies.observations import Case, fisher_interval, look, observe
from incofl.studies.reproduce import cells, load_scale, load_study
from tests.federations import tiny_config


def case(setting: str, seed: int, accuracy: float, first: float, last: float, r: float, share: float) -> Case:
    cka = (first, (first + last) / 2, last)
    return Case("ResNet", setting, seed, accuracy, cka, tuple(value - 0.01 for value in cka), r, share, 40)


def test_a_world_as_the_paper_describes_it() -> None:
    found = [
        case(setting, seed, accuracy + seed / 100, 0.9, last + seed / 100, 0.8 + seed / 100, 0.7 + seed / 100)
        for setting, accuracy, last in (
            ("Non-IID with hetero", 0.5, 0.4),
            ("HeteroAvg", 0.6, 0.5),
            ("InCoAvg", 0.7, 0.6),
        )
        for seed in (0, 1, 2)
    ]
    observed = list(observe(found))
    assert {entry.verdict for entry in observed} == {"holds"}
    assert [entry.number for entry in observed] == [1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4]
    # Seed by seed the last CKA is 0.9 - 0.4 less, and 0.01 more for each seed: sd 0.01, t = 4.3027, sqrt 3.
    assert observed[0].value == "-0.490 ± 0.025"
    assert observed[-1].value == "+0.100 ± 0.000"


def test_the_opposite_world() -> None:
    found = [
        case(setting, seed, accuracy, 0.4, last + seed / 100, -0.5 - seed / 100, 0.3 - seed / 100)
        for setting, accuracy, last in (("HeteroAvg", 0.5, 0.9), ("InCoAvg", 0.6, 0.8))
        for seed in (0, 1, 2)
    ]
    assert {entry.verdict for entry in observe(found)} == {"opposite"}


def test_fisher_interval_by_hand() -> None:
    """r = 0.5 of 28 points: atanh 0.5493, half width 1.96 / 5 = 0.392, so tanh 0.1573 and tanh 0.9413."""
    assert fisher_interval(0.5, 28) == pytest.approx((0.156, 0.7357), abs=1e-3)


def test_noise_is_not_a_finding() -> None:
    found = [case("HeteroAvg", seed, 0.5 + seed, 0.5, last, 0.0, 0.5) for seed, last in enumerate((0.3, 0.5, 0.7))]
    verdicts = {entry.number: entry.verdict for entry in observe(found)}
    assert verdicts[1] == "inconclusive"
    assert verdicts[3] == "inconclusive"


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    run(tiny_config("rounds=4", "record.every=1", "cohort=10", "eval.limit=60"), tmp_path)
    return tmp_path


def test_a_real_run_is_looked_at_once(finished: Path) -> None:
    cell = cells(load_study("case-study"), load_scale("mini"))[0]
    watched: list[str] = []
    first = look(cell, 0, finished, 2, watched.append)
    assert watched
    assert all(0 <= value <= 1 for value in first.cka)
    watched.clear()
    assert look(cell, 0, finished, 2, watched.append) == first
    assert watched == []
