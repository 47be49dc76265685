"""Small HAR data in the format of the original archive."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SENSORS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
PEOPLE = {"train": (1, 3, 5, 6, 7, 8), "test": (2, 4)}


def write_har(
    root: Path, windows: int = 8, activities: int = 2, people: Mapping[str, Sequence[int]] = PEOPLE
) -> dict[str, np.ndarray]:
    """Windows of each person and activity, as many of each, that follow each other; returns the signals that it wrote.

    A signal of activity a is noise around a, so that the activities can be learnt.
    """
    rng, written = np.random.default_rng(0), {}
    for split, members in people.items():
        folder = root / "UCI HAR Dataset" / split
        (folder / "Inertial Signals").mkdir(parents=True)
        rows = [(p, a) for p in members for a in range(1, activities + 1) for _ in range(windows)]
        written[split] = np.array([rng.normal(a, 0.1, (9, 128)) for _, a in rows], np.float32)
        for at, name in enumerate(SENSORS):
            lines = (" ".join(f"{value: .7e}" for value in row) for row in written[split][:, at])
            (folder / "Inertial Signals" / f"{name}_{split}.txt").write_text("\n".join(lines) + "\n")
        for at, name in enumerate(("subject", "y")):
            (folder / f"{name}_{split}.txt").write_text("".join(f"{row[at]}\n" for row in rows))
    return written
