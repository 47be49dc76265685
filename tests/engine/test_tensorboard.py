"""TensorBoard event files, read back with TensorBoard's own reader."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from incofl.engine.run import run
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError
from tests.federations import tiny_config

pytest.importorskip("tensorboard")


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar, by tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def steps_and(rows: list[dict[str, Any]], key: str) -> list[tuple[int, Any]]:
    return [(row["round"], pytest.approx(row[key], rel=1e-6)) for row in rows]


def test_every_round_is_written_once_also_when_resumed(tmp_path: Path) -> None:
    """Two rounds, then an event of a third that no checkpoint knows, then the run goes on: no step is there twice."""
    from torch.utils.tensorboard import SummaryWriter

    run(tiny_config("rounds=2", "record.tensorboard=true"), tmp_path)
    folder = RunFolder(tmp_path)
    with SummaryWriter(str(folder.tensorboard), filename_suffix=".crashed") as writer:
        writer.add_scalar("accuracy/mean", -1.0, 3)
    run(tiny_config("rounds=4", "record.tensorboard=true"), tmp_path, resume=True)
    found, rows = events(folder.tensorboard), folder.rows()
    assert found["accuracy/mean"] == steps_and(rows, "accuracy")
    assert found["loss/train"] == steps_and(rows, "loss")
    assert found["round/bytes_up"] == steps_and(rows, "bytes_up")
    for level in range(3):
        by_level: list[tuple[int, Any]] = [
            (row["round"], pytest.approx(row["accuracy_by_level"][level], rel=1e-6)) for row in rows
        ]
        assert found[f"accuracy/level_{level}"] == by_level
    mixed = [(row["round"], name, entry["theta"]) for row in rows for name, entry in row["inco"].items()]
    assert mixed
    for number, name, theta in mixed:
        assert dict(found[f"inco_theta/{name}"])[number] == pytest.approx(theta, rel=1e-6)


def test_switched_on_late_it_has_the_rounds_before(tmp_path: Path) -> None:
    run(tiny_config("rounds=2", "eval.every=2"), tmp_path)
    folder = RunFolder(tmp_path)
    assert not folder.tensorboard.exists()
    run(tiny_config("rounds=3", "eval.every=2", "record.trackers=['tensorboard']"), tmp_path, resume=True)
    found = events(folder.tensorboard)
    assert [step for step, _ in found["loss/train"]] == [1, 2, 3]
    assert [step for step, _ in found["accuracy/mean"]] == [2, 3]  # the rounds that were evaluated


def test_results_do_not_depend_on_it(tmp_path: Path) -> None:
    def rows(name: str, *overrides: str) -> list[dict[str, Any]]:
        run(tiny_config("rounds=2", *overrides), tmp_path / name)
        return [{**row, "seconds": 0} for row in RunFolder(tmp_path / name).rows()]

    assert json.dumps(rows("with", "record.tensorboard=true")) == json.dumps(rows("without"))


def test_without_the_package_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    with pytest.raises(
        ConfigError, match=r"record\.trackers: got 'tensorboard', .* pip install 'incofl\[tensorboard\]'"
    ):
        run(tiny_config("record.tensorboard=true"), tmp_path / "r")
    assert not (tmp_path / "r").exists()
