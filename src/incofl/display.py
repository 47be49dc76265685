"""What a person sees: the live display of a run, plain lines where there is no terminal, and tables."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from incofl.config import Config
from incofl.engine.build import split_kind
from incofl.engine.federation import Federation
from incofl.engine.records import Row
from incofl.resources import Cost, human


def make_console(*, stderr: bool = False) -> Console:
    """Tables keep their full width when they go to a file or pipe."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=160)


def make_bars(console: Console, quiet: bool) -> Progress:
    """Bars with a note and the time left, on a terminal only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


class RunDisplay:
    """Shows a run: bars with the time left on a terminal, a line a round elsewhere."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._live = make_bars(console, quiet)
        self._rounds = self._live.add_task("rounds ", total=None, note="")
        self._clients = self._live.add_task("clients", total=None, note="")
        self._total = 0
        self.federation: Federation | None = None

    def __enter__(self) -> "RunDisplay":
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """Says what is about to run."""
        self.federation = federation
        self._total = config.rounds
        self._live.update(
            self._rounds, total=config.rounds, completed=len(rows), note=_note(rows[-1] if rows else None)
        )
        self._live.update(self._clients, total=config.cohort_size, completed=0)
        self._print(
            f"{config.method} on {config.data.name}: {config.model.name} at width {config.model.width:g}, "
            f"{split_kind(config, federation.model.layout)} splitting into {len(federation.splitter.depths)} levels, "
            f"{config.data.clients} clients, {config.cohort_size} a round, {config.rounds} rounds, seed {config.seed}"
        )
        if rows:
            self._print(f"resumed after round {len(rows)}")
        if split_kind(config, federation.model.layout) == "hetero" and (whole := federation.model.layout.kept_whole):
            self._print(f"{len(whole)} axes are held whole by every level; incofl plan says which and why")

    def uploaded(self, client: int) -> None:
        """One client more."""
        self._live.advance(self._clients)
        if self._live.tasks[self._clients].finished:
            self._live.update(self._clients, note="aggregating, evaluating")

    def finished_round(self, row: Row) -> None:
        """One round more."""
        self._live.update(self._rounds, completed=row["round"], note=_note(row))
        self._live.update(self._clients, completed=0, note="")
        self._live.refresh()  # every round is seen, however short
        if not self._console.is_terminal or row["rejected"]:
            self._print(
                f"round {row['round']:>{len(str(self._total))}}/{self._total}  {_note(row)}  {row['seconds']:.1f} s"
            )
        for refusal in row["rejected"]:
            self._print(f"  rejected: {refusal['reason']}")

    def _print(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, soft_wrap=True)


class CompareDisplay:
    """Shows a comparison: how many runs are done, and the one that is going on."""

    def __init__(self, console: Console, total: int, *, quiet: bool = False) -> None:
        self._console, self._quiet, self._total, self._done = console, quiet, total, 0
        self._live = make_bars(console, quiet)
        self._runs = self._live.add_task("runs  ", total=total, note="")
        self._rounds = self._live.add_task("rounds", total=None, note="")

    def __enter__(self) -> "CompareDisplay":
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def watch(self, method: str, seed: int) -> "CompareDisplay":
        """The next run."""
        self._done += 1
        self._live.update(self._runs, completed=self._done - 1, note=f"{method}, seed {seed}")
        if not self._quiet and not self._console.is_terminal:
            self._console.print(f"run {self._done}/{self._total}: {method}, seed {seed}", soft_wrap=True)
        return self

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """A run begins, or goes on."""
        self._live.update(self._rounds, total=config.rounds, completed=len(rows), note="")

    def uploaded(self, client: int) -> None:
        """Too fine to show."""

    def finished_round(self, row: Row) -> None:
        """One round more."""
        self._live.update(self._rounds, completed=row["round"], note=_note(row))


def comparison_table(lines: Sequence[Sequence[str]], title: str) -> Table:
    """A comparison, the headings in the first line."""
    head, *rest = lines
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in head:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for line in rest:
        table.add_row(*line)
    return table


def _note(row: Row | None) -> str:
    if row is None:
        return ""
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    return f"loss {loss}" if row["accuracy"] is None else f"accuracy {row['accuracy']:.3f}  loss {loss}"


def sparkline(values: list[float], ascii_only: bool = False) -> str:
    """A curve of values in [0, 1], in one line of text."""
    bars = "_.:-=+*#@" if ascii_only else " ▁▂▃▄▅▆▇█"
    return "".join(bars[round(value * (len(bars) - 1))] for value in values)


def result_table(
    federation: Federation, rows: list[Row], summary: dict[str, Any], *, ascii_only: bool = False
) -> Table:
    """Accuracy by level at the last evaluation, with what each level is."""
    table = Table(
        title=f"{summary['method']}, {summary['rounds']} rounds: test accuracy by level", title_justify="left"
    )
    for heading in ("level", "blocks", "width", "parameters", "clients", "accuracy"):
        table.add_column(heading, justify="right")
    table.add_column("rounds", justify="left")
    evaluated = [row for row in rows if row["accuracy"] is not None]
    shown = evaluated[:: max(1, -(-len(evaluated) // 16))]  # the table fits a terminal of 80 columns
    for position, level in enumerate(summary["levels"]):
        cost = federation.costs[level]
        clients = federation.clients_by_level[level]
        table.add_row(
            *(str(level), _blocks(cost), f"{cost.width:g}", human(cost.parameters), str(clients)),
            f"{summary['accuracy_by_level'][position]:.3f}" if evaluated else "-",
            sparkline([row["accuracy_by_level"][position] for row in shown], ascii_only),
        )
    table.add_section()
    mean = f"{summary['accuracy']:.3f}" if evaluated else "-"
    table.add_row("mean", "", "", "", "", mean, sparkline([row["accuracy"] for row in shown], ascii_only))
    return table


def plan_table(title: str, levels: list[Cost], clients: Sequence[int]) -> Table:
    """What each level costs, in 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("level", "blocks", "width", "params", "MACs", "down", "up", "memory", "clients"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cost in levels:
        table.add_row(
            *(str(cost.level), _blocks(cost), f"{cost.width:g}", human(cost.parameters), human(cost.macs)),
            *(human(cost.bytes_down, "B"), human(cost.bytes_up, "B"), human(cost.memory, "B")),
            str(clients[cost.level]),
        )
    return table


def _blocks(cost: Cost) -> str:
    return " ".join(map(str, cost.blocks))
