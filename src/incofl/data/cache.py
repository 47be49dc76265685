"""Files in ``data.root``: how they are found, and the cached copy of a data set, ``NAME.safetensors``."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from incofl.data.dataset import Examples
from incofl.errors import DataError

Pair = tuple[Examples, Examples]  # training and test examples
Reader = Callable[[Path], Pair]  # reads the files of ``data.root``


def find(name: str, root: Path, *places: str) -> Path:
    """Returns the first of some places under ``root`` that exists."""
    found = next((root / place for place in places if (root / place).exists()), None)
    if found is None:
        raise DataError(
            f"{name}: no {' or '.join(places)} in {root.absolute()}; set data.root to the folder that holds it, "
            f"or: incofl data fetch {name}"
        )
    return found


def read_cache_first(name: str, classes: int, read: Reader, root: Path) -> Pair:
    """Reads the cached copy of a data set where there is one, and its original files elsewhere."""
    path = root / f"{name}.safetensors"
    return read_cache(path, classes) if path.is_file() else read(root)


def read_cache(path: Path, classes: int) -> Pair:
    """Reads training and test examples from a file that ``write_cache`` wrote."""
    tensors, _ = _open(path)
    parts = []
    for split in ("train", "test"):
        x, y, groups = (tensors.get(f"{split}.{field}") for field in ("x", "y", "groups"))
        if x is None or y is None or not 0 < len(x) == len(y) == len(y if groups is None else groups):
            raise _damaged(path, f"{split}.x, {split}.y or {split}.groups is missing or incomplete")
        if int(y.min()) < 0 or int(y.max()) >= classes:
            raise _damaged(path, f"{split}.y is {int(y.min())} to {int(y.max())}, expected 0 to {classes - 1}")
        parts.append(Examples(x, y, groups))
    return parts[0], parts[1]


def write_cache(path: Path, train: Examples, test: Examples, source: str) -> None:
    """Writes examples into a file, which appears only when it is complete."""
    named = {f"train.{field}": tensor for field, tensor in vars(train).items()}
    named |= {f"test.{field}": tensor for field, tensor in vars(test).items()}
    tensors = {name: tensor.contiguous() for name, tensor in named.items() if tensor is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    try:
        # One entry of metadata: several would be written in random order, and equal data make equal files.
        metadata = {"incofl": json.dumps({"source": source, "digest": _digest(tensors)})}
        partial.write_bytes(save(tensors, metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_cache(path: Path) -> tuple[bool, str]:
    """Tells whether a file still holds what was written into it, and where that came from."""
    tensors, metadata = _open(path)
    return metadata.get("digest") == _digest(tensors), metadata.get("source", "an unknown source")


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            keys = file.keys()
            metadata = json.loads((file.metadata() or {}).get("incofl", "{}"))
            return {key: file.get_tensor(key) for key in keys}, metadata
    except (SafetensorError, OSError, ValueError) as problem:
        raise _damaged(path, str(problem)) from None


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path}: damaged ({reason}); delete it, then: incofl data fetch {path.stem}")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
