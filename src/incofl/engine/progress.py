"""Receivers of what happens in a run: nobody, a line for every round, TensorBoard."""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from incofl.config import Config
from incofl.engine.build import split_kind
from incofl.engine.federation import Federation
from incofl.engine.findings import warnings
from incofl.engine.run_folder import Row
from incofl.errors import ConfigError


class Progress:
    """Receives what happens in a run, and ignores it."""

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """Called before the first round of this process; ``rows`` are the rounds finished earlier."""

    def uploaded(self, client: int) -> None:
        """Called when a client of the current round is done."""

    def noted(self, line: str) -> None:
        """Called with what is worth knowing about how the run is computed."""

    def finished_round(self, row: Row) -> None:
        """Called when a round is done and saved."""

    def close(self) -> None:
        """Called when the run ends, or is interrupted."""


class Lines(Progress):
    """Prints what is run and a line for every round, in scripts and notebooks on standard error."""

    def say(self, line: str) -> None:
        """Prints a line."""
        print(line, file=sys.stderr, flush=True)

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        self._rounds, self._metric = config.rounds, federation.task.first
        kind, whole = split_kind(config, federation.model.layout), federation.model.layout.kept_whole
        self.say(
            f"{config.method} on {config.data.name}: {config.model.name} at width {config.model.width:g}, "
            f"{kind} splitting into {len(federation.splitter.depths)} levels, "
            f"{config.data.clients} clients, {config.cohort_size} a round, {config.rounds} rounds, seed {config.seed}"
        )
        if rows:
            self.say(f"resumed after round {len(rows)}")
        if kind == "hetero" and whole:
            self.say(f"{len(whole)} axes are held whole by every level; incofl plan says which and why")
        found = warnings(federation.method, federation.model.layout, kind, federation.splitter)
        for line in (*found, *federation.notes):
            self.say(f"warning: {line}")

    def noted(self, line: str) -> None:
        self.say(line)

    def finished_round(self, row: Row) -> None:
        count = f"{row['round']:>{len(str(self._rounds))}}/{self._rounds}"
        self.say(f"round {count}  {self.note(row)}  {row['seconds']:.1f} s")
        for refusal in row["rejected"]:
            self.say(f"  rejected: {refusal['reason']}")
        for clip in row.get("clipped", ()):
            norms = f"from {clip['norm']:.2g} to {clip['bound']:.2g}"
            self.say(f"  clipped: client {clip['client']}: its {clip['part']}, {norms}")
        if "taken_back" in row:
            self.say(f"  the model stays as it was: {row['taken_back']}")

    def note(self, row: Row) -> str:
        """Returns the metric and the loss of a round."""
        loss = "loss -" if row["loss"] is None else f"loss {row['loss']:.3f}"
        return loss if row["accuracy"] is None else f"{self._metric} {row['accuracy']:.3f}  {loss}"


class TensorBoard(Progress):
    """Writes each finished round as scalars into event files: ``tensorboard --logdir RUN/tensorboard``.

    A resumed run continues where it was: events of rounds that are computed again are purged, and where there are no
    event files yet the rounds before are written, too.
    """

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            want = "expected the package tensorboard; pip install 'incofl[tensorboard]'"
            raise ConfigError(f"record.tensorboard: got true, {want}")
        self._folder = folder

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._levels, begun = federation.levels_in_use, any(self._folder.glob("events.*"))
        self._writer = SummaryWriter(str(self._folder), purge_step=len(rows) + 1 if begun else None)
        for row in () if begun else rows:
            self.finished_round(row)

    def finished_round(self, row: Row) -> None:
        for tag, value in scalars(row, self._levels):
            self._writer.add_scalar(tag, value, row["round"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(row: Row, levels: Sequence[int]) -> Iterator[tuple[str, float]]:
    """What TensorBoard shows of a round: each number by its tag."""
    of_levels = zip(levels, row["accuracy_by_level"] or (), strict=False)  # none in a round without evaluation
    named = {
        "accuracy/mean": row["accuracy"],
        **{f"accuracy/level_{level}": value for level, value in of_levels},
        "loss/train": row["loss"],
        "loss/test": row["test_loss"],
        **{f"round/{key}": row[key] for key in ("bytes_up", "bytes_down", "seconds")},
        "round/rejected": len(row["rejected"]),
    }
    for tensor, coefficients in (row.get("inco") or {}).items():
        named |= {f"inco_{key}/{tensor}": value for key, value in coefficients.items()}
    return ((tag, float(value)) for tag, value in named.items() if value is not None)
