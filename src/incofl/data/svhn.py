"""Reader of SVHN, the street view house numbers: cropped digits, as the two original MATLAB files."""

from pathlib import Path

import numpy as np
import torch

from incofl.data.dataset import Examples
from incofl.errors import DataError

FILES = ("train_32x32.mat", "test_32x32.mat")


def svhn(root: Path, sizes: tuple[int, int] = (73_257, 26_032)) -> tuple[Examples, Examples]:
    """Training and test digits, without the extra ones; the files lie in ``root/svhn`` or in ``root`` itself."""
    folder = next((f for f in (root / "svhn", root) if any((f / name).exists() for name in FILES)), None)
    if folder is None:
        raise DataError(
            f"svhn: no {' or '.join(FILES)} in {root.absolute()} or its folder svhn; put the two original files there, "
            "or: incofl data fetch svhn"
        )
    train, test = (_read(folder / name, size) for name, size in zip(FILES, sizes, strict=True))
    return train, test


def _read(path: Path, size: int) -> Examples:
    """X of shape (32, 32, 3, N), and y of shape (N, 1) in which 10 stands for the digit 0."""
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"svhn: missing {path}; put the two original files {' and '.join(FILES)} there")
    try:
        content = loadmat(path, variable_names=["X", "y"])
        pixels, labels = np.asarray(content["X"]), np.asarray(content["y"])
    except Exception as problem:  # a damaged file can raise nearly anything
        raise DataError(f"{path}: not a readable MATLAB file of SVHN ({problem}); fetch it again") from None
    if pixels.shape != (32, 32, 3, size) or pixels.dtype != np.uint8 or labels.shape != (size, 1):
        raise DataError(
            f"{path}: X of shape {pixels.shape} and y of shape {labels.shape}, expected {(32, 32, 3, size)} bytes and "
            f"{(size, 1)}; the file is of another data set"
        )
    if labels.min() < 1 or labels.max() > 10:
        odd = labels.min() if labels.min() < 1 else labels.max()
        raise DataError(f"{path}: a label is {odd}, expected 1 to 10, where 10 stands for 0; the file is damaged")
    images = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))
    return Examples(torch.from_numpy(images), torch.from_numpy(labels[:, 0].astype(np.int64) % 10))
