"""What a person sees: the progress of runs, plain lines where there is no terminal, and tables."""

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from incofl.config import Config
from incofl.engine.best_path import BEST
from incofl.engine.federation import Federation
from incofl.engine.progress import Lines
from incofl.engine.result import Result
from incofl.engine.run_folder import Row

# Columns that a narrow terminal can do without, the first to be left out first.
OPTIONAL = ("level ", "last round", "wins")


def make_console() -> Console:
    """Returns a console on which tables keep their full width when they go to a file or a pipe."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=160)


class RunDisplay(Lines):
    """Shows one run or several: bars with the time left on a terminal, plain lines elsewhere.

    Ctrl-C and a polite kill become one line, with some advice, and exit code 130.
    """

    def __init__(self, quiet: bool, runs: int = 1, advice: Callable[[], str] | None = None) -> None:
        self._quiet, self._runs, self._advice, self._begun = quiet, runs, advice, 0
        self._console = console = make_console()
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._all = self._live.add_task("runs   ", total=runs, note="", visible=runs > 1)
        self._rounds_bar = self._live.add_task("rounds ", total=None, note="")
        self._clients = self._live.add_task("clients", total=None, note="", visible=runs == 1)

    def __enter__(self) -> "RunDisplay":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._live.stop()
        if kind is KeyboardInterrupt:
            advice = self._advice() if self._advice else "finished rounds are saved, the same command continues"
            typer.echo(f"incofl: interrupted; {advice}", err=True)
            raise typer.Exit(130) from None

    def watch(self, arm: tuple[str, int]) -> "RunDisplay":
        """Announces one of several runs, and shows its progress."""
        self._begun += 1
        name = f"{arm[0]}, seed {arm[1]}"
        self._live.update(self._all, completed=self._begun - 1, note=name)
        if not self._console.is_terminal and not self._quiet:
            self._console.print(f"run {self._begun}/{self._runs}: {name}", soft_wrap=True)
        return self

    def say(self, line: str) -> None:
        if self._runs == 1 and not self._quiet:
            self._console.print(line, soft_wrap=True)

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        super().started(config, federation, rows)
        self._federation, note = federation, self.note(rows[-1]) if rows else ""
        self._live.update(self._rounds_bar, total=config.rounds, completed=len(rows), note=note)
        self._live.update(self._clients, total=config.cohort_size, completed=0)

    def uploaded(self, client: int) -> None:
        self._live.advance(self._clients)
        if self._live.tasks[self._clients].finished:
            self._live.update(self._clients, note="aggregating, evaluating")

    def finished_round(self, row: Row) -> None:
        self._live.update(self._rounds_bar, completed=row["round"], note=self.note(row))
        self._live.update(self._clients, completed=0, note="")
        self._live.refresh()  # every round is seen, however short
        if not self._console.is_terminal or row.keys() & {"clipped", "taken_back"} or row["rejected"]:
            super().finished_round(row)

    def print_result(self, result: Result) -> None:
        """Prints the metric of each level at the last evaluation, and what each level is."""
        evaluated = [row for row in result.history if row["accuracy"] is not None]
        shown = evaluated[:: max(1, -(-len(evaluated) // 16))]  # the table fits a terminal of 80 columns
        highest = max([1.0, *(value for row in shown for value in row["accuracy_by_level"] if value is not None)])

        def measured(last: float | None, values: Sequence[float | None]) -> list[str]:
            curve = sparkline(values, highest, self._console.options.ascii_only)
            return ["-" if last is None else f"{last:.3f}", curve]

        lines: list[list[str]] = []
        for position, level in enumerate(result["levels"]):
            cells = self._federation.costs[level].cells(self._federation.clients_by_level[level])
            cells = {name: cells[name] for name in [*list(cells)[:4], "clients"]}
            last = result["accuracy_by_level"][position] if evaluated else None
            lines += [] if lines else [[*cells, result["metric"], "rounds"]]
            lines.append([*cells.values(), *measured(last, [row["accuracy_by_level"][position] for row in shown])])
        mean = measured(result["accuracy"], [row["accuracy"] for row in shown])
        title = f"{result['method']}, {result['rounds']} rounds: test {result['metric']} by level"
        chosen = result.get("best_path")
        if chosen:
            found = evaluated[-1]["metrics"][result["metric"] + BEST]
            lines[0].append("best path")
            for line, level, value in zip(lines[1:], chosen, found, strict=True):
                line.append("-" if value is None else f"{value:.3f} ({level})")
            known = [value for value in found if value is not None]
            mean.append(f"{fmean(known):.3f}" if known else "-")
        print_table([*lines, ["mean", "", "", "", "", *mean]], title, self._console)
        if chosen:
            self._console.print("best path: the best of the models that a device holds, and of which level it is")


def sparkline(values: Sequence[float | None], highest: float, ascii_only: bool = False) -> str:
    """Returns a character for each value, the taller the larger."""
    bars = "_.:-=+*#@" if ascii_only else " ▁▂▃▄▅▆▇█"
    steps = [max(0.0, min(1.0, (value or 0.0) / highest)) for value in values]
    return "".join(bars[round(step * (len(bars) - 1))] for step in steps)


def print_table(
    lines: Sequence[Sequence[str]], title: str = "", console: Console | None = None, optional: Sequence[str] = ()
) -> None:
    """Prints a table, headings first; a narrow terminal wraps text and lacks some columns, but no word is cut.

    The columns that a narrow terminal can do without are some that are usual, and before them those of ``optional``.
    """
    console, least = console or make_console(), {column: _longest(column) for column in zip(*lines, strict=True)}
    for group in (tuple(optional), *OPTIONAL):
        if _width(least) > console.width:
            least = {column: width for column, width in least.items() if not column[0].startswith(group)}
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, width in least.items():
        whole = max(map(len, column)) == width  # there is nothing to wrap
        table.add_column(column[0], justify="left" if _is_text(column) else "right", min_width=width, no_wrap=whole)
    for cells in zip(*(column[1:] for column in least), strict=True):
        table.add_row(*cells)
    console.print(table, width=max(console.width, _width(least)), crop=False)
    if left_out := [heading for heading in lines[0] if heading not in [column[0] for column in least]]:
        console.print(f"left out, the terminal is too narrow: {', '.join(left_out)}")


def _width(least: Mapping[tuple[str, ...], int]) -> int:
    return sum(width + 3 for width in least.values())  # with the space between columns


def _longest(column: Sequence[str]) -> int:
    """Returns the length of the longest word of a heading and of text, or of the longest number."""
    heading, *cells = column
    return max(map(len, " ".join(column).split() if _is_text(column) else [*heading.split(), *cells]), default=0)


def _is_text(column: Sequence[str]) -> bool:
    first = next(filter(None, column[1:]), "")
    return first[:1].isalpha() or re.search(r"[^\W\d]{5}", first) is not None
