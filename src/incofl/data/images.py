"""Readers of the original files of image data sets."""

import io
import math
import pickle
import struct
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from incofl.data.cache import Pair, as_classes, unpack
from incofl.data.dataset import Examples, explained
from incofl.data.source import Reader, Source
from incofl.errors import DataError, needs_extra

CIFAR10_BYTES = 200_000_000  # the archives unpack to 184 and 187 million bytes


def by_split(read: Callable[[Source, Path, str, Sequence[int]], Examples]) -> Reader:
    """Makes a reader of a function that reads ``train`` or ``test``, given the numbers of examples of each class."""
    return lambda source, path: (
        read(source, path, "train", source.train_counts),
        read(source, path, "test", source.test_counts),
    )


def labelled(x: np.ndarray, labels: np.ndarray, path: Path, values: Sequence[int] = range(10)) -> Examples:
    """Makes examples of arrays; class c has the label ``values[c]`` in the file."""
    return Examples(torch.from_numpy(np.require(x, requirements=["C", "W"])), as_classes(labels, path, values))


@by_split
def mnist(source: Source, path: Path, split: str, counts: Sequence[int]) -> Examples:
    """Reads the four idx files of MNIST or Fashion-MNIST, compressed or not."""
    prefix = "train" if split == "train" else "t10k"
    pixels, labels = (path.with_name(f"{prefix}-{name}-ubyte") for name in ("images-idx3", "labels-idx1"))
    return labelled(_idx(pixels, (sum(counts), 28, 28))[:, None], _idx(labels, (sum(counts),)), labels)


def _idx(path: Path, sizes: tuple[int, ...]) -> np.ndarray:
    """Reads an idx file, compressed or not: a magic number, the sizes, then bytes."""
    head = struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes)
    size = len(head) + math.prod(sizes)
    packed = path.with_name(f"{path.name}.gz")
    with explained(f"{path}: not a readable idx file"):
        raw = unpack(packed, size) if packed.is_file() and not path.is_file() else path.read_bytes()
        if not raw.startswith(head) or len(raw) != size:
            got = f"got {len(raw)} bytes that begin with {raw[:16].hex()}"
            raise ValueError(f"{got}, expected {size} and {head.hex()}: idx of {sizes[0]} examples")
    return np.frombuffer(raw, np.uint8, offset=len(head)).reshape(sizes)


def cifar10(source: Source, path: Path) -> Pair:
    """Reads the binary version (cifar-10-batches-bin), the python version (cifar-10-batches-py), or their archives."""
    if path.suffix == ".gz":
        place, raw = path, unpack(path, CIFAR10_BYTES)
        with explained(f"{path}: not a readable archive"), tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
            files = {Path(m.name).name: raw[m.offset_data : m.offset_data + m.size] for m in tar if m.isfile()}
    else:
        place, files = path.parent, {file.name: file.read_bytes() for file in path.parent.glob("*_batch*")}
    suffix = ".bin" if any(name.endswith(".bin") for name in files) else ""
    parts = []
    for batch in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        if (name := batch + suffix) not in files:
            raise DataError(f"cifar10: missing {place / name}; expected the six original batches")
        parts.append(_cifar10_batch(files.pop(name), place / name))
    return Examples(torch.cat([part.x for part in parts[:5]]), torch.cat([part.y for part in parts[:5]])), parts[5]


class _ArraysOnly(pickle.Unpickler):
    """Unpickles plain containers and NumPy arrays and nothing else: the original archive needs no more."""

    def find_class(self, module: str, name: str) -> object:
        module = module.replace("numpy.core.", "numpy._core.")  # where NumPy 2 keeps it
        allowed = ("numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode")
        if f"{module}.{name}" not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")
        return super().find_class(module, name)


def _cifar10_batch(raw: bytes, path: Path) -> Examples:
    """Decodes 3 x 32 x 32 pixels, plane by plane; in the binary version a label byte comes before each image."""
    with explained(f"{path}: not a readable CIFAR-10 batch"):
        if path.suffix == ".bin":
            records = np.frombuffer(raw, np.uint8).reshape(10_000, 3073)
            pixels, labels = records[:, 1:], records[:, 0]
        else:
            batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
            pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        if pixels.shape != (10_000, 3072) or pixels.dtype != np.uint8 or labels.shape != (10_000,):
            raise ValueError(f"data of shape {pixels.shape}, expected (10000, 3072) bytes")
        return labelled(pixels.reshape(-1, 3, 32, 32), labels, path)


@by_split
def svhn(source: Source, path: Path, split: str, counts: Sequence[int]) -> Examples:
    """Reads the cropped digits, not the extra ones: X (32, 32, 3, N), and y (N, 1) in which 10 is the digit 0."""
    with needs_extra("data", "svhn"):
        from scipy.io import loadmat, whosmat
    path, expected = path.with_name(f"{split}_32x32.mat"), {"X": (32, 32, 3, sum(counts)), "y": (sum(counts), 1)}
    with explained(f"{path}: not a readable MATLAB file of SVHN"), path.open("rb") as file:
        found = {name: shape for name, shape, kind in whosmat(file) if kind == "uint8"}
        if found != expected:  # which bounds what is loaded
            raise ValueError(f"holds bytes {found}, expected {expected}")
        content = loadmat(file, variable_names=list(expected))
    return labelled(content["X"].transpose(3, 2, 0, 1), content["y"][:, 0], path, values=(10, *range(1, 10)))


@by_split
def cinic10(source: Source, path: Path, split: str, counts: Sequence[int]) -> Examples:
    """Reads images in the order of their classes and file names; the validation images are not used."""
    if path.suffix == ".gz":
        raise DataError(f"cinic10: got {path}, expected it unpacked in {path.with_name('cinic-10')}")
    folder, expected = path.parents[1] / split, dict(zip(source.names, counts, strict=True))
    found = {each.name: sorted(each.glob("*.png")) for each in folder.glob("*/")}
    for name in (*expected, *found):
        if (number := len(found.get(name, ()))) != expected.get(name):
            raise DataError(f"{folder / name}: {number} PNG files, expected {expected}; unpack the archive again")
    files = [file for name in expected for file in found[name]]
    with ThreadPoolExecutor() as pool:
        pixels = np.fromiter(pool.map(_png, files), np.dtype((np.uint8, (3, 32, 32))), len(files))
    return labelled(pixels, np.repeat(np.arange(len(counts)), counts), folder)


def _png(path: Path) -> np.ndarray:
    """Reads an image in colour; some files of CINIC-10 are grey."""
    with needs_extra("data", "cinic10"):
        from PIL import Image
    with explained(f"{path}: not a readable image"), Image.open(path, formats=["PNG"]) as image:
        if image.size != (32, 32):
            raise ValueError(f"{image.width} x {image.height} pixels, expected 32 x 32")
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
