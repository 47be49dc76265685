"""SVHN and CINIC-10 in their original formats, written small by the tests; and every way in which they can be wrong."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from incofl.config import load_config
from incofl.data import DATASETS
from incofl.data.pipeline import ImagePipeline
from incofl.errors import DataError, IncoflError

SIZES = (20, 10)
SVHN = dataclasses.replace(DATASETS["svhn"], train_counts=[2] * 10, test_counts=[1] * 10)
CINIC10 = dataclasses.replace(DATASETS["cinic10"], train_counts=[2] * 10, test_counts=[2] * 10)


def mat(path: Path, count: int, **content: np.ndarray) -> None:
    """Images whose first red pixel is their label, whose pixel one to the right is 100, and one below 200."""
    labels = (np.arange(count) % 10 + 1).astype(np.uint8)
    pixels = np.zeros((32, 32, 3, count), dtype=np.uint8)
    pixels[0, 0, 0], pixels[0, 1, 0], pixels[1, 0, 0] = labels, 100, 200
    savemat(path, {"X": pixels, "y": labels[:, None]} | content, do_compression=True)


@pytest.fixture
def house_numbers(tmp_path: Path) -> Path:
    (tmp_path / "svhn").mkdir()
    mat(tmp_path / "svhn" / "train_32x32.mat", SIZES[0])
    mat(tmp_path / "svhn" / "test_32x32.mat", SIZES[1])
    return tmp_path


def test_svhn(house_numbers: Path) -> None:
    for root in (house_numbers, house_numbers / "svhn"):
        train, test = SVHN.load(root)
        assert train.x.shape == (20, 3, 32, 32)
        assert test.x.shape == (10, 3, 32, 32)
        assert (train.x.dtype, train.y.dtype) == (torch.uint8, torch.int64)
        assert train.y.tolist() == [*range(1, 10), 0] * 2  # 10 stands for 0
        assert torch.equal(test.x[:, 0, 0, 0].long() % 10, test.y)
        assert train.x[3, 0, 0, 1] == 100
        assert train.x[3, 0, 1, 0] == 200
        assert int(train.x[:, 1:].sum()) == 0


def test_svhn_is_complete_or_refused(house_numbers: Path) -> None:
    with pytest.raises(
        DataError, match=r"train_32x32.mat: .* \(holds bytes .*\(32, 32, 3, 20\).*expected .*3, 73257\)"
    ):
        DATASETS["svhn"].load(house_numbers)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def corrupt(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:200] + bytes(60) + raw[260:])


def rubbish(path: Path) -> None:
    path.write_bytes(b"rubbish")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def labels(*values: int) -> np.ndarray:
    return np.array([[value] for value in (*values, *range(1, 11 - len(values)))], dtype=np.uint8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            Path.unlink,
            r"test_32x32.mat: not a readable MATLAB file of SVHN \(No such file or directory\); fetch it again",
        ),
        (truncate, "test_32x32.mat: not a readable MATLAB file"),
        (corrupt, "test_32x32.mat: not a readable MATLAB file"),
        (rubbish, "test_32x32.mat: not a readable MATLAB file"),
        (empty, "test_32x32.mat: not a readable MATLAB file"),
        (
            lambda p: savemat(p, {"Z": np.zeros(3)}),
            r"test_32x32.mat: .* \(holds bytes {}, expected {'X': \(32, 32, 3, 10\)",
        ),
        (lambda p: mat(p, 9), r"holds bytes {'X': \(32, 32, 3, 9\), 'y': \(9, 1\)}, expected"),
        (lambda p: mat(p, 10, X=np.zeros((28, 28, 3, 10), np.uint8)), r"holds bytes {'X': \(28, 28, 3, 10\)"),
        (lambda p: mat(p, 10, X=np.zeros((32, 32, 3, 10))), r"holds bytes {'y': \(10, 1\)}, expected {'X'"),
        (lambda p: mat(p, 10, y=labels(11)), "test_32x32.mat: a label is 11, expected 1 to 10"),
        (lambda p: mat(p, 10, y=labels(0)), "test_32x32.mat: a label is 0, expected 1 to 10"),
    ],
)
def test_damaged_svhn(house_numbers: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(house_numbers / "svhn" / "test_32x32.mat")
    with pytest.raises(DataError, match=message):
        SVHN.load(house_numbers)


def test_no_svhn_at_all(tmp_path: Path) -> None:
    message = r"svhn: no svhn/\*_32x32.mat or train_32x32.mat or test_32x32.mat in .*incofl data fetch svhn"
    with pytest.raises(DataError, match=message):
        SVHN.load(tmp_path)


def test_a_missing_package_is_one_line(house_numbers: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("scipy", "scipy.io", "PIL"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(IncoflError, match=r"^svhn: needs scipy; try: pip install 'incofl\[data\]'$"):
        SVHN.load(house_numbers)
    with pytest.raises(IncoflError, match=r"^cinic10: needs PIL; try: pip install 'incofl\[data\]'$"):
        CINIC10.load(photographs)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Images filled with (label, number, 7); the last of each class is grey."""
    for split in ("train", "test", "valid"):
        for label, name in enumerate(CINIC10.names):
            folder = tmp_path / "cinic-10" / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32), (label, 0, 7)).save(folder / "a.png")
            Image.new("L", (32, 32), 100 + label).save(folder / "b.png")
    return tmp_path


@pytest.mark.parametrize("name", ["cinic-10", "CINIC-10", "cinic10", "."])
def test_cinic10(photographs: Path, name: str) -> None:
    root = photographs
    if name == ".":
        root = photographs / "cinic-10"
    else:
        (photographs / "cinic-10").rename(photographs / name)
    train, test = CINIC10.load(root)
    assert train.x.shape == test.x.shape == (20, 3, 32, 32)
    assert train.x.dtype == torch.uint8
    assert train.y.tolist() == [label for label in range(10) for _ in range(2)]
    assert train.x[6, :, 5, 9].tolist() == [3, 0, 7]
    assert train.x[7, :, 5, 9].tolist() == [103, 103, 103]


def test_cinic10_is_complete_or_refused(photographs: Path) -> None:
    with pytest.raises(DataError, match=r"airplane: 2 PNG files, expected {'airplane': 9000,"):
        DATASETS["cinic10"].load(photographs)


def resize(path: Path) -> None:
    Image.new("RGB", (32, 31)).save(path)


def other_format(path: Path) -> None:
    Image.new("RGB", (32, 32)).save(path, format="BMP")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, r"test/cat: 1 PNG files, expected {.*'cat': 2,"),
        (truncate, r"test/cat/b.png: not a readable image \(.*truncated"),
        (rubbish, r"test/cat/b.png: not a readable image"),
        (empty, r"test/cat/b.png: not a readable image"),
        (other_format, r"test/cat/b.png: not a readable image"),
        (resize, r"test/cat/b.png: not a readable image \(32 x 31 pixels, expected 32 x 32\)"),
        (lambda p: (p.parents[1] / "zebra").mkdir(), r"test/zebra: 0 PNG files, expected {'airplane': 2, 'auto"),
        (lambda p: p.parent.rename(p.parents[2] / "cat"), r"test/cat: 0 PNG files, expected {.*'cat': 2,"),
        (
            lambda p: p.parents[1].rename(p.parents[2] / "tests"),
            r"test/airplane: 0 PNG files, expected {'airplane': 2,",
        ),
    ],
)
def test_damaged_cinic10(photographs: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(photographs / "cinic-10" / "test" / "cat" / "b.png")
    with pytest.raises(DataError, match=message):
        CINIC10.load(photographs)


def test_no_cinic10_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cinic10: no cinic-10/\*/airplane or .*incofl data fetch cinic10"):
        CINIC10.load(tmp_path)
    (tmp_path / "CINIC-10.tar.gz").touch()
    with pytest.raises(DataError, match=r"cinic10: got .*CINIC-10.tar.gz, expected it unpacked in .*cinic-10$"):
        CINIC10.load(tmp_path)


def pipeline(name: str, side: int | None = None) -> ImagePipeline:
    found = DATASETS[name].view(side).pipeline
    assert isinstance(found, ImagePipeline)
    return found


def test_constants_of_the_paper() -> None:
    half = (0.5, 0.5, 0.5)
    assert pipeline("svhn") == ImagePipeline(mean=half, std=half, cutout=16)
    assert pipeline("cinic10") == ImagePipeline(
        mean=(0.47889522, 0.47227842, 0.43047404), std=(0.24205776, 0.23828046, 0.25874835), pad=4, flip=True
    )
    large = ImagePipeline(mean=half, std=half, flip=True, crop=True, resize=224)
    assert pipeline("svhn", 224) == pipeline("cinic10", 224) == pipeline("cifar10", 224) == large
    assert pipeline("fashion-mnist", 224) == ImagePipeline(channels=3, resize=224)


@pytest.mark.parametrize("name", ["svhn", "cinic10", "fashion-mnist"])
def test_the_papers_protocol_is_that_of_cifar10_on_other_data(name: str) -> None:
    expected = load_config("paper-cifar10", [f"data.name={name}"])
    assert load_config(f"paper-{name}") == expected
