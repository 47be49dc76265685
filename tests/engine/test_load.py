"""A trained model, taken out of a run folder."""

from pathlib import Path

import pytest
import torch

import incofl
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
