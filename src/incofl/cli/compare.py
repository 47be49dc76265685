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
    baselines: Annotated[
        bool, typer.Option("--baselines", "-b", help="Also run what the fleet can do without slices of one model.")
    ] = False,
    seeds: Annotated[str, typer.Option(metavar="S,T,...", help="Seeds; every method runs each.")] = "0,1,2",
    model: arg.Model = None,
    rounds: arg.Rounds = None,
    root: arg.Root = None,
    set_: arg.Set = None,
    devices: arg.Devices = None,
    out: Annotated[Path, arg.out("DIR", "Folder for the run folders and the tables.")] = Path("runs/comparison"),
    jobs: arg.Jobs = 1,
    quiet: arg.Quiet = False,
) -> None:
    """Run several methods under the same seeds and compare them.

    Runs of a seed share partition, cohorts and initial weights. Started again, it continues where it was interrupted.
    The table is also written to DIR as Markdown, CSV and JSON.
    """
    from incofl.cli.display import RunDisplay, print_table
    from incofl.costs import load_devices
    from incofl.methods import BASELINES
    from incofl.studies.advise import clients_of, place
    from incofl.studies.compare import CAPTION, compare, table
    from incofl.studies.gains import GAP

    names, numbers = arg.words(methods), arg.seeds(seeds)
    if not names:
        raise ConfigError(f"--methods: got {methods!r}, expected names such as heteroavg,incoavg")
    names += [name for name in BASELINES if baselines and name not in names]
    overrides = arg.overrides(set_, model=model, rounds=rounds, root=root)
    if devices is not None:
        federations, fleet = place(config, load_devices(devices), overrides=overrides, methods=names)
        overrides += clients_of(fleet, len(federations[names[0]].costs))
        for each in fleet:
            if each.level is None:
                typer.echo(f"left out: {each.device.count} {each.device.name}, {each.why}", err=True)
    with RunDisplay(quiet, len(names) * len(numbers)) as display:
        results = compare(names, config, out, seeds=numbers, jobs=jobs, overrides=overrides, progress=display.watch)
    unit = " in percent" if results[0].percent else ""
    title = f"test {results[0].metric}{unit}, {len(numbers)} seed(s), {results[0].measure}"
    if results.answer:
        typer.echo(results.answer)
    levels = [results.called(level) for level in sorted({level for one in results for level in one.by_level})]
    print_table(table(results, results.called), title, optional=levels)
    typer.echo(CAPTION)
    if results.gains:
        print_table(results.gains, f"what each level of devices gains over its best baseline, in points{results.how}")
        typer.echo(GAP)
    elif results[0].percent:
        typer.echo("no baseline among them: --baselines adds what the fleet can do without slices of one model")
    typer.echo(f"tables and run folders in {out}")
