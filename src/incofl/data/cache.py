"""Files in ``data.root``: damaged ones are refused in one line; the cached copy of a data set, ``NAME.safetensors``."""

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from incofl.data.dataset import Examples, explained
from incofl.errors import DataError

Pair = tuple[Examples, Examples]  # training and test examples


def unpack(path: Path, most: int) -> bytes:
    """Decompresses a gzip file to its end, where its checksum is, and refuses more than ``most`` bytes."""
    with explained(f"{path}: not a readable gzip file"), gzip.open(path) as file:
        raw = file.read(most + 1)
        if len(raw) > most:
            raise ValueError(f"more than the expected {most} bytes")
        return raw


def as_classes(labels: np.ndarray, path: Path, values: Sequence[int]) -> Tensor:
    """Turns labels of a file into numbers from 0 on: class c has the label ``values[c]``."""
    odd = labels[~np.isin(labels, values)]
    if len(odd):
        raise DataError(f"{path}: a label is {odd[0]:g}, expected {min(values)} to {max(values)}; the file is damaged")
    return torch.from_numpy((labels[:, None] == np.array(values)).argmax(1))


def read_cache(path: Path, classes: int) -> Pair:
    """Reads training and test examples from a file that ``write_cache`` wrote."""
    with _open(path) as (tensors, _):
        parts = []
        for split in ("train", "test"):
            x, y, groups = (tensors.get(f"{split}.{field}") for field in ("x", "y", "groups"))
            if x is None or y is None or not 0 < len(x) == len(y) == len(y if groups is None else groups):
                raise ValueError(f"{split}.x, {split}.y or {split}.groups is missing or incomplete")
            if int(y.min()) < 0 or int(y.max()) >= classes:
                raise ValueError(f"{split}.y is {int(y.min())} to {int(y.max())}, expected 0 to {classes - 1}")
            parts.append(Examples(x, y, groups))
    return parts[0], parts[1]


def write_cache(path: Path, train: Examples, test: Examples, source: str) -> None:
    """Writes examples into a file, which appears only when it is complete."""
    named = {"train": train, "test": test}
    tensors = {
        f"{split}.{key}": t.contiguous() for split in named for key, t in vars(named[split]).items() if t is not None
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    try:
        # One entry of metadata: several would be written in random order, and equal data make equal files.
        metadata = {"incofl": json.dumps({"source": source, "digest": digest(tensors)})}
        partial.write_bytes(save(tensors, metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_cache(path: Path) -> tuple[bool, str]:
    """Tells whether a file still holds what was written into it, and where that came from."""
    with _open(path) as (tensors, metadata):
        return metadata.get("digest") == digest(tensors), metadata.get("source", "an unknown source")


@contextmanager
def _open(path: Path) -> Iterator[tuple[dict[str, Tensor], dict[str, str]]]:
    with explained(f"{path}: not a readable cached copy", f"delete it, then: incofl data fetch {path.stem}"):
        with safe_open(path, framework="pt") as file:
            keys = file.keys()
            tensors = {key: file.get_tensor(key) for key in keys}
            metadata = json.loads((file.metadata() or {}).get("incofl", "{}"))
        yield tensors, metadata


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Identifies tensors by their names, types, shapes and values."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()
