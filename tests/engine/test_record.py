"""States kept for analysis: which, that they are right, and that keeping them changes nothing."""

from pathlib import Path

import pytest
import torch

from incofl.analysis.runs import RecordedRun, find_runs
from incofl.engine.run import run
from incofl.errors import ConfigError, RunError
from tests.federations import tiny_config


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "kept"
    run(tiny_config("rounds=5", "record.every=2", "record.window=[3, 3]"), out)
    return out


def test_which_rounds(kept: Path) -> None:
    assert RecordedRun(kept).recorded == [0, 2, 3, 4, 5]


def test_a_kept_state_is_that_of_a_shorter_run(kept: Path, tmp_path: Path) -> None:
    run(tiny_config("rounds=3"), tmp_path)
    ours, theirs = RecordedRun(kept).server(3), RecordedRun(tmp_path).server()
    assert (ours.round, theirs.round) == (3, 3)
    assert all(torch.equal(ours.shared[name], theirs.shared[name]) for name in theirs.shared)
    assert ours.private.keys() == theirs.private.keys()


def test_the_first_is_the_start(kept: Path) -> None:
    opened = RecordedRun(kept)
    start = opened.federation.start()
    assert all(torch.equal(opened.server(0).shared[name], start.shared[name]) for name in start.shared)


def test_a_run_may_start_to_keep_states_when_it_is_resumed(tmp_path: Path) -> None:
    run(tiny_config("rounds=1"), tmp_path)
    run(tiny_config("rounds=3", "record.every=1"), tmp_path, resume=True)
    assert RecordedRun(tmp_path).recorded == [2, 3]


def test_a_round_that_was_not_kept(kept: Path) -> None:
    with pytest.raises(RunError, match=r"round 1 was not recorded, only 0, 2, 3, 4, 5"):
        RecordedRun(kept).server(1)


def test_finding_runs(kept: Path, tmp_path: Path) -> None:
    assert [found.name for found in find_runs([kept])] == [found.name for found in find_runs([kept.parent])] == ["kept"]
    with pytest.raises(RunError, match="holds no run"):
        find_runs([tmp_path])


def test_a_window_that_ends_before_it_begins() -> None:
    with pytest.raises(ConfigError, match=r"record.window: got \[5, 2\]"):
        tiny_config("record.window=[5, 2]")


def test_evaluation_on_a_part_of_the_test_set() -> None:
    from tests.federations import tiny_federation

    whole, part = tiny_federation(), tiny_federation("eval.limit=50")
    assert (len(part.data.test), len(part.data.train)) == (50, len(whole.data.train))
    same = tiny_federation("eval.limit=50")
    assert torch.equal(part.data.test.x, same.data.test.x)
    assert len(tiny_federation("eval.limit=100000").data.test) == len(whole.data.test)
