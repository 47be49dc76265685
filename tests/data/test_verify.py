"""Verdicts on files: as published, as fetched, changed, or not known."""

import dataclasses
import gzip
import hashlib
from pathlib import Path

import pytest

from incofl.data import DATASETS
from incofl.data.cache import unpack, write_cache
from incofl.data.provenance import Check, fetch, verify
from incofl.errors import DataError
from tests.data.idx import write_idx
from tests.hub import examples, serve_small_svhn


def verdicts(checks: list[Check]) -> dict[str, str]:
    return {check.what: check.verdict for check in checks}


def test_a_fetched_file_is_as_fetched_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_small_svhn(monkeypatch)
    path = fetch("svhn", tmp_path)
    checks = verify("svhn", tmp_path)
    assert verdicts(checks) == {"training examples": "ok", "test examples": "ok", "svhn.safetensors": "ok"}
    assert checks[-1].note == "as fetched from https://huggingface.co/datasets/ufldl-stanford/svhn"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1  # a pixel
    path.write_bytes(raw)
    assert verdicts(verify("svhn", tmp_path))["svhn.safetensors"] == "differs"
    # Other digits in the same format are noticed by their counts.
    train = examples(40, 3, 32, 32)
    write_cache(path, dataclasses.replace(train, y=train.y.clamp(min=1)), examples(20, 3, 32, 32), "a friend")
    checks = verify("svhn", tmp_path)
    assert verdicts(checks) == {"training examples": "differs", "test examples": "ok", "svhn.safetensors": "ok"}
    assert checks[0].note == "40, by class 0 8 4 4 4 4 4 4 4 4; expected 40, 4 of each class"
    assert checks[-1].note == "as fetched from a friend"


def test_verdicts_on_idx_files(tmp_path: Path) -> None:
    """Random images in place of the real ones: the counts are right, the bytes are not; one file is packed."""
    write_idx(tmp_path / "fashion-mnist", examples(60_000, 1, 28, 28), examples(10_000, 1, 28, 28))
    path = tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte"
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    found = verdicts(verify("fashion-mnist", tmp_path))
    assert found["training examples"] == found["test examples"] == "ok"
    files = {what: verdict for what, verdict in found.items() if "/" in what}
    assert len(files) == 4
    assert set(files.values()) == {"differs"}


def test_a_file_that_was_packed_anew_is_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "mnist", examples(60_000, 1, 28, 28), examples(10_000, 1, 28, 28))
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest(), f"{path.name}.gz": "of the original"}
    monkeypatch.setitem(DATASETS, "mnist", dataclasses.replace(DATASETS["mnist"], checksums=sums))
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    checks = {check.what: check for check in verify("mnist", tmp_path)}
    assert checks["mnist/t10k-labels-idx1-ubyte.gz"].verdict == "ok"
    assert "packed anew" in checks["mnist/t10k-labels-idx1-ubyte.gz"].note
    assert checks["mnist/t10k-images-idx3-ubyte"].verdict == "not checked"


def test_a_gzip_file_is_unpacked_up_to_the_expected_size(tmp_path: Path) -> None:
    path = tmp_path / "zeros.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    assert unpack(path, 1000) == bytes(1000)
    with pytest.raises(DataError, match=r"zeros.gz: not a readable gzip file \(more than the expected 999 bytes"):
        unpack(path, 999)


def test_manifests() -> None:
    for name, source in DATASETS.items():
        assert source.name == name
        assert source.summary
        assert bool(source.files) == (name != "digits")
        assert len(source.train_counts) == len(source.test_counts)
        assert len(source.names) in (0, source.classes)
        assert len(source.train_counts) in (0, source.classes)
        assert all(len(checksum) == 32 for checksum in source.checksums.values())
    assert sum(DATASETS["svhn"].train_counts) == 73_257
    assert sum(DATASETS["mnist"].test_counts) == 10_000
