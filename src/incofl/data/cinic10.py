"""Reader of CINIC-10: a folder per split, in it a folder per class, in it PNG files of 32 x 32 pixels."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from incofl.data.dataset import Examples
from incofl.data.published import OBJECTS
from incofl.errors import DataError

FOLDERS = ("cinic-10", "CINIC-10", "cinic10", ".")


def cinic10(root: Path, per_class: int = 9_000) -> tuple[Examples, Examples]:
    """Training and test images, ordered by class and file name; the validation images are not used."""
    folder = next((root / name for name in FOLDERS if (root / name / "train" / OBJECTS[0]).is_dir()), None)
    if folder is None:
        hint = "unpack CINIC-10.tar.gz into cinic-10/" if (root / "CINIC-10.tar.gz").is_file() else "set data.root"
        raise DataError(
            f"cinic10: no folder cinic-10 with train/{OBJECTS[0]} and so on in {root.absolute()}; {hint}, "
            "or: incofl data fetch cinic10"
        )
    return _read(folder / "train", per_class), _read(folder / "test", per_class)


def _read(folder: Path, per_class: int) -> Examples:
    if not folder.is_dir():
        raise DataError(f"cinic10: missing {folder}; unpack the original archive again")
    other = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in OBJECTS)
    if other:
        raise DataError(f"{folder}: holds a folder {other[0]}, expected the ten classes {OBJECTS[0]} to {OBJECTS[-1]}")
    files: list[Path] = []
    for name in OBJECTS:
        own = sorted((folder / name).glob("*.png"))
        if len(own) != per_class:
            raise DataError(
                f"{folder / name}: {len(own)} PNG files, expected {per_class}; unpack the original archive again"
            )
        files += own
    pixels = np.empty((len(files), 32, 32, 3), dtype=np.uint8)

    def read(at: int) -> None:
        pixels[at] = _image(files[at])

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(read, range(len(files)), chunksize=256):
            pass
    labels = torch.arange(len(OBJECTS)).repeat_interleave(per_class)
    return Examples(torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))), labels)


def _image(path: Path) -> np.ndarray:
    """Some files are grey: they become colour images like the others."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            size = image.size
            if size == (32, 32):
                return np.asarray(image.convert("RGB"))
    except Exception as problem:  # a damaged file can raise nearly anything
        reason = "truncated or not a PNG file" if isinstance(problem, OSError | SyntaxError) else problem
        raise DataError(f"{path}: unreadable image ({reason}); unpack the original archive again") from None
    raise DataError(f"{path}: an image of {size[0]} x {size[1]} pixels, expected 32 x 32")
