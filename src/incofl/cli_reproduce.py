"""The command ``incofl reproduce``."""

import shlex
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from incofl.display import CompareDisplay, comparison_table, make_console
from incofl.engine.compare import Arm
from incofl.engine.run import Progress
from incofl.errors import ConfigError
from incofl.reproduce import SCALES, STUDIES, load_scale, load_study
from incofl.reproduce.run import arms_of, lines, reproduce, save
from incofl.reproduce.study import Cell, cells


def reproduce_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=f"One of {', '.join(STUDIES)}; or all.")] = None,
    scale: Annotated[
        str, typer.Option("--scale", metavar="S", help="How large: mini (hours), small (days), paper (GPUs).")
    ] = "mini",
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="The folder that holds the data sets (incofl data fetch).")
    ] = Path("data"),
    seeds: Annotated[str | None, typer.Option("--seeds", metavar="S,T,...", help="Other seeds than 0,1,2.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override one config key of all runs; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Run folders and tables [runs/reproduce/SCALE].")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time, each with one worker.")] = 1,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say how many runs it would make, and make none.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the closing table only.")] = False,
) -> None:
    """Run an experiment of the paper and print our numbers beside its own. Without NAME, list them.

    Started again, it continues where it was interrupted; studies share the runs that they have in common.
    """
    if name is None:
        _list()
        return
    chosen = load_scale(scale)
    folder = (out or Path("runs") / "reproduce" / scale).expanduser()
    only = None if seeds is None else tuple(_seeds(seeds))
    overrides = (f"data.root={str(data.expanduser())!r}", *(set_ or []))
    console = make_console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for study in [load_study(each) for each in (STUDIES if name == "all" else (name,))]:
        table = cells(study, chosen, overrides, only)
        if dry:
            typer.echo(f"{study.name} at scale {scale}: {len(table)} cells, {len(arms_of(table))} runs")
            continue
        try:
            with CompareDisplay(console, len(arms_of(table)), quiet=quiet) as display:
                watch = partial(_watch, display)
                results = reproduce(study, chosen, folder, jobs=jobs, overrides=overrides, seeds=only, watch=watch)
        except KeyboardInterrupt:
            typer.echo("incofl: interrupted; finished rounds are saved, the same command continues", err=True)
            raise typer.Exit(130) from None
        markdown, _ = save(study, chosen, table, results, folder, _command(study.name, scale, seeds, set_))
        title = f"{study.title}; scale {scale}: test accuracy in percent, {len(table[0].configs)} seed(s)"
        console.print(comparison_table(lines(results), title))
        console.print(f"scale {scale}: {chosen.summary}", highlight=False)
        if set_:
            console.print(f"but with {', '.join(set_)}", highlight=False, markup=False)
        if study.note:
            console.print(study.note, highlight=False)
        if study.name == "case-study":
            _observe(console, table, folder, chosen.tail, _command(study.name, scale, seeds, set_))
        console.print(f"table in {markdown}, run folders in {folder / 'runs'}", soft_wrap=True)


def _watch(display: CompareDisplay, arm: Arm) -> Progress:
    return display.watch(*arm)


def _command(name: str, scale: str, seeds: str | None, set_: list[str] | None) -> str:
    """As it was given, but for places and processes, which do not change the numbers."""
    chosen = [] if seeds is None else ["--seeds", seeds]
    return shlex.join(
        ["incofl", "reproduce", name, "--scale", scale, *chosen, *(w for s in set_ or [] for w in ("--set", s))]
    )


def _observe(console: Console, table: list[Cell], folder: Path, tail: int, command: str) -> None:
    """The case study's observations, which need its runs analysed."""
    from incofl.reproduce import observations  # matplotlib and scikit-learn are not for the others to wait for

    with console.status("looking at the clients' models") as status:
        found = observations.cases(table, folder, tail, lambda what: status.update(what))
    observed = observations.observe(found)
    console.print(comparison_table(observations.lines(observed), "the paper's observations"))
    console.print(f"observations in {observations.save(found, observed, folder, command)}", soft_wrap=True)


def _list() -> None:
    width = max(map(len, STUDIES))
    for name in STUDIES:
        typer.echo(f"{name:<{width}}  {load_study(name).title}")
    typer.echo("scales:")
    for scale in SCALES:
        typer.echo(f"{scale:<{width}}  {load_scale(scale).summary}")


def _seeds(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",") if word.strip().isdecimal()]
    if not numbers or len(numbers) != len(text.split(",")):
        raise ConfigError(f"--seeds: got {text!r}, expected whole numbers >= 0 such as 0,1,2")
    return list(dict.fromkeys(numbers))
