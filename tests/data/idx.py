"""Small writers of the files of MNIST."""

import struct
from pathlib import Path

import numpy as np

from incofl.data import Examples


def idx(array: np.ndarray) -> bytes:
    """Magic number, sizes, then bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, train: Examples, test: Examples) -> None:
    """The four files, unpacked."""
    folder.mkdir(parents=True)
    for prefix, part in (("train", train), ("t10k", test)):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(part.x[:, 0].numpy()))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(part.y.numpy()))
