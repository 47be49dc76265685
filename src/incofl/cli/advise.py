"""The command ``incofl advise``: what a fleet of unequal devices should do, what that costs, what it gains."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import incofl.cli.arguments as arg

if TYPE_CHECKING:
    from incofl.studies.advise import Advice

SMALL_SCALE = 30  # rounds of an option that is tried, unless they are asked for


def advise(
    config: arg.Config = None,
    devices: arg.Devices = None,
    model: arg.Model = None,
    set_: arg.Set = None,
    try_: Annotated[bool, typer.Option("--try", help="Run the options on your data, and compare them.")] = False,
    root: arg.Root = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help=f"Rounds of a run that tries an option; those of the config, at most {SMALL_SCALE}."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="S,T,...", help="Seeds; every option runs each.")] = "0,1,2",
    out: Annotated[Path, arg.out("DIR", "With --try: folder for runs and tables.")] = Path("runs/advice"),
    jobs: arg.Jobs = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print exact numbers as JSON.")] = False,
    quiet: arg.Quiet = False,
) -> None:
    """Say what a fleet of unequal devices should do: which device trains what, what each option costs and gains.

    The options: everybody trains the smallest size, only the large devices take part, each size by itself, or slices of
    one model. With --try they are run under the same seeds, and the answer says how sure it is.
    """
    from incofl.cli.display import RunDisplay, print_table
    from incofl.costs import load_devices
    from incofl.engine.files import write_json
    from incofl.report.tables import ADVICE
    from incofl.studies.advise import accuracies, advise, clients_of, gotten
    from incofl.studies.compare import compare
    from incofl.studies.gains import GAP

    overrides = arg.overrides(set_, model=model, root=root, rounds=rounds)
    fleet = [] if devices is None else load_devices(devices)
    advice = advise(config, fleet, overrides=overrides)
    if not as_json:
        _print(advice)
    if not try_:
        if as_json:
            typer.echo(json.dumps(_numbers(advice), indent=2))
            return
        gain = "; what it gains on your data: --try" if len(advice.held) > 1 else ""
        typer.echo(f"recommended: {advice.recommended}, {advice.words}{gain}")
        return
    names, numbers = [option.method for option in advice.options], arg.seeds(seeds)
    fixed = [*overrides, *clients_of(advice.fleet, len(advice.levels))]
    if rounds is None and advice.config.rounds > SMALL_SCALE:
        fixed.append(f"rounds={SMALL_SCALE}")
        hint = f"more: --rounds {advice.config.rounds}"
        typer.echo(f"{SMALL_SCALE} rounds of each option and seed instead of the config's; {hint}", err=as_json)
    with RunDisplay(quiet or as_json, len(names) * len(numbers)) as display:
        tried = compare(names, config, out, seeds=numbers, jobs=jobs, overrides=fixed, progress=display.watch)
    write_json(out / ADVICE, _tables(advice))  # for the page
    lines = accuracies(advice, tried.setting) if tried.setting else []
    if as_json:
        accuracy = list(map(asdict, gotten(advice, tried.setting))) if tried.setting else []
        found = {"answer": tried.answer, "accuracy": accuracy, "results": list(map(asdict, tried))}
        typer.echo(json.dumps(_numbers(advice) | found, indent=2))
        return
    if lines:
        title = f"test accuracy in percent that each device gets, {tried[0].measure}, {len(numbers)} seed(s)"
        print_table(lines, title + tried.how)
        print_table(tried.gains, f"what each level gains over its best baseline, in points{tried.how}")
        typer.echo(GAP)
        typer.echo(tried.answer)
    typer.echo(f"tables and run folders in {out}; a page of them: incofl report {out} -o {out / 'report.html'}")


def _tables(advice: "Advice") -> dict[str, list[list[str]]]:
    """By title, what the fleet is and what each option costs."""
    from incofl.costs import human
    from incofl.report.tables import duration

    rows = [cost.cells(count) for cost, count in zip(advice.levels, advice.counts, strict=True)]
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    levels = [[*line[:-1], "devices" if at == 0 else line[-1]] for at, line in enumerate(lines)]
    named = [["device", "count", "level", ""]]
    for each in advice.fleet:
        level = "none" if each.level is None else str(each.level)
        named.append([each.device.name, str(each.device.count), level, f"left out: {each.why}" if each.why else ""])
    if not any(line[-1] for line in named):
        named = [line[:-1] for line in named]
    total = sum(each.device.count for each in advice.fleet)
    costs = [["option", "what", "devices", "bytes a round", "memory", "longest turn"]]
    for option in advice.options:
        took = f"{option.devices} of {total}"
        cells = [took, human(option.bytes, "B"), human(option.memory, "B"), duration(option.seconds)]
        costs.append([option.method, option.words, *cells])
    return {
        "the levels": levels,
        "the largest level that each device can hold under every option": named,
        "what the fleet can do, and what a round costs": costs,
    }


def _print(advice: "Advice") -> None:
    from incofl.cli.display import print_table

    for title, lines in _tables(advice).items():
        print_table(lines, title)
    assumed = "" if advice.measured else " (assumed: the data cannot be read here)"
    typer.echo(f"bytes of a cohort of {advice.config.cohort_size}; turns of {advice.examples:.0f} examples{assumed}")
    if any(each.device.speed is None for each in advice.fleet):
        typer.echo("devices without a speed are taken to be as fast as one core of this machine")
    for line in advice.warnings:
        typer.echo(f"warning: {line}")


def _numbers(advice: "Advice") -> dict[str, object]:
    return {
        "levels": [asdict(cost) for cost in advice.levels],
        "devices": [asdict(each.device) | {"level": each.level, "left_out": each.why} for each in advice.fleet],
        "options": [asdict(option) for option in advice.options],
        "recommended": advice.recommended,
        "examples_per_client": advice.examples,
        "warnings": advice.warnings,
    }
