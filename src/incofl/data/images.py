"""Readers of image data sets: the embedded digits, and the original files of the others."""

import gzip
import io
import math
import pickle
import struct
import tarfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from incofl.data.cache import Pair, find, read_cache
from incofl.data.dataset import Examples
from incofl.data.manifests import PUBLISHED
from incofl.errors import DataError, needs_extra

CIFAR10_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")
CIFAR10_ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
CIFAR10_BYTES = 200_000_000  # the archives unpack to 184 and 187 million bytes


def digits(root: Path) -> Pair:
    """Reads the embedded 1,797 digits of 8x8 pixels, of which a fixed, stratified fifth is the test set."""
    return read_cache(Path(__file__).with_name("digits.safetensors"), 10)


def mnist(names: Sequence[str], root: Path) -> Pair:
    """Reads the four idx files of MNIST or Fashion-MNIST, compressed or not, from a folder of one of these names."""
    folder = find(names[0], root, *names)

    def part(prefix: str, count: int) -> Examples:
        pixels = _idx(folder / f"{prefix}-images-idx3-ubyte", (count, 28, 28))
        path = folder / f"{prefix}-labels-idx1-ubyte"
        return _labelled(pixels.unsqueeze(1), _idx(path, (count,)), path)

    return part("train", 60_000), part("t10k", 10_000)


def _idx(plain: Path, sizes: tuple[int, ...]) -> Tensor:
    """Reads an idx file, compressed or not: a magic number, the sizes, then bytes."""
    path = next((p for p in (plain, plain.with_name(f"{plain.name}.gz")) if p.is_file()), None)
    if path is None:
        raise DataError(f"missing {plain}[.gz]; put the four original idx files there")
    head = struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes)
    size = len(head) + math.prod(sizes)
    raw = unpack(path, size) if path.suffix == ".gz" else path.read_bytes()
    if not raw.startswith(head) or len(raw) != size:
        raise DataError(
            f"{path}: got {len(raw)} bytes that begin with {raw[:16].hex()}, expected {size} and {head.hex()} (idx of "
            f"{sizes[0]} examples); the file is truncated or of another data set"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=len(head)).view(sizes)


def unpack(path: Path, most: int) -> bytes:
    """Decompresses a gzip file to its end, where its checksum is, and refuses more than ``most`` bytes."""
    try:
        with gzip.open(path) as file:
            raw = file.read(most + 1)
    except (gzip.BadGzipFile, zlib.error, EOFError) as problem:
        raise DataError(f"{path}: damaged gzip file ({problem}); fetch it again") from None
    if len(raw) > most:
        raise DataError(f"{path}: damaged gzip file (more than the expected {most} bytes); fetch it again")
    return raw


def cifar10(root: Path) -> Pair:
    """Reads the binary version (cifar-10-batches-bin), the python version (cifar-10-batches-py), or their archives."""
    folders = [f"{base}{folder}" for folder in CIFAR10_FOLDERS for base in ("", "cifar10/")]
    path = root if root.name in CIFAR10_FOLDERS else find("cifar10", root, *folders, *CIFAR10_ARCHIVES)
    files = _cifar10_files(path)
    binary = any(name.endswith(".bin") for name in files)
    parts = []
    for batch in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        name = f"{batch}.bin" if binary else batch
        if name not in files:
            raise DataError(f"cifar10: missing {path / name}; expected the six original batches")
        parts.append((_cifar10_binary if binary else _cifar10_python)(files.pop(name), path / name))
    return Examples(torch.cat([part.x for part in parts[:5]]), torch.cat([part.y for part in parts[:5]])), parts[5]


def _cifar10_files(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.glob("*_batch*")}
    try:
        with tarfile.open(fileobj=io.BytesIO(unpack(path, CIFAR10_BYTES)), mode="r:") as tar:
            members = {Path(member.name).name: tar.extractfile(member) for member in tar if member.isfile()}
            return {name: file.read() for name, file in members.items() if file is not None}
    except tarfile.TarError as problem:
        raise DataError(f"{path}: damaged or incomplete archive ({problem}); fetch it again") from None


def _cifar10_binary(raw: bytes, path: Path) -> Examples:
    """Decodes records of one label byte and 3 x 32 x 32 pixels, plane by plane."""
    if len(raw) != 10_000 * 3073:
        raise DataError(f"{path}: {len(raw)} bytes, expected {10_000 * 3073}; the file is truncated, fetch it again")
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(10_000, 3073)
    return _labelled(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0], path)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles plain containers and NumPy arrays and nothing else: the original archive needs no more."""

    def find_class(self, module: str, name: str) -> object:
        module = module.replace("numpy.core.", "numpy._core.")  # where NumPy 2 keeps it
        allowed = ("numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode")
        if f"{module}.{name}" not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")
        return super().find_class(module, name)


def _cifar10_python(raw: bytes, path: Path) -> Examples:
    try:
        batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except Exception as problem:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path}: not a readable CIFAR-10 batch ({problem}); fetch it again") from None
    if pixels.shape != (10_000, 3072) or pixels.dtype != np.uint8 or labels.shape != (10_000,):
        raise DataError(f"{path}: data of shape {pixels.shape}, expected (10000, 3072) bytes; fetch it again")
    return _labelled(torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels), path)


def _labelled(pixels: Tensor, labels: Tensor, path: Path, least: int = 0) -> Examples:
    """Checks that labels are ``least`` to ``least`` + 9, and makes 0 of 10."""
    low, high = int(labels.min()), int(labels.max())
    if low < least or high > least + 9:
        odd = low if low < least else high
        raise DataError(f"{path}: a label is {odd}, expected {least} to {least + 9}; the file is damaged")
    return Examples(pixels, labels.long() % 10)


def svhn(root: Path, sizes: tuple[int, int] = (73_257, 26_032)) -> Pair:
    """Reads the cropped digits of house numbers, without the extra ones, from ``root/svhn`` or ``root`` itself."""
    train = find("svhn", root, "svhn/train_32x32.mat", "train_32x32.mat")
    return _svhn(train, sizes[0]), _svhn(find("svhn", train.parent, "test_32x32.mat"), sizes[1])


def _svhn(path: Path, size: int) -> Examples:
    """Reads X of shape (32, 32, 3, N), and y of shape (N, 1) in which 10 stands for the digit 0."""
    with needs_extra("data", "svhn"):
        from scipy.io import loadmat, whosmat
    expected = {"X": (32, 32, 3, size), "y": (size, 1)}
    try:
        found = {name: shape for name, shape, kind in whosmat(path) if kind == "uint8"}
        content = loadmat(path, variable_names=list(expected)) if found == expected else {}  # which bounds its size
    except Exception as problem:  # a damaged file can raise nearly anything
        raise DataError(f"{path}: not a readable MATLAB file of SVHN ({problem}); fetch it again") from None
    if found != expected:
        raise DataError(f"{path}: holds bytes {found}, expected {expected}; the file is of another data set")
    pixels = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
    return _labelled(torch.from_numpy(pixels), torch.from_numpy(content["y"][:, 0]), path, least=1)


def cinic10(root: Path, per_class: int = 9_000) -> Pair:
    """Reads training and test images, ordered by class and file name; the validation images are not used."""
    places = [f"{folder}train/airplane" for folder in ("cinic-10/", "CINIC-10/", "cinic10/", "")]
    if (root / "CINIC-10.tar.gz").is_file() and not any((root / place).is_dir() for place in places):
        raise DataError(f"cinic10: got {root / 'CINIC-10.tar.gz'}, expected it unpacked in {root / 'cinic-10'}")
    folder = find("cinic10", root, *places).parents[1]
    return _cinic10(folder / "train", per_class), _cinic10(folder / "test", per_class)


def _cinic10(folder: Path, per_class: int) -> Examples:
    """Reads PNG files of 32 x 32 pixels, a folder for each class."""
    names = PUBLISHED["cinic10"].names
    found = {path.name: sorted(path.glob("*.png")) for path in folder.glob("*/")}
    counts = {name: len(found.get(name, ())) for name in (*names, *found)}
    if wrong := [name for name, count in counts.items() if name not in names or count != per_class]:
        raise DataError(
            f"{folder / wrong[0]}: {counts[wrong[0]]} PNG files, expected {per_class} in each of {', '.join(names)}; "
            "unpack the original archive again"
        )
    files = [path for name in names for path in found[name]]
    with ThreadPoolExecutor() as pool:
        pixels = np.fromiter(pool.map(_png, files), np.dtype((np.uint8, (3, 32, 32))), len(files))
    return Examples(torch.from_numpy(pixels), torch.arange(len(names)).repeat_interleave(per_class))


def _png(path: Path) -> np.ndarray:
    """Reads an image in colour; some files of CINIC-10 are grey."""
    with needs_extra("data", "cinic10"):
        from PIL import Image
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.size == (32, 32):
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            problem: object = f"{image.width} x {image.height} pixels, expected 32 x 32"
    except Exception as damage:  # a damaged file can raise nearly anything
        problem = "truncated or not a PNG file" if isinstance(damage, OSError | SyntaxError) else damage
    raise DataError(f"{path}: unreadable image ({problem}); unpack the original archive again")
