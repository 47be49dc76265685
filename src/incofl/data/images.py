"""Image data sets as tensors: one uint8 tensor per split, read from their original files."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from incofl.data.pipeline import Pipeline
from incofl.errors import DataError, nearest

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Images:
    """Labelled images, ``x`` as uint8 (examples, channels, height, width)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """A data set in memory and the way its images reach a model."""

    name: str
    train: Images
    test: Images
    classes: int
    pipeline: Pipeline

    def fingerprint(self) -> str:
        """A digest of the training data, so that a run is never resumed on other data."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (self.train.x, self.train.y):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Source:
    """What is known of a data set before its files are read.

    ``width`` and ``stem`` are the model options that suit it when the config does not say.
    """

    summary: str
    shape: Shape
    classes: int
    pipeline: Pipeline
    load: Callable[[Path], tuple[Images, Images]]
    width: float = 1.0
    stem: Literal["imagenet", "small"] = "imagenet"


def _digits(root: Path) -> tuple[Images, Images]:
    """The 1,797 8x8 digits that come with scikit-learn: a fixed, stratified fifth is the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    y = torch.from_numpy(bunch.target.astype(np.int64))
    order = np.random.default_rng(0).permutation(len(y))
    test = np.zeros(len(y), dtype=bool)
    for label in range(10):
        members = order[y.numpy()[order] == label]
        test[members[: len(members) // 5]] = True
    return Images(x[~test], y[~test]), Images(x[test], y[test])


def _fashion_mnist(root: Path) -> tuple[Images, Images]:
    folder = _folder(root, "fashion-mnist", "FashionMNIST/raw")
    return (
        Images(_idx(folder, "train-images-idx3-ubyte", 60_000), _idx(folder, "train-labels-idx1-ubyte", 60_000).long()),
        Images(_idx(folder, "t10k-images-idx3-ubyte", 10_000), _idx(folder, "t10k-labels-idx1-ubyte", 10_000).long()),
    )


def _idx(folder: Path, name: str, count: int) -> Tensor:
    """An idx file, compressed or not: magic number, sizes, then bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise DataError(f"fashion-mnist: missing {folder / name}[.gz]; put the four original idx files there")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, zlib.error, EOFError) as problem:
        raise DataError(f"{path}: damaged gzip file ({problem}); fetch it again") from None
    dims = raw[3] if len(raw) >= 4 else 0
    expected = (8, 1) if "labels" in name else (8, 3)
    if len(raw) < 4 + 4 * dims or (raw[2], dims) != expected or raw[:2] != b"\0\0":
        raise DataError(f"{path}: not an idx file of {expected[1]} dimensions of bytes; fetch it again")
    sizes = struct.unpack(f">{dims}I", raw[4 : 4 + 4 * dims])
    body = raw[4 + 4 * dims :]
    if len(body) != int(np.prod(sizes)) or sizes[0] != count:
        raise DataError(
            f"{path}: {len(body)} bytes of data and sizes {list(sizes)}, expected {count} entries; "
            "the file is truncated or of another data set"
        )
    array = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(*sizes)
    if dims == 3:
        return array.unsqueeze(1)  # one channel
    _check_labels(array, path)
    return array


def _cifar10(root: Path) -> tuple[Images, Images]:
    """The binary version (cifar-10-batches-bin), the python version (cifar-10-batches-py), or an archive of either."""
    names = [f"data_batch_{i}" for i in range(1, 6)]
    for folder, suffix, read in (("cifar-10-batches-bin", ".bin", _cifar_bin), ("cifar-10-batches-py", "", _cifar_py)):
        for path in (root / folder, root / "cifar10" / folder, root):
            if path.name == folder and path.is_dir():

                def load(name: str, path: Path = path, suffix: str = suffix, read: _Reader = read) -> Images:
                    file = path / f"{name}{suffix}"
                    if not file.is_file():
                        raise DataError(f"cifar10: missing {file}; the folder should hold the original six batches")
                    return read(file.read_bytes(), file)

                return _concatenate([load(name) for name in names]), load("test_batch")
    for archive, folder, suffix, read in (
        ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", ".bin", _cifar_bin),
        ("cifar-10-python.tar.gz", "cifar-10-batches-py", "", _cifar_py),
    ):
        if (path := root / archive).is_file():
            return _cifar_archive(path, folder, names, suffix, read)
    raise DataError(
        f"cifar10: nothing found in {root.absolute()}; expected cifar-10-batches-bin/, cifar-10-batches-py/, "
        "cifar-10-binary.tar.gz or cifar-10-python.tar.gz; set data.root to the folder that holds one of them"
    )


_Reader = Callable[[bytes, Path], Images]


def _cifar_archive(path: Path, folder: str, names: list[str], suffix: str, read: _Reader) -> tuple[Images, Images]:
    try:
        # Decompressed to the end first: only there does gzip's checksum tell whether anything was damaged.
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(path.read_bytes()))) as tar:

            def load(name: str) -> Images:
                member = tar.extractfile(f"{folder}/{name}{suffix}")
                assert member is not None
                return read(member.read(), path / name)

            return _concatenate([load(name) for name in names]), load("test_batch")
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, KeyError, EOFError) as problem:
        raise DataError(f"{path}: damaged or incomplete archive ({problem}); fetch it again") from None


def _cifar_bin(raw: bytes, path: Path) -> Images:
    """Records of one label byte and 3 x 32 x 32 pixels, plane by plane."""
    if len(raw) != 10_000 * 3073:
        raise DataError(f"{path}: {len(raw)} bytes, expected {10_000 * 3073}; the file is truncated, fetch it again")
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(10_000, 3073)
    return _cifar_images(records[:, 1:], records[:, 0], path)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles plain containers and NumPy arrays and nothing else: the original archive needs no more."""

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")
        if module == "numpy.core.multiarray":
            module = "numpy._core.multiarray"  # where NumPy 2 keeps it
        return super().find_class(module, name)


def _cifar_py(raw: bytes, path: Path) -> Images:
    try:
        batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except Exception as problem:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path}: not a readable CIFAR-10 batch ({problem}); fetch it again") from None
    if pixels.shape != (10_000, 3072) or pixels.dtype != np.uint8 or labels.shape != (10_000,):
        raise DataError(f"{path}: data of shape {pixels.shape}, expected (10000, 3072) bytes; fetch it again")
    return _cifar_images(torch.from_numpy(pixels.copy()), torch.from_numpy(labels.astype(np.int64)), path)


def _cifar_images(pixels: Tensor, labels: Tensor, path: Path) -> Images:
    _check_labels(labels, path)
    return Images(pixels.reshape(-1, 3, 32, 32).contiguous(), labels.long())


def _check_labels(labels: Tensor, path: Path) -> None:
    if int(labels.max()) > 9:
        raise DataError(f"{path}: a label is {int(labels.max())}, expected 0 to 9; the file is damaged")


def _concatenate(parts: list[Images]) -> Images:
    return Images(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def _folder(root: Path, *names: str) -> Path:
    found = next((root / name for name in names if (root / name).is_dir()), None)
    if found is None:
        raise DataError(
            f"{names[0]}: no folder {names[0]} in {root.absolute()}; set data.root to the folder that holds it"
        )
    return found


DATASETS: dict[str, Source] = {
    "digits": Source(
        summary="1,797 handwritten digits, 8x8, embedded (scikit-learn)",
        shape=(1, 8, 8),
        classes=10,
        pipeline=Pipeline(maximum=16, mean=(0.3048,), std=(0.3758,)),
        load=_digits,
        width=0.25,
        stem="small",
    ),
    "fashion-mnist": Source(
        summary="70,000 articles of clothing, 28x28 shown at 32x32 (idx files in data.root/fashion-mnist)",
        shape=(1, 32, 32),
        classes=10,
        pipeline=Pipeline(resize=32),
        load=_fashion_mnist,
    ),
    "cifar10": Source(
        summary="60,000 photographs, 32x32 (binary or python version in data.root)",
        shape=(3, 32, 32),
        classes=10,
        pipeline=Pipeline(
            mean=(0.49139968, 0.48215827, 0.44653124),
            std=(0.24703233, 0.24348505, 0.26158768),
            pad=4,
            flip=True,
            cutout=16,
        ),
        load=_cifar10,
    ),
}


def find_source(name: str) -> Source:
    """The data set of that name, or one clear line with the nearest name."""
    if name not in DATASETS:
        raise DataError(f"data.name: got {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]


def load_dataset(name: str, root: Path, limit: int | None = None, seed: int = 0) -> Dataset:
    """Reads a data set; ``limit`` keeps that many training examples, drawn by ``seed``."""
    source = find_source(name)
    train, test = source.load(root)
    if limit is not None and limit < len(train):
        keep = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(train))[:limit]))
        train = Images(train.x[keep], train.y[keep])
    return Dataset(name, train, test, source.classes, source.pipeline)
