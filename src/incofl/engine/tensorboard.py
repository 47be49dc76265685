"""TensorBoard event files of a run, with ``record.tensorboard``: ``tensorboard --logdir RUN/tensorboard``."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from incofl.engine.run_folder import Row
from incofl.errors import ConfigError


def check_tensorboard() -> None:
    """Refuses to start what could not be written."""
    if importlib.util.find_spec("tensorboard") is None:
        want = "expected the package tensorboard; pip install 'incofl[tensorboard]'"
        raise ConfigError(f"record.tensorboard: got true, {want}")


class TensorBoard:
    """Writes each finished round as scalars; switched off, nothing.

    A resumed run continues where it was: events of rounds that are computed again are purged, and where there are no
    event files yet the rounds before are written, too.
    """

    def __init__(self, folder: Path, levels: Sequence[int], before: Sequence[Row], *, on: bool) -> None:
        self._levels, self._writer = levels, None
        if not on:
            return
        from torch.utils.tensorboard import SummaryWriter

        begun = any(folder.glob("events.*"))
        self._writer = SummaryWriter(str(folder), purge_step=len(before) + 1 if begun else None)
        for row in () if begun else before:
            self.add(row)

    def add(self, row: Row) -> None:
        if self._writer is not None:
            for tag, value in scalars(row, self._levels):
                self._writer.add_scalar(tag, value, row["round"])
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(row: Row, levels: Sequence[int]) -> Iterator[tuple[str, float]]:
    """What TensorBoard shows of a round: each number by its tag."""
    of_levels = zip(levels, row["accuracy_by_level"] or (), strict=False)  # none in a round without evaluation
    named = {
        "accuracy/mean": row["accuracy"],
        **{f"accuracy/level_{level}": value for level, value in of_levels},
        "loss/train": row["loss"],
        "loss/test": row["test_loss"],
        "round/bytes_up": row["bytes_up"],
        "round/bytes_down": row["bytes_down"],
        "round/seconds": row["seconds"],
        "round/rejected": len(row["rejected"]),
    }
    for tensor, coefficients in (row.get("inco") or {}).items():
        named |= {f"inco_{key}/{tensor}": value for key, value in coefficients.items()}
    return ((tag, float(value)) for tag, value in named.items() if value is not None)
