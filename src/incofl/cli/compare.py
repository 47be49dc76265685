"""The command ``incofl compare``."""

from pathlib import Path
from typing import Annotated

import typer

import incofl.cli.arguments as arg
from incofl.errors import ConfigError


def compare(
    config: arg.Config = None,
    methods: Annotated[
        str, typer.Option("--methods", "-m", metavar="A,B,...", help="Methods; the others are compared to the first.")
    ] = "heteroavg,incoavg",
    seeds: Annotated[str, typer.Option("--seeds", metavar="S,T,...", help="Seeds; every method runs each.")] = "0,1,2",
    model: arg.Model = None,
    set_: arg.Set = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Holds a run folder per method and seed, and the tables.")
    ] = Path("runs/comparison"),
    jobs: arg.Jobs = 1,
    quiet: arg.Quiet = False,
) -> None:
    """Run several methods under the same seeds and compare them.

    Runs of a seed share partition, cohorts and initial weights. Started again, it continues where it was interrupted.
    The table is also written to DIR as Markdown, CSV and JSON.
    """
    from incofl.cli.display import RunDisplay, make_console, print_table
    from incofl.config import load_config
    from incofl.studies.compare import CAPTION, table
    from incofl.studies.compare import compare as run_comparison

    names, numbers = arg.words(methods), arg.seeds(seeds)
    if not names:
        raise ConfigError(f"--methods: got {methods!r}, expected names such as heteroavg,incoavg")
    configs = [
        load_config(config, [*arg.overrides(set_, model=model, method=name), f"seed={seed}"])
        for seed in numbers
        for name in names
    ]
    arms = {(each.method, each.seed): each for each in configs}
    console = make_console()
    with (
        arg.interruptible(lambda: "finished rounds are saved, the same command continues"),
        RunDisplay(console, runs=len(arms), quiet=quiet) as display,
    ):
        results = run_comparison(arms, out.expanduser(), jobs=jobs, watch=display.watch)
    unit = " in percent" if results[0].percent else ""
    print_table(
        console, table(results), f"test {results[0].metric}{unit}, {len(numbers)} seed(s), {results[0].measure}"
    )
    console.print(CAPTION, soft_wrap=True)
    console.print(f"tables and run folders in {out}", soft_wrap=True)
