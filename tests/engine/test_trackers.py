"""Weights & Biases and MLflow, offline, read back with their own readers; the history as a frame."""

import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from incofl.engine.run import run
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError
from tests.federations import tiny_config

SMALL = ("model.name=tiny-mlp", "data.limit=150")


def accuracies(folder: Path) -> dict[int, Any]:
    return {row["round"]: pytest.approx(row["accuracy"], rel=1e-6) for row in RunFolder(folder).rows()}


def records(data: bytes, block: int = 32768, header: int = 7) -> Iterator[bytes]:
    """The records of an offline run, a log of LevelDB: in blocks, each part with checksum, length and kind."""
    position, parts = header, b""
    while position < len(data):
        if (left := block - position % block) < header:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + header])
        parts += data[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_has_every_round_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out, names = tmp_path / "run", "record.trackers=['wandb']"
    run(tiny_config(*SMALL, "rounds=2", names), out, progress=False)
    run(tiny_config(*SMALL, "rounds=3", names), out, resume=True, progress=False)
    found, identities = dict[int, float](), set[str]()
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            identities |= {record.run.run_id} - {""}
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "accuracy/mean" in items:
                step = int(items["_step"])
                assert step not in found
                found[step] = float(items["accuracy/mean"])
    assert found == accuracies(out)
    assert len(identities) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_every_round_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out, names = tmp_path / "run", "record.trackers=['mlflow']"
    run(tiny_config(*SMALL, "rounds=2", names), out, progress=False)
    run(tiny_config(*SMALL, "rounds=3", names), out, resume=True, progress=False)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("incofl")
    assert experiment is not None
    (record,) = client.search_runs([experiment.experiment_id])
    history = [(metric.step, metric.value) for metric in client.get_metric_history(record.info.run_id, "accuracy/mean")]
    assert len(history) == 3
    assert dict(history) == accuracies(out)
    assert record.info.status == "FINISHED"
    assert record.data.params["model.name"] == "tiny-mlp"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_the_package_nothing_starts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each: None if each == name else find(each))
    with pytest.raises(ConfigError, match=rf"record\.trackers: got '{name}', .* pip install 'incofl\[{name}\]'"):
        run(tiny_config(f"record.trackers=['{name}']"), tmp_path / "r")
    assert not (tmp_path / "r").exists()
    with pytest.raises(ConfigError, match=r"record\.trackers"):
        tiny_config("record.trackers=['excel']")


def test_the_history_as_a_frame(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    result = run(tiny_config(*SMALL, "rounds=3", "eval.every=2"), tmp_path, progress=False)
    frame, rows = result.frame(), result.history
    assert list(frame.index) == [1, 2, 3]
    assert frame["loss"].tolist() == [row["loss"] for row in rows]
    assert frame["accuracy"].isna().tolist() == [True, False, False]
    for level in range(3):
        assert frame[f"accuracy_by_level.{level}"].tolist()[1:] == [row["accuracy_by_level"][level] for row in rows[1:]]
    tensor = next(iter(rows[0]["inco"]))
    assert frame[f"inco.{tensor}.theta"].tolist() == [row["inco"][tensor]["theta"] for row in rows]
