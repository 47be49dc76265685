"""Receivers of progress events of a run."""

import sys
from typing import Protocol

from incofl.config import Config
from incofl.engine.federation import Federation
from incofl.engine.run_folder import Row


class Progress(Protocol):
    """Receives progress events."""

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """Called before the first round of this process; ``rows`` are the rounds finished earlier."""
        ...

    def uploaded(self, client: int) -> None:
        """Called when a client of the current round is done."""
        ...

    def finished_round(self, row: Row) -> None:
        """Called when a round is done and saved."""
        ...


class Silent:
    """Ignores all events."""

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None: ...

    def uploaded(self, client: int) -> None: ...

    def finished_round(self, row: Row) -> None: ...


class Lines(Silent):
    """Prints a line for every round on standard error: the default in scripts and notebooks."""

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        self._rounds, self._metric = config.rounds, federation.task.first
        done = f", {len(rows)} of them finished earlier" if rows else ""
        print(f"incofl: {federation.method.name}, {config.rounds} rounds{done}", file=sys.stderr)

    def finished_round(self, row: Row) -> None:
        loss = "" if row["loss"] is None else f"  loss {row['loss']:.4g}"
        metric = "" if row["accuracy"] is None else f"  {self._metric} {row['accuracy']:.4g}"
        rejected = f"  {len(row['rejected'])} rejected" if row["rejected"] else ""
        line = f"round {row['round']}/{self._rounds}{loss}{metric}{rejected}  {row['seconds']:.1f} s"
        print(line, file=sys.stderr, flush=True)
