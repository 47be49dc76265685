"""The command ``incofl reproduce``."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

import incofl.cli.arguments as arg
from incofl.cli.list import print_columns


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="An experiment, or all.")] = None,
    scale: Annotated[str, typer.Option(metavar="S", help="mini (hours), small (days) or paper (GPUs).")] = "mini",
    part: Annotated[str, typer.Option(metavar="P", help="Part of the study inco: a, b, c, d, or a file.")] = "a",
    root: arg.Root = None,
    data: Annotated[Path | None, typer.Option(hidden=True)] = None,  # the earlier name of --root
    seeds: Annotated[str | None, typer.Option(metavar="S,T,...", help="Other seeds than 0,1,2.")] = None,
    set_: arg.Set = None,
    out: Annotated[Path | None, arg.out("DIR", "Run folders and tables [runs/reproduce/SCALE].")] = None,
    jobs: arg.Jobs = 1,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only print how many runs it would make.")] = False,
    tables: Annotated[
        bool, typer.Option("--tables-only", help="Of inco: tables of what is finished, no runs.")
    ] = False,
    quiet: arg.Quiet = False,
) -> None:
    """Run an experiment of the paper and print our numbers next to its own. Without NAME, list them.

    Started again, it continues where it was interrupted; studies share the runs that they have in common.
    """
    from incofl.cli.display import RunDisplay, make_console, print_table
    from incofl.studies import inco
    from incofl.studies import reproduce as study_runs
    from incofl.studies.compare import CAPTION

    folder_of_data = (root or data or Path("data")).expanduser()
    overrides = [f"data.root={str(folder_of_data)!r}", *(set_ or [])]
    only = None if seeds is None else arg.seeds(seeds)
    # The command as it was given, without places and processes, which do not change the numbers.
    words = [*(["--seeds", seeds] if seeds else []), *(word for key in set_ or [] for word in ("--set", key))]
    if name is None:
        titles = {each: study_runs.load_study(each).title for each in study_runs.STUDIES}
        print_columns(titles | {"inco": "what InCo does and what each level gains: parts a to d"})
        typer.echo("scales:")
        print_columns({each: study_runs.load_scale(each).summary for each in study_runs.SCALES})
        return
    part_of_inco = inco.load_part(part) if name == "inco" else None
    chosen = part_of_inco.scale if part_of_inco else study_runs.load_scale(scale)
    names = study_runs.STUDIES if name == "all" else [name]
    folder = (out or Path("runs") / "reproduce" / ("inco" if part_of_inco else scale)).expanduser()
    for study in [part_of_inco.study] if part_of_inco else map(study_runs.load_study, names):
        table = study_runs.cells(study, chosen, overrides, only)
        left = inco.unrecorded(table, inco.read_csv(inco.records(part_of_inco, folder))) if part_of_inco else table
        count = len(study_runs.arms_of(left))
        if dry:
            which = f"inco, part {part}" if part_of_inco else f"{study.name} at scale {scale}"
            typer.echo(f"{which}: {len(table)} cells, {count} runs")
            continue
        if left and not tables:
            with RunDisplay(quiet, count) as display:
                study_runs.run_table(left, folder, jobs, display.watch)
        named = ["inco", "--part", part] if part_of_inco else [study.name, "--scale", scale]
        command = shlex.join(["incofl", "reproduce", *named, *words])
        if part_of_inco:
            path = inco.save(part_of_inco, table, folder, command)
            typer.echo(f"tables in {path}, run folders in {folder / 'runs'}")
            continue
        results = study_runs.judge(table, folder, chosen.tail)
        path = study_runs.save(study, chosen, table, results, folder, command)
        title = f"{study.title}; scale {scale}: test accuracy in percent, last {chosen.tail} rounds"
        print_table(study_runs.lines(results), title)
        typer.echo(f"{len(table[0].arms)} seed(s); {CAPTION}\nscale {scale}: {chosen.summary}")
        for note in (f"but with {', '.join(set_)}" if set_ else "", study.note):
            if note:
                typer.echo(note)
        if study.name == "case-study":
            from incofl.studies import observations  # needs the extra analysis

            with make_console().status("looking at the clients' models") as status:
                lines, page = observations.save(table, folder, chosen.tail, command, status.update)
            print_table(lines, "the paper's observations")
            typer.echo(f"observations in {page}")
        typer.echo(f"table in {path}, run folders in {folder / 'runs'}")
