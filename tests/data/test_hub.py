"""What is fetched is written in the original formats: the ordinary readers read it back, and verification knows it."""

import dataclasses
import functools
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from incofl.data import DATASETS, Examples, find_source, writers
from incofl.data.cinic10 import cinic10
from incofl.data.hub import REMOTES, Remote, fetch
from incofl.data.svhn import svhn
from incofl.data.verify import Check, verify
from incofl.errors import DataError
from tests.hub import Calls, examples, serve_small_svhn


def same(a: Examples, b: Examples) -> bool:
    return torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


@pytest.mark.parametrize(
    ("write", "read", "train", "test"),
    [
        (writers.write_cifar10, DATASETS["cifar10"].load, (50_000, 3, 32, 32), (10_000, 3, 32, 32)),
        (writers.write_fashion_mnist, DATASETS["fashion-mnist"].load, (60_000, 1, 28, 28), (10_000, 1, 28, 28)),
        (writers.write_mnist, DATASETS["mnist"].load, (60_000, 1, 28, 28), (10_000, 1, 28, 28)),
        (writers.write_svhn, functools.partial(svhn, sizes=(40, 20)), (40, 3, 32, 32), (20, 3, 32, 32)),
        (writers.write_cinic10, functools.partial(cinic10, per_class=3), (30, 3, 32, 32), (30, 3, 32, 32)),
    ],
    ids=["cifar10", "fashion-mnist", "mnist", "svhn", "cinic10"],
)
def test_what_is_written_is_read_back(
    tmp_path: Path,
    write: Callable[[Path, Examples, Examples], None],
    read: Callable[[Path], tuple[Examples, Examples]],
    train: tuple[int, ...],
    test: tuple[int, ...],
) -> None:
    parts = examples(*train), examples(*test)
    write(tmp_path, *parts)
    assert all(same(a, b) for a, b in zip(parts, read(tmp_path), strict=True))


@pytest.fixture
def small_svhn(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return serve_small_svhn(monkeypatch)


def verdicts(checks: list[Check]) -> dict[str, str]:
    return {check.what: check.verdict for check in checks}


def test_fetch_and_verify(small_svhn: Calls, tmp_path: Path) -> None:
    root = tmp_path / "data"
    written = fetch("svhn", root)
    assert [path.name for path in written] == ["test_32x32.mat", "train_32x32.mat"]
    assert small_svhn == [("ufldl-stanford/svhn", "cropped_digits", split) for split in ("train", "test")]
    assert sorted(path.name for path in root.iterdir()) == ["svhn", "svhn.fetched.json"]  # nothing half-written
    assert same(DATASETS["svhn"].load(root)[0], examples(40, 3, 32, 32))
    assert set(verdicts(verify("svhn", root)).values()) == {"ok"}  # not the original bytes, but those that were written
    record = json.loads((root / "svhn.fetched.json").read_text())
    assert record["source"] == "https://huggingface.co/datasets/ufldl-stanford/svhn"
    with pytest.raises(DataError, match=r"test_32x32.mat is there already; look at it with: incofl data verify svhn"):
        fetch("svhn", root)
    # Other digits in the same format are noticed, by their counts and their checksum.
    part = examples(40, 3, 32, 32)
    writers.write_svhn(tmp_path / "other", Examples(part.x, part.y.clamp(min=1)), examples(20, 3, 32, 32))
    (tmp_path / "other" / "svhn" / "train_32x32.mat").replace(root / "svhn" / "train_32x32.mat")
    assert verdicts(verify("svhn", root)) == {
        "training examples": "differs",
        "test examples": "ok",
        "svhn/test_32x32.mat": "ok",
        "svhn/train_32x32.mat": "differs",
    }


def test_a_failed_fetch_leaves_nothing(small_svhn: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(remote: Remote, split: str) -> list[dict[str, Any]]:
        raise ConnectionError("no route to the Hub\nmore about it")

    monkeypatch.setattr(Remote, "rows", unreachable)
    with pytest.raises(
        DataError,
        match=r"^svhn: https://huggingface.co/datasets/ufldl-stanford/svhn cannot be loaded \(no route to the Hub\); "
        r"try again, or put the original files there by hand: .*svhn/\*_32x32.mat$",
    ):
        fetch("svhn", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_data_set_with_files_can_be_fetched() -> None:
    assert {name for name, source in DATASETS.items() if source.published.files} == set(REMOTES)


def test_texts_are_written_as_they_are_read(tmp_path: Path) -> None:
    """Rows as the Hub has them, through the files, to the examples."""
    speech = "What is thy name? " * 40
    rows: dict[str, dict[str, list[dict[str, object]]]] = {
        "sst2": {
            "train": [{"sentence": "a fine\tfilm ", "label": 1}, {"sentence": "dull", "label": 0}],
            "validation": [{"sentence": "fine", "label": 1}],
        },
        "imdb": {
            "train": [{"text": "Good one", "label": 1}, {"text": "Bad one", "label": 0}],
            "test": [{"text": "Good two", "label": 1}, {"text": "Bad two", "label": 0}],
        },
        "shakespeare": {
            "train": [{"text": f"Hamlet:\n{speech}\n\nGhost:\n{speech[:-9]}"}],
            "validation": [{"text": f"{speech[-9:]}\n\nHamlet:\n"}],
            "test": [{"text": f"{speech}\n"}],
        },
    }
    for name, splits in rows.items():
        (tmp_path / name).mkdir()
        REMOTES[name].write(tmp_path / name, splits.__getitem__)
    sst2, imdb, shakespeare = (find_source(name).load(tmp_path / name) for name in rows)
    assert (sst2[0].y.tolist(), sst2[1].y.tolist()) == ([1, 0], [1])
    assert (len(imdb[0]), len(imdb[1])) == (2, 2)
    assert shakespeare[0].groups is not None
    assert set(shakespeare[0].groups.tolist()) == {0, 1}


def test_verdicts_on_idx_files(tmp_path: Path) -> None:
    """Random images in place of the real ones: the counts are right, the bytes are not; fashion-mnist is packed."""
    writers.write_fashion_mnist(tmp_path, examples(60_000, 1, 28, 28), examples(10_000, 1, 28, 28))
    folder = tmp_path / "fashion-mnist"
    path = folder / "t10k-labels-idx1-ubyte"
    (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    found = verdicts(verify("fashion-mnist", tmp_path))
    assert found["training examples"] == found["test examples"] == "ok"
    assert {verdict for what, verdict in found.items() if "/" in what} == {"differs"}


def test_a_file_that_was_packed_anew_is_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers.write_mnist(tmp_path, examples(60_000, 1, 28, 28), examples(10_000, 1, 28, 28))
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest(), f"{path.name}.gz": "of the original"}
    source = DATASETS["mnist"]
    published = dataclasses.replace(source.published, checksums=sums)
    monkeypatch.setitem(DATASETS, "mnist", dataclasses.replace(source, published=published))
    path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    checks = {check.what: check for check in verify("mnist", tmp_path)}
    assert checks["mnist/t10k-labels-idx1-ubyte.gz"].verdict == "ok"
    assert "packed anew" in checks["mnist/t10k-labels-idx1-ubyte.gz"].note
    assert checks["mnist/t10k-images-idx3-ubyte"].verdict == "not checked"


def test_a_damaged_record_is_said_to_be_one(small_svhn: Calls, tmp_path: Path) -> None:
    fetch("svhn", tmp_path)
    (tmp_path / "svhn.fetched.json").write_text("{")
    with pytest.raises(DataError, match="damaged record of what was fetched"):
        verify("svhn", tmp_path)
