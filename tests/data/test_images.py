"""Data sets in their original formats, written by the tests; and every way in which the files can be wrong."""

import gzip
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from incofl.config import make_config
from incofl.data import Data
from incofl.engine.build import build_data
from incofl.errors import DataError
from tests.data.idx import idx
from tests.sources import load_dataset

CIFAR_NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar_batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and pixels of a batch, cheap and different for each batch."""
    labels = ((np.arange(10_000) + number) % 10).astype(np.uint8)
    pixels = np.full((10_000, 3072), 10 * number, dtype=np.uint8)
    pixels[:, 1024] = labels  # the first green pixel
    return labels, pixels


@pytest.fixture(scope="module")
def cifar_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bin")
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate(CIFAR_NAMES):
        labels, pixels = cifar_batch(number)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())
    return root


@pytest.fixture(scope="module")
def cifar_py(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("py")
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate(CIFAR_NAMES):
        labels, pixels = cifar_batch(number)
        batch = {b"batch_label": b"x", b"labels": labels.tolist(), b"data": pixels, b"filenames": [b"a.png"]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return root


def check_cifar(root: Path) -> None:
    data = load_dataset("cifar10", root)
    assert data.train.x.shape == (50_000, 3, 32, 32)
    assert data.test.x.shape == (10_000, 3, 32, 32)
    assert data.train.x.dtype == torch.uint8
    assert int(data.train.x[10_000, 0, 0, 0]) == 10
    assert int(data.test.x[0, 2, 0, 0]) == 50
    assert torch.equal(data.train.x[:, 1, 0, 0].long(), data.train.y)
    assert data.test.y[:3].tolist() == [5, 6, 7]


def test_cifar10_binary(cifar_bin: Path) -> None:
    check_cifar(cifar_bin)
    check_cifar(cifar_bin / "cifar-10-batches-bin")


def test_cifar10_python(cifar_py: Path) -> None:
    check_cifar(cifar_py)


def test_cifar10_archives(cifar_bin: Path, cifar_py: Path, tmp_path: Path) -> None:
    for root, archive in ((cifar_bin, "cifar-10-binary.tar.gz"), (cifar_py, "cifar-10-python.tar.gz")):
        target = tmp_path / archive
        with tarfile.open(target, "w:gz", compresslevel=1) as tar:
            for folder in root.iterdir():
                tar.add(folder, folder.name)
        check_cifar(tmp_path)
        target.unlink()


def test_a_limit_draws_some_training_examples(cifar_bin: Path) -> None:
    def limited(seed: int) -> Data:
        overrides = ["data.name=cifar10", f"data.root={cifar_bin}", "data.limit=500", f"seed={seed}"]
        return build_data(make_config({}, overrides))

    data = limited(seed=1)
    assert len(data.train) == 500
    assert len(data.test) == 10_000
    assert torch.equal(data.train.x[:, 1, 0, 0].long(), data.train.y)
    assert data.fingerprint() == limited(seed=1).fingerprint()
    assert data.fingerprint() != limited(seed=2).fingerprint()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def bad_label(path: Path) -> None:
    path.write_bytes(b"\x0b" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            truncate,
            r"data_batch_3.bin: not a readable CIFAR-10 batch \(.* size 30729900 into .*10000,3073",
        ),
        (bad_label, r"data_batch_3.bin: a label is 11, expected 0 to 9"),
        (Path.unlink, r"missing .*data_batch_3.bin"),
    ],
)
def test_damaged_cifar10_binary(cifar_bin: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for file in (cifar_bin / folder.name).iterdir():
        os.link(file, folder / file.name)
    victim = folder / "data_batch_3.bin"
    victim.unlink()
    shutil.copy(cifar_bin / folder.name / victim.name, victim)
    damage(victim)
    with pytest.raises(DataError, match=message):
        load_dataset("cifar10", tmp_path)


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploited",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rubbish", "not a readable CIFAR-10 batch"),
        (pickle.dumps({b"data": Exploit(), b"labels": []}), "system is not allowed in a data file"),
        (pickle.dumps({b"data": np.zeros((2, 2), np.uint8), b"labels": [1, 2]}, protocol=2), r"data of shape \(2, 2\)"),
    ],
    ids=["rubbish", "hostile", "too small"],
)
def test_damaged_or_hostile_cifar10_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_dataset("cifar10", tmp_path)
    assert not (tmp_path / "exploited").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"x" * 1000)[:-4], "not a readable gzip file"),
        (gzip.compress(b"x" * 1000), "not a readable archive"),
        (b"rubbish", "not a readable gzip file"),
        (gzip.compress(bytes(200_000_001), 1), r"not a readable gzip file \(more than the expected 200000000 bytes"),
    ],
    ids=["truncated", "not a tar", "not a gzip", "without end"],
)
def test_a_damaged_archive(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match=rf"cifar-10-binary.tar.gz: {message}.*; fetch it again"):
        load_dataset("cifar10", tmp_path)


def test_an_incomplete_archive(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "readme.txt", "cifar-10-batches-py/readme.txt")
    with pytest.raises(DataError, match=r"missing .*cifar-10-python.tar.gz/data_batch_1; expected the six original"):
        load_dataset("cifar10", tmp_path)


def test_damage_at_the_end_of_an_archive_is_noticed(tmp_path: Path) -> None:
    """The checksum behind the last byte does not fit."""
    raw = gzip.compress(bytes(100_000), 1)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(raw[:-8] + bytes(4) + raw[-4:])
    with pytest.raises(DataError, match="CRC check failed"):
        load_dataset("cifar10", tmp_path)


def test_no_cifar10_at_all(tmp_path: Path) -> None:
    expected = r"cifar10: no cifar-10-batches-bin/\*_batch\* or .* in .*; set data.root .* incofl data fetch cifar10"
    with pytest.raises(DataError, match=expected):
        load_dataset("cifar10", tmp_path)


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """Images whose every pixel is the label; training files compressed, test files not."""
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for prefix, count, suffix in (("train", 60_000, ".gz"), ("t10k", 10_000, "")):
        labels = (np.arange(count) % 10).astype(np.uint8)
        pixels = np.broadcast_to(labels[:, None, None], (count, 28, 28))
        for name, array in ((f"{prefix}-images-idx3-ubyte", pixels), (f"{prefix}-labels-idx1-ubyte", labels)):
            raw = idx(np.ascontiguousarray(array))
            (folder / f"{name}{suffix}").write_bytes(gzip.compress(raw, 1) if suffix else raw)
    return tmp_path


def test_fashion_mnist(fashion: Path) -> None:
    data = load_dataset("fashion-mnist", fashion)
    assert data.train.x.shape == (60_000, 1, 28, 28)
    assert data.test.x.shape == (10_000, 1, 28, 28)
    assert torch.equal(data.train.x[:, 0, 5, 5].long(), data.train.y)


def test_damaged_fashion_mnist(fashion: Path) -> None:
    labels = fashion / "fashion-mnist" / "t10k-labels-idx1-ubyte"
    good = labels.read_bytes()
    for content, message in (
        (good[:-5], "got 10003 bytes that begin with 0000080100002710.*, expected 10008 and .*; fetch it again"),
        (good + b"\0", "got 10009 bytes"),
        (b"\0\0\x08\x03" + good[4:], "got 10008 bytes that begin with 00000803.*expected 10008 and 0000080100002710"),
        (b"rubbish", r"got 7 bytes that begin with .*: idx of 10000 examples"),
        (b"", "got 0 bytes"),
        (good[:8] + b"\x63" + good[9:], "a label is 99"),
    ):
        labels.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_dataset("fashion-mnist", fashion)
    labels.unlink()
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte: not a readable idx file \(No such file or directory\)"
    ):
        load_dataset("fashion-mnist", fashion)
    train = fashion / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    whole = train.read_bytes()
    for damaged in (whole[:1000], whole[:500] + bytes(100) + whole[600:], b"rubbish"):
        train.write_bytes(damaged)
        with pytest.raises(DataError, match="not a readable gzip file"):
            load_dataset("fashion-mnist", fashion)
    train.write_bytes(gzip.compress(gzip.decompress(whole) + b"\0", 1))
    with pytest.raises(
        DataError, match=r"idx3-ubyte.gz: not a readable gzip file \(more than the expected 47040016 bytes"
    ):
        load_dataset("fashion-mnist", fashion)
    with pytest.raises(
        DataError, match=r"fashion-mnist: no fashion-mnist/\*-ubyte\* or FashionMNIST/raw/\*-ubyte\* in "
    ):
        load_dataset("fashion-mnist", fashion / "fashion-mnist")


def test_digits_are_embedded_and_split_evenly() -> None:
    data = load_dataset("digits", Path("nowhere"))
    assert data.fingerprint() == "7c945e7af1c4e0c6"
    assert (len(data.train), len(data.test)) == (1442, 355)
    assert set(torch.bincount(data.test.y).tolist()) <= {34, 35, 36}
    x = data.pipeline.test(data.train.x)
    assert abs(float(x.mean())) < 1e-3
    assert float(x.std()) == pytest.approx(1, abs=1e-3)


def test_digits_are_those_of_scikit_learn() -> None:
    """In their order, a fixed fifth of each class for testing."""
    pixels, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    tested = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = order[labels[order] == label]
        tested[members[: len(members) // 5]] = True
    data = load_dataset("digits", Path("nowhere"))
    for part, chosen in ((data.train, ~tested), (data.test, tested)):
        assert part.x.dtype == torch.uint8
        assert np.array_equal(part.x.numpy(), pixels[chosen].reshape(-1, 1, 8, 8))
        assert np.array_equal(part.y.numpy(), labels[chosen])


def test_unknown_data_set() -> None:
    with pytest.raises(DataError, match=r"data.name: got 'cifar1'; did you mean 'cifar10'"):
        load_dataset("cifar1", Path("nowhere"))
