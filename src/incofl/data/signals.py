"""Signals of sensors: activities of people who carry a phone (HAR)."""

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from incofl.data.cache import Pair, as_classes
from incofl.data.dataset import Examples, explained
from incofl.data.source import Source
from incofl.errors import DataError

SIGNALS = [f"Inertial Signals/{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
STEPS = 128  # of a window: 2.56 seconds; it shares half of them with the next one
ACTIVITIES, PEOPLE = 6, 30
TEST_SHARE = 4  # the last quarter of a person's windows of an activity


def har(source: Source, path: Path) -> Pair:
    """Reads the folders ``train`` and ``test`` of the original archive, which are of different people.

    People of ``train`` are the clients. The test examples are windows that were held out of theirs, and behind them all
    windows of the people of ``test``, who take no part in training.
    """
    own, others = (_windows(path.parents[1] / split) for split in ("train", "test"))
    place, number = _place_in_time(own)
    held_out = number // TEST_SHARE
    tested = place >= number - held_out
    unused = (place == number - held_out - 1) & (held_out > 0)  # shares half of its steps with the first one of those
    test = own.pick(tested)
    x, y, groups = (torch.cat([getattr(part, key) for part in (test, others)]) for key in ("x", "y", "groups"))
    return own.pick(~tested & ~unused), Examples(x, y, groups)


def _place_in_time(windows: Examples) -> tuple[Tensor, Tensor]:
    """For each window its place among those of the same person and activity, and the number of those."""
    assert windows.groups is not None
    same = windows.groups * ACTIVITIES + windows.y
    place, number = torch.empty_like(same), torch.empty_like(same)
    for each in np.unique(same.numpy()).tolist():
        members = torch.nonzero(same == each).flatten()  # in the order of the file, which is that of time
        place[members], number[members] = torch.arange(len(members)), len(members)
    return place, number


def _windows(folder: Path) -> Examples:
    """All windows of a folder with their activities and people, in the order of its files."""
    subject, activity, *sensors = (folder / f"{name}_{folder.name}.txt" for name in ("subject", "y", *SIGNALS))
    people, activities, signals = _table(subject, 1), _table(activity, 1), [_table(path, STEPS) for path in sensors]
    for path, table in zip((activity, *sensors), (activities, *signals), strict=True):
        if len(table) != len(people):
            raise DataError(f"{path}: {len(table)} lines, expected {len(people)} as in {subject.name}")
    groups = as_classes(people[:, 0], subject, range(1, PEOPLE + 1))
    y = as_classes(activities[:, 0], activity, range(1, ACTIVITIES + 1))
    return Examples(torch.from_numpy(np.stack(signals, 1)), y, groups)


def _table(path: Path, columns: int) -> np.ndarray:
    """Reads lines of a number of columns."""
    with explained(f"{path}: not a readable table of numbers", "unpack the archive again"), warnings.catch_warnings():
        warnings.simplefilter("error")  # of an empty file
        table = np.loadtxt(path, dtype=np.float32, ndmin=2)
        if table.shape[1] != columns or not np.isfinite(table).all():
            raise ValueError(f"{table.shape[1]} finite numbers in a line, expected {columns}")
    return table
