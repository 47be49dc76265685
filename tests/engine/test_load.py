"""A trained model, taken out of a run folder."""

from pathlib import Path

import pytest
import torch

import incofl
from incofl.config import Config
from incofl.engine.progress import Progress
from incofl.engine.run_folder import Row
from incofl.errors import ConfigError, RunError
from tests.federations import tiny_config, tiny_federation


def test_the_loaded_models_are_those_that_were_evaluated(tmp_path: Path) -> None:
    result = incofl.run(tiny_config(), tmp_path)
    data = tiny_federation().data
    x = data.pipeline.test(data.test.x)
    for level in (0, 1, 2):
        model = incofl.load_model(tmp_path, level)
        with torch.inference_mode():
            accuracy = float((model(x).argmax(1) == data.test.y).float().mean())
        assert accuracy == pytest.approx(result["accuracy_by_level"][level], abs=1 / len(x) + 1e-6)
    largest, smallest = incofl.load_model(tmp_path), incofl.load_model(tmp_path, 0)
    count = [sum(p.numel() for p in model.parameters()) for model in (smallest, largest)]
    assert count[0] < count[1]
    assert not largest.training


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no checkpoint"):
        incofl.load_model(tmp_path)
    incofl.run(tiny_config("rounds=1").to_dict(), tmp_path)
    with pytest.raises(ConfigError, match="level: got 3, expected 0 to 2"):
        incofl.load_model(tmp_path, 3)


def test_static_statistics_must_belong_to_the_weights(tmp_path: Path) -> None:
    """Rounds 2 and 4 of five are evaluated, and the last: after round 3 the statistics are those of round 2."""
    settings = ["method=heterofl", "eval.every=2"]
    stop_after(3, tiny_config(*settings, "rounds=5"), tmp_path)
    with pytest.raises(RunError, match="round 3, the last finished one, was not evaluated, so that its static") as line:
        incofl.load_model(tmp_path)
    assert f"incofl run --resume --out {tmp_path}" in str(line.value)
    assert "\n" not in str(line.value)
    incofl.run(tiny_config(*settings, "rounds=5"), tmp_path, resume=True)
    model = incofl.load_model(tmp_path)
    assert bool((model.get_buffer("bn1.running_mean") != 0).any())


def test_other_statistics_are_there_without_an_evaluation(tmp_path: Path) -> None:
    stop_after(1, tiny_config("method=heteroavg", "eval.every=2", "rounds=3"), tmp_path)
    incofl.load_model(tmp_path)


def test_static_statistics_of_a_level_that_nobody_trains(tmp_path: Path) -> None:
    incofl.run(tiny_config("method=heterofl", "split.counts=[5,5,0]", "rounds=1"), tmp_path)
    incofl.load_model(tmp_path, 1)
    with pytest.raises(RunError, match=r"nobody trains level 2, so that .* not measured; load one of \[0, 1\]"):
        incofl.load_model(tmp_path)


def stop_after(rounds: int, config: Config, folder: Path) -> None:
    """Interrupts a run when so many rounds are finished."""

    class Impatient(Progress):
        def finished_round(self, row: Row) -> None:
            if row["round"] == rounds:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        incofl.run(config, folder, progress=Impatient())
