"""The command ``incofl plan``: what each level costs, and which level each class of devices trains."""

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

import incofl.cli.arguments as arg

if TYPE_CHECKING:
    from incofl.config import Config
    from incofl.engine.federation import Federation


def plan(
    config: arg.Config = None,
    method: arg.Method = None,
    model: arg.Model = None,
    rounds: arg.Rounds = None,
    set_: arg.Set = None,
    devices: arg.Devices = None,
    ignore_limits: arg.IgnoreLimits = False,
    epsilon: Annotated[float | None, typer.Option(metavar="E", help="Say what privacy of this epsilon costs.")] = None,
    delta: Annotated[float, typer.Option(metavar="D", help="Delta of that privacy.")] = 1e-5,
    as_json: Annotated[bool, typer.Option("--json", help="Print exact numbers as JSON.")] = False,
) -> None:
    """Show what each level costs, and which level fits which device. Needs no data files.

    MACs are the multiply-accumulates of convolutions and matrix products in one forward pass of one example.
    """
    from incofl.cli.display import print_table
    from incofl.costs import human
    from incofl.engine.build import plan_fleet, split_kind
    from incofl.engine.findings import describe, warnings
    from incofl.models import MODELS

    overrides = arg.overrides(set_, method=method, model=model, rounds=rounds)
    resolved, federation, fleet = plan_fleet(config, overrides, devices, ignore_limits)
    wanted, data, layout = resolved.model, resolved.data, federation.model.layout
    kind, levels, clients = split_kind(resolved, layout), federation.costs, federation.clients_by_level
    notes = [*warnings(federation.method, layout, kind, federation.splitter), *federation.notes]
    mean = sum(cost.parameters * clients[cost.level] for cost in levels) / (sum(clients) or 1)
    if as_json:
        numbers: dict[str, object] = {"model": wanted.name, "width": wanted.width, "stem": wanted.stem}
        numbers |= {"data": data.name, "split": kind, "mean_parameters": mean}
        numbers["levels"] = [asdict(cost) | {"clients": clients[cost.level]} for cost in levels]
        numbers["devices"] = [asdict(device) | {"level": level} for device, level in fleet]
        widths = {axis.name: axis.size for axis in layout.narrow_axes}
        numbers["found"] = {"blocks": layout.stages, "widths": widths, "pairs": dict(layout.shallow)}
        if epsilon is not None:
            numbers["privacy"] = _privacy(resolved, federation, epsilon, delta)[0]
        typer.echo(json.dumps(numbers | {"kept_whole": dict(layout.kept_whole), "warnings": notes}, indent=2))
        return
    rows = [cost.cells(clients[cost.level]) for cost in levels]
    print_table(
        [list(rows[0]), *(list(row.values()) for row in rows)],
        f"{wanted.name} at width {wanted.width:g}, {kind} splitting, {data.name}",
    )
    typer.echo("MACs of a forward pass of one example; bytes a round; memory of training, estimated")
    typer.echo(f"mean over the {sum(clients)} clients: {human(mean)} parameters")
    if federation.method.server.mean.keeps_uploads:
        sent = sum(cost.bytes_up * clients[cost.level] for cost in levels) / (sum(clients) or 1)
        kept = human(round(resolved.cohort_size * sent), "B")
        typer.echo(f"the server keeps the uploads of a round until the last has come: {kept}")
    for line in [] if epsilon is None else _privacy(resolved, federation, epsilon, delta)[1]:
        typer.echo(line)
    for line in [] if wanted.name in MODELS else describe(layout):
        typer.echo(line)
    for line in notes:
        typer.echo(f"warning: {line}")
    if devices is None:
        return
    lines = [["device", "count", "memory", "compute", "bandwidth", "level", "params", "exceeded"]]
    for device, level in fleet:
        limits = ((device.memory, "B"), (device.compute, "MAC"), (device.bandwidth, "B"))
        cells = [device.name, str(device.count), *("-" if n is None else human(n, unit) for n, unit in limits)]
        trained = ["none", "-", ""]
        if level is not None:
            trained = [str(level), human(levels[level].parameters), "; ".join(device.exceeded(levels[level]))]
        lines.append([*cells, *trained])
    if not any(line[-1] for line in lines[1:]):
        lines = [line[:-1] for line in lines]
    print_table(lines, f"the level that each device class trains with {resolved.method}")
    typer.echo(f"to run it: incofl run ... --devices {devices}{' --ignore-limits' * ignore_limits}")


def _privacy(
    config: "Config", federation: "Federation", epsilon: float, delta: float
) -> tuple[dict[str, object], list[str]]:
    """The noise that a budget needs, and what it does to the mean where few clients hold a position; also in words."""
    from incofl.methods.privacy import Privacy

    cohort, clients = config.cohort_size, config.num_clients
    options = config.methods.get("privacy", Privacy())
    noise = replace(options, noise=None, epsilon=epsilon, delta=delta).for_fleet(cohort, clients, config.rounds).noise
    lines = [
        f"epsilon {epsilon:g} at delta {delta:g} over {config.rounds} rounds of {cohort} of {clients} clients: "
        f"noise multiplier {noise:.3g} (privacy.noise)"
    ]
    counts, of_mean = federation.clients_by_level, {}
    for level in federation.levels_in_use:
        holders = cohort * sum(counts[level:]) / clients
        of_mean[level] = noise / holders
        what = f"positions from level {level} on" if level else "positions that all hold"
        lines.append(f"  {what}: {holders:.3g} holders a round, noise of a mean {of_mean[level]:.3g} bounds")
    return {"epsilon": epsilon, "delta": delta, "noise": noise, "noise_of_mean_by_level": of_mean}, lines
