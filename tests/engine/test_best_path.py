"""What devices get that use the best of the models they can hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

import incofl
from incofl.analysis.runs import RecordedRun
from incofl.config import make_config
from incofl.data import Data, Examples
from incofl.engine.best_path import best_paths, in_halves
from incofl.studies.compare import Comparison, compare, folder_of
from incofl.task import CLASSIFICATION, TASKS, UNSEEN, Score
from tests.federations import TINY, tiny_config


def counted(even: int, odd: int, unseen: int | None = None) -> Score:
    """Right answers among ten examples of each half, and among ten of unseen clients."""
    halves = [Score({"accuracy": np.array([right, 10.0])}) for right in (even, odd)]
    other = Score() if unseen is None else Score({f"accuracy{UNSEEN}": np.array([unseen, 10.0])})
    return in_halves(*halves) + other


def test_each_half_counts_with_what_is_best_on_the_other() -> None:
    """By hand: level 1 is better on the even half, so it counts on the odd one, where it has 2; and level 0 has 5."""
    scores = {0: counted(5, 6), 1: counted(8, 2), 2: counted(7, 7)}
    found, chosen = best_paths(CLASSIFICATION, scores, [0, 1, 2])
    # level 0 has no choice: (5 + 6) / 20. level 1: on even, level 0 is best on odd: 5; on odd, level 1 is: 2.
    # level 2: on even, level 2 is best on odd: 7; on odd, level 1 is best on even: 2.
    assert found == {"accuracy_best_path": [0.55, 0.35, 0.45]}
    assert chosen == [0, 0, 2]  # 11, 10 and 14 of 20


def test_of_equal_models_the_smaller_is_used_and_errors_are_to_be_low() -> None:
    _, chosen = best_paths(CLASSIFICATION, {0: counted(6, 6), 3: counted(6, 6)}, [0, 3])
    assert chosen == [0, 0]
    task = TASKS["regression"]
    errors = [Score({task.first: np.array([total, 10.0])}) for total in (10.0, 40.0)]
    found, chosen = best_paths(task, {level: in_halves(error, error) for level, error in enumerate(errors)}, [0, 1])
    assert chosen == [0, 0]
    assert found[f"{task.first}_best_path"] == [1.0, 1.0]  # the root of 20 / 20, not of 80 / 20


def test_unseen_clients_do_not_choose() -> None:
    scores = {0: counted(5, 5, unseen=9), 1: counted(6, 6, unseen=1)}
    found, _ = best_paths(CLASSIFICATION, scores, [0, 1])
    assert found[f"accuracy{UNSEEN}_best_path"] == [0.9, 0.1]


def test_halves_are_of_people_where_these_are_known() -> None:
    y = torch.arange(6) % 2
    plain = Data((torch.rand(6, 3), y), (torch.rand(6, 3), y))
    assert [len(half) for half in plain.halves(plain.test)] == [3, 3]
    assert plain.halves(plain.test)[1].y.tolist() == [1, 1, 1]
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    people = Data(Examples(torch.rand(6, 3), y, groups), Examples(torch.rand(6, 3), y, groups))
    even, odd = people.halves(people.test)
    assert (even.groups.tolist(), odd.groups.tolist()) == ([0, 0, 2, 2], [1, 1])  # type: ignore[union-attr]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_records_both(workers: int, tmp_path: Path) -> None:
    """The accuracy of each level stays what it is; the smallest has no choice."""
    settings = ["method=heteroavg", "rounds=2", f"engine.workers={workers}"]
    plain, both = (
        incofl.run(tiny_config(*settings, *more), tmp_path / str(len(more)), progress=False).history[-1]
        for more in ([], ["eval.best_path=true"])
    )
    assert "best_path" not in plain
    assert both["accuracy_by_level"] == pytest.approx(plain["accuracy_by_level"], abs=1e-9)
    assert both["metrics"]["accuracy_best_path"][0] == both["accuracy_by_level"][0]
    assert both["best_path"][0] == 0
    for level, path in enumerate(both["best_path"]):
        assert both["accuracy_by_level"][path] == max(both["accuracy_by_level"][: level + 1])


def test_a_test_set_of_one_example_has_no_halves(tmp_path: Path) -> None:
    assert best_paths(CLASSIFICATION, {0: in_halves(Score({"accuracy": np.array([5, 10.0])}), Score())}, [0]) == (
        {},
        [],
    )
    row = incofl.run(tiny_config("method=fedfloor", "rounds=1", "eval.limit=1"), tmp_path, progress=False).history[-1]
    assert row["accuracy"] is not None
    assert "best_path" not in row


def test_recording_it_can_begin_when_a_run_is_resumed(tmp_path: Path) -> None:
    """It changes no result, so a comparison can get one more method that wants it."""
    incofl.run(tiny_config("rounds=1"), tmp_path, progress=False)
    later = incofl.run(tiny_config("rounds=2", "eval.best_path=true"), tmp_path, resume=True, progress=False)
    assert ["best_path" in row for row in later.history] == [False, True]
    assert tiny_config("eval.best_path=true").digest() == tiny_config().digest()


def test_fedfloor_says_so_and_the_config_decides(tmp_path: Path) -> None:
    assert [make_config({"method": name}).eval.best_path for name in ("heteroavg", "fedfloor")] == [False, True]
    assert make_config({"method": "fedfloor", "eval": {"best_path": False}}).eval.best_path is False
    result = incofl.run(tiny_config("method=fedfloor", "rounds=1"), tmp_path, progress=False)
    assert result["best_path"] == result.history[-1]["best_path"]


def test_methods_are_compared_by_the_best_path_of_all_or_of_none(tmp_path: Path) -> None:
    """What the answer and the gains say is what the rows recorded, two seeds of each method."""

    def compared(*methods: str) -> Comparison:
        out = tmp_path / "-".join(methods)
        return compare(methods, TINY, out, seeds=2, overrides=["rounds=2"], progress=False)

    found = compared("heteroavg", "allsmall", "fedavg", "fedfloor")
    assert found.best_path
    assert "each with the best of the models that it holds" in found.answer
    assert found.setting is not None
    rows = [RecordedRun(folder_of(tmp_path / "heteroavg-allsmall-fedavg-fedfloor", ("heteroavg", s))) for s in (0, 1)]
    largest = [100 * run.rows[-1]["metrics"]["accuracy_best_path"][-1] for run in rows]
    assert found.setting.values["heteroavg"]["2"] == pytest.approx(dict(enumerate(largest)), abs=1e-3)
    plain = compared("heteroavg", "allsmall")
    assert not plain.best_path
    assert "best of the models" not in plain.answer
