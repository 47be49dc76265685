"""Readers of the original files of image data sets: digits, MNIST, Fashion-MNIST, CIFAR-10."""

import gzip
import importlib.util
import io
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from incofl.data.dataset import Examples
from incofl.errors import DataError


def digits(root: Path) -> tuple[Examples, Examples]:
    """The 1,797 8x8 digits that come with scikit-learn: a fixed, stratified fifth is the test set."""
    # Its file, and not its loader: importing scikit-learn takes every process seconds.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("digits: they come with scikit-learn, which is not installed; hint: pip install scikit-learn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as lines:
        table = np.loadtxt(lines, dtype=np.uint8, delimiter=",")
    x = torch.from_numpy(table[:, :-1].reshape(-1, 1, 8, 8))
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    order = np.random.default_rng(0).permutation(len(y))
    test = np.zeros(len(y), dtype=bool)
    for label in range(10):
        members = order[y.numpy()[order] == label]
        test[members[: len(members) // 5]] = True
    return Examples(x[~test], y[~test]), Examples(x[test], y[test])


def mnist(root: Path) -> tuple[Examples, Examples]:
    """The four idx files of handwritten digits, compressed or not."""
    return _idx_files(find_folder(root, "mnist", "MNIST/raw"))


def fashion_mnist(root: Path) -> tuple[Examples, Examples]:
    """The four idx files of articles of clothing, compressed or not."""
    return _idx_files(find_folder(root, "fashion-mnist", "FashionMNIST/raw"))


def _idx_files(folder: Path) -> tuple[Examples, Examples]:
    return (
        Examples(
            _idx(folder, "train-images-idx3-ubyte", 60_000), _idx(folder, "train-labels-idx1-ubyte", 60_000).long()
        ),
        Examples(_idx(folder, "t10k-images-idx3-ubyte", 10_000), _idx(folder, "t10k-labels-idx1-ubyte", 10_000).long()),
    )


def _idx(folder: Path, name: str, count: int) -> Tensor:
    """An idx file, compressed or not: magic number, sizes, then bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise DataError(f"missing {folder / name}[.gz]; put the four original idx files there")
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
    check_labels(array, path)
    return array


def cifar10(root: Path) -> tuple[Examples, Examples]:
    """The binary version (cifar-10-batches-bin), the python version (cifar-10-batches-py), or an archive of either."""
    names = [f"data_batch_{i}" for i in range(1, 6)]
    for folder, suffix, read in (("cifar-10-batches-bin", ".bin", _cifar_bin), ("cifar-10-batches-py", "", _cifar_py)):
        for path in (root / folder, root / "cifar10" / folder, root):
            if path.name == folder and path.is_dir():

                def load(name: str, path: Path = path, suffix: str = suffix, read: _Reader = read) -> Examples:
                    file = path / f"{name}{suffix}"
                    if not file.is_file():
                        raise DataError(f"cifar10: missing {file}; the folder should hold the original six batches")
                    return read(file.read_bytes(), file)

                return concatenate([load(name) for name in names]), load("test_batch")
    for archive, folder, suffix, read in (
        ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", ".bin", _cifar_bin),
        ("cifar-10-python.tar.gz", "cifar-10-batches-py", "", _cifar_py),
    ):
        if (path := root / archive).is_file():
            return _cifar_archive(path, folder, names, suffix, read)
    raise DataError(
        f"cifar10: nothing found in {root.absolute()}; expected cifar-10-batches-bin/, cifar-10-batches-py/, "
        "cifar-10-binary.tar.gz or cifar-10-python.tar.gz; set data.root to the folder that holds one of them, "
        "or: incofl data fetch cifar10"
    )


_Reader = Callable[[bytes, Path], Examples]


def _cifar_archive(path: Path, folder: str, names: list[str], suffix: str, read: _Reader) -> tuple[Examples, Examples]:
    try:
        # Decompressed to the end first: only there does gzip's checksum tell whether anything was damaged.
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(path.read_bytes()))) as tar:

            def load(name: str) -> Examples:
                member = tar.extractfile(f"{folder}/{name}{suffix}")
                assert member is not None
                return read(member.read(), path / name)

            return concatenate([load(name) for name in names]), load("test_batch")
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, KeyError, EOFError) as problem:
        raise DataError(f"{path}: damaged or incomplete archive ({problem}); fetch it again") from None


def _cifar_bin(raw: bytes, path: Path) -> Examples:
    """Records of one label byte and 3 x 32 x 32 pixels, plane by plane."""
    if len(raw) != 10_000 * 3073:
        raise DataError(f"{path}: {len(raw)} bytes, expected {10_000 * 3073}; the file is truncated, fetch it again")
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(10_000, 3073)
    return _labelled(records[:, 1:], records[:, 0], path)


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


def _cifar_py(raw: bytes, path: Path) -> Examples:
    try:
        batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except Exception as problem:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path}: not a readable CIFAR-10 batch ({problem}); fetch it again") from None
    if pixels.shape != (10_000, 3072) or pixels.dtype != np.uint8 or labels.shape != (10_000,):
        raise DataError(f"{path}: data of shape {pixels.shape}, expected (10000, 3072) bytes; fetch it again")
    return _labelled(torch.from_numpy(pixels.copy()), torch.from_numpy(labels.astype(np.int64)), path)


def _labelled(pixels: Tensor, labels: Tensor, path: Path) -> Examples:
    check_labels(labels, path)
    return Examples(pixels.reshape(-1, 3, 32, 32).contiguous(), labels.long())


def check_labels(labels: Tensor, path: Path) -> None:
    """Refuses labels other than 0 to 9."""
    if int(labels.max()) > 9:
        raise DataError(f"{path}: a label is {int(labels.max())}, expected 0 to 9; the file is damaged")


def concatenate(parts: list[Examples]) -> Examples:
    """All of them, in their order."""
    return Examples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def find_folder(root: Path, *names: str) -> Path:
    """The first of some folders that there is."""
    found = next((root / name for name in names if (root / name).is_dir()), None)
    if found is None:
        raise DataError(
            f"{names[0]}: no folder {names[0]} in {root.absolute()}; set data.root to the folder that holds it, "
            f"or: incofl data fetch {names[0]}"
        )
    return found
