"""HAR in its original format, written by the tests; who is tested on what; every way in which files can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import incofl
from incofl.config import make_config
from incofl.data import Data, Examples, find_source
from incofl.data.cache import write_cache
from incofl.data.partition import natural_partition
from incofl.errors import DataError
from tests.shell import Shell
from tests.signals import SENSORS, write_har
from tests.sources import load_dataset

SMALL = {
    "method": "incoavg",
    "rounds": 2,
    "cohort": 4,
    "data": {"name": "har", "clients": 6},
    "model": {"name": "tiny-resnet-1d"},
    "local": {"epochs": 1, "batch_size": 8},
    "engine": {"workers": 1},
}


def test_windows_by_hand(tmp_path: Path) -> None:
    """Of 8 windows of a person and activity the last two are tested on; the one before them overlaps, and is unused."""
    signals = write_har(tmp_path)
    data = load_dataset("har", tmp_path)
    assert data.train.x.shape == (6 * 2 * 5, 9, 128)
    assert data.train.x.dtype == torch.float32
    first = torch.from_numpy(signals["train"])
    assert torch.equal(data.train.x[:10], first[[0, 1, 2, 3, 4, 8, 9, 10, 11, 12]])
    assert data.train.y[:10].tolist() == [0] * 5 + [1] * 5
    assert data.train.groups is not None
    assert data.train.groups.unique().tolist() == [0, 2, 4, 5, 6, 7]
    assert torch.equal(data.test.x[:4], first[[6, 7, 14, 15]])
    assert torch.equal(data.test.x[24:], torch.from_numpy(signals["test"]))
    assert data.test.groups is not None
    assert data.test.groups.tolist() == [p for p in (0, 2, 4, 5, 6, 7) for _ in range(4)] + [1] * 16 + [3] * 16


def test_too_few_windows_to_hold_any_out(tmp_path: Path) -> None:
    """Three of each person and activity are all trained on."""
    write_har(tmp_path, windows=3)
    data = load_dataset("har", tmp_path)
    assert (len(data.train), len(data.test)) == (36, 12)
    assert data.unseen_clients is None  # nobody is tested on who took part: it is a test set like any other


def test_one_client_per_person(tmp_path: Path) -> None:
    write_har(tmp_path)
    data = load_dataset("har", tmp_path)
    assert data.train.groups is not None
    parts = natural_partition(data.train.groups, 6, np.random.default_rng(0))
    assert all(len(data.train.groups[part].unique()) == 1 for part in parts)
    source = find_source("har")
    assert (source.partition, source.clients, source.classes, source.shape) == ("natural", 21, 6, (9, 128))
    config = make_config({"data": {"name": "har"}})
    assert (config.data.partition, config.data.clients, config.model.name) == ("natural", 21, "resnet20-1d")


def test_a_model_gets_normalised_signals(tmp_path: Path) -> None:
    """By constants: g and radians per second are of unequal size."""
    write_har(tmp_path)
    data = load_dataset("har", tmp_path)
    mean, std = (torch.tensor(vars(data.pipeline)[key]) for key in ("mean", "std"))
    before = data.train.x.clone()
    x = data.pipeline.test(data.train.x)
    assert x.shape == data.train.x.shape
    torch.testing.assert_close(x[:, 6], (before[:, 6] - mean[6]) / std[6])
    assert torch.equal(data.train.x, before)


@pytest.mark.parametrize("folder", ["UCI HAR Dataset", "har", "."])
def test_all_its_places(tmp_path: Path, folder: str) -> None:
    write_har(tmp_path)
    for split in ("train", "test"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / "UCI HAR Dataset" / split).rename(tmp_path / folder / split)
    assert len(load_dataset("har", tmp_path).train) == 60


def test_seen_and_unseen_clients() -> None:
    x, y = torch.arange(6.0).view(6, 1), torch.zeros(6, dtype=torch.long)
    train, test = Examples(x, y, torch.tensor([0, 0, 0, 2, 2, 2])), Examples(x, y, torch.tensor([0, 1, 2, 1, 3, 2]))
    data = Data(train, test)
    assert data.unseen_clients is not None
    assert data.unseen_clients.tolist() == [1, 3]
    parts = {name: part.x.flatten().tolist() for name, part in data.seen_and_unseen(test.pick(slice(1, 5))).items()}
    assert parts == {"": [2], "_unseen_clients": [1, 3, 4]}
    for other in (Data(train, train), Data(train, Examples(x, y)), Data(train), Data(train, test, clients=[*"abcabc"])):
        assert list(other.seen_and_unseen(other.test)) == [""]


def test_a_run_reports_both(tmp_path: Path) -> None:
    """The metrics of each are those of its examples alone, whoever computes them."""
    write_har(tmp_path)
    settings = {**SMALL, "data": {**SMALL["data"], "root": str(tmp_path)}}  # type: ignore[dict-item]
    with incofl.Run(settings, tmp_path / "run") as run:
        row = list(run)[-1]
        parts = run.federation.data.seen_and_unseen(run.federation.data.test)
        assert {name: len(part) for name, part in parts.items()} == {"": 24, "_unseen_clients": 32}
        for level in range(3):
            both = run.evaluate(level)
            for name, part in parts.items():
                alone = run.evaluate(level, (part.x, part.y))
                assert alone == pytest.approx({key: both[f"{key}{name}"] for key in ("accuracy", "loss")})
            assert row["accuracy_by_level"][level] == both["accuracy"]
            assert row["metrics"]["accuracy_unseen_clients"][level] == both["accuracy_unseen_clients"]
    assert set(row["metrics"]) == {"accuracy_unseen_clients", "loss_unseen_clients"}
    again = incofl.run(make_config(settings, ["engine.workers=2"]), tmp_path / "again")
    assert again.history[-1]["metrics"] == row["metrics"]
    assert json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[-1])["metrics"] == row["metrics"]


def test_the_cached_copy_is_the_same(tmp_path: Path) -> None:
    write_har(tmp_path)
    data = load_dataset("har", tmp_path)
    write_cache(tmp_path / "har.safetensors", data.train, data.test, "here")
    cached = load_dataset("har", tmp_path)
    assert cached.fingerprint() == data.fingerprint()
    assert data.test.groups is not None
    assert cached.test.groups is not None
    assert torch.equal(cached.test.groups, data.test.groups)


def test_commands(tmp_path: Path, incofl: Shell) -> None:
    """Shown, not as published because it is small, and not to be fetched."""
    write_har(tmp_path, activities=6)
    code, out, err = incofl("data", "show", "har", "--root", tmp_path, "--set", "data.clients=6")
    assert (code, err) == (0, "")
    assert "har: 180 training and 168 test examples, 6 classes" in out
    assert "of the test examples, 96 are of 2 people or devices without training examples" in out
    assert "a model sees 9 x 128; pipeline: SignalPipeline(mean=(-0.0006, " in out
    assert "natural, 6 clients with 30 to 30 examples" in out
    code, out, err = incofl("data", "verify", "har", "--root", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "har: not as published: training examples, test examples" in err
    assert "not checked" in out
    code, _, err = incofl("data", "fetch", "har", "--root", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "har: got no place on the Hugging Face Hub" in err
    code, out, err = incofl("data", "show", "har", "--root", tmp_path / "train")
    assert (code, err.count("\n")) == (2, 1)
    assert "set data.root to the folder that holds it\n" in err  # there is nothing to fetch


def replace(name: str, old: str, new: str, count: int = -1) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(path.read_text().replace(old, new, count))

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


GYRO = "train/Inertial Signals/body_gyro_y_train.txt"
NARROW = "\n".join([" ".join(["1.0"] * 127)] * 96)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove(GYRO), r"body_gyro_y_train.txt: not a readable table of numbers \(.*not found.*; unpack the archive"),
        (remove("test/y_test.txt"), r"y_test.txt: not a readable table of numbers \(.*; unpack the archive again"),
        (write(GYRO, NARROW), r"body_gyro_y_train.txt: .* \(127 finite numbers in a line, expected 128\)"),
        (write(GYRO, "1 2\n1\n"), r"body_gyro_y_train.txt: .*the number of columns changed from 2 to 1 at row 2"),
        (write(GYRO, ""), r"body_gyro_y_train.txt: not a readable table .*contained no data"),
        (replace(GYRO, "e+00", "e+oo", 1), r"body_gyro_y_train.txt: .*could not convert string .* at row 0"),
        (replace(GYRO, " 1.", " nan #", 1), r"body_gyro_y_train.txt: not a readable table of numbers"),
        (write("train/y_train.txt", "1\n2\n"), r"train/y_train.txt: 2 lines, expected 96 as in subject_train.txt"),
        (write("test/subject_test.txt", "2\n"), r"test/y_test.txt: 32 lines, expected 1 as in subject_test.txt"),
        (replace("train/y_train.txt", "2", "7"), r"y_train.txt: a label is 7, expected 1 to 6; the file is damaged"),
        (replace("test/y_test.txt", "2", "1.5"), r"y_test.txt: a label is 1.5, expected 1 to 6; the file is damaged"),
        (replace("test/subject_test.txt", "4", "31"), r"subject_test.txt: a label is 31, expected 1 to 30"),
        (replace("test/subject_test.txt", "4", "0"), r"subject_test.txt: a label is 0, expected 1 to 30"),
    ],
)
def test_refused(tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    write_har(tmp_path)
    change(tmp_path / "UCI HAR Dataset")
    with pytest.raises(DataError, match=words) as problem:
        load_dataset("har", tmp_path)
    assert "\n" not in str(problem.value)


def test_sensors_are_in_the_order_of_the_readme() -> None:
    assert SENSORS[0] == "body_acc_x"
    assert SENSORS[5] == "body_gyro_z"
    assert SENSORS[8] == "total_acc_z"
