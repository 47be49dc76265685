"""Writers of the original formats: what they write under a folder, the readers read."""

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from incofl.data.dataset import Examples
from incofl.data.published import OBJECTS


def write_cifar10(root: Path, train: Examples, test: Examples) -> None:
    """Six binary batches: records of one label byte and 3 x 32 x 32 pixels, plane by plane."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    parts = [train.pick(slice(at * len(train) // 5, (at + 1) * len(train) // 5)) for at in range(5)]
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, part in zip(names, [*parts, test], strict=True):
        records = np.concatenate([_bytes(part.y)[:, None], _bytes(part.x).reshape(len(part), -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_mnist(root: Path, train: Examples, test: Examples) -> None:
    """The four idx files of MNIST."""
    _write_idx(root / "mnist", train, test)


def write_fashion_mnist(root: Path, train: Examples, test: Examples) -> None:
    """The four idx files of Fashion-MNIST."""
    _write_idx(root / "fashion-mnist", train, test)


def _write_idx(folder: Path, train: Examples, test: Examples) -> None:
    """Magic number, sizes, then bytes; unpacked."""
    folder.mkdir(parents=True)
    for prefix, part in (("train", train), ("t10k", test)):
        for name, array in (("images-idx3", _bytes(part.x)[:, 0]), ("labels-idx1", _bytes(part.y))):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{prefix}-{name}-ubyte").write_bytes(head + array.tobytes())


def write_svhn(root: Path, train: Examples, test: Examples) -> None:
    """Two MATLAB files, in which 10 stands for the digit 0."""
    from scipy.io import savemat

    folder = root / "svhn"
    folder.mkdir(parents=True)
    for split, part in (("train", train), ("test", test)):
        labels = _bytes(part.y.masked_fill(part.y == 0, 10))[:, None]
        content = {"X": _bytes(part.x).transpose(2, 3, 1, 0), "y": labels}
        savemat(folder / f"{split}_32x32.mat", content, do_compression=True)


def write_cinic10(root: Path, train: Examples, test: Examples) -> None:
    """A PNG file per image, numbered in its order, in a folder per split and class."""
    for split, part in (("train", train), ("test", test)):
        folder = root / "cinic-10" / split
        for name in OBJECTS:
            (folder / name).mkdir(parents=True)
        pixels, labels = _bytes(part.x).transpose(0, 2, 3, 1), part.y.tolist()

        def write(at: int, folder: Path = folder, pixels: np.ndarray = pixels, labels: list[int] = labels) -> None:
            path = folder / OBJECTS[labels[at]] / f"{at:06d}.png"
            Image.fromarray(np.ascontiguousarray(pixels[at])).save(path)

        with ThreadPoolExecutor() as pool:
            for _ in pool.map(write, range(len(part)), chunksize=256):
                pass


def _bytes(values: Tensor) -> np.ndarray:
    return values.numpy().astype(np.uint8)


def write_tsv(path: Path, sentences: Sequence[tuple[str, int]]) -> None:
    """A header, then lines of a sentence, a tab and its label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["sentence\tlabel", *(f"{' '.join(text.split())}\t{label}" for text, label in sentences)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
