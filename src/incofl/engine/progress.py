"""Receivers of what happens in a run: nobody, a line for every round."""

import sys

from incofl.config import Config
from incofl.engine.build import split_kind
from incofl.engine.federation import Federation
from incofl.engine.findings import warnings
from incofl.engine.run_folder import Row


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
