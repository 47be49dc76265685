"""The command ``incofl plan``: what each level costs, and which level each class of devices trains."""

from __future__ import annotations  # the types of a plan are imported only when one is made

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import incofl.cli.arguments as arg
from incofl.errors import ConfigError

if TYPE_CHECKING:
    from incofl.config import Config
    from incofl.costs import DeviceClass
    from incofl.engine.federation import Federation


def plan(
    config: arg.Config = None,
    method: arg.Method = None,
    model: arg.Model = None,
    set_: arg.Set = None,
    devices: arg.Devices = None,
    ignore_limits: arg.IgnoreLimits = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print exact numbers as JSON.")] = False,
) -> None:
    """Show what each level costs, and which level fits which device. Needs no data files.

    MACs are the multiply-accumulates of convolutions and matrix products in one forward pass of one example.
    """
    from incofl.cli.display import print_table
    from incofl.costs import human
    from incofl.engine.build import split_kind

    overrides = arg.overrides(set_, method=method, model=model)
    resolved, federation, fleet = make_plan(config, overrides, devices, ignore_limits)
    wanted, data, layout = resolved.model, resolved.data, federation.model.layout
    kind, levels, clients = split_kind(resolved, layout), federation.costs, federation.clients_by_level
    kept_whole = layout.kept_whole if kind == "hetero" else {}
    mean = sum(cost.parameters * clients[cost.level] for cost in levels) / (sum(clients) or 1)
    if as_json:
        numbers: dict[str, object] = {"model": wanted.name, "width": wanted.width, "stem": wanted.stem}
        numbers |= {"data": data.name, "split": kind, "mean_parameters": mean}
        numbers["levels"] = [asdict(cost) | {"clients": clients[cost.level]} for cost in levels]
        numbers["devices"] = [asdict(device) | {"level": level} for device, level in fleet]
        numbers["kept_whole"] = dict(kept_whole)
        typer.echo(json.dumps(numbers, indent=2))
        return
    lines = [["level", "blocks", "width", "params", "MACs", "down", "up", "memory", "clients"]]
    for cost in levels:
        sizes = [human(size, "B") for size in (cost.bytes_down, cost.bytes_up, cost.memory)]
        counts = [human(cost.parameters), human(cost.macs), *sizes, str(clients[cost.level])]
        lines.append([str(cost.level), " ".join(map(str, cost.blocks)), f"{cost.width:g}", *counts])
    print_table(lines, f"{wanted.name} at width {wanted.width:g}, {kind} splitting, {data.name}")
    typer.echo("MACs of a forward pass of one example; bytes a round; memory of training, estimated")
    typer.echo(f"mean over the {sum(clients)} clients: {human(mean)} parameters")
    for axis, reason in kept_whole.items():
        typer.echo(f"{axis} is held whole: {reason}")
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


def make_plan(
    config: str | None, overrides: list[str], devices: Path | None, ignore_limits: bool
) -> tuple[Config, Federation, list[tuple[DeviceClass, int | None]]]:
    """Returns a config with its federation, whose clients are the devices of a file if there is one.

    The last are the classes of devices with the level that each trains; ``None`` if it takes no part.
    """
    from incofl.config import load_config
    from incofl.costs import assign, load_devices
    from incofl.engine.build import outline
    from incofl.engine.federation import ClientLevels

    if devices is None:
        resolved = load_config(config, overrides)
        return resolved, outline(resolved), []
    fleet = load_devices(devices)
    size = sum(device.count for device in fleet)
    for key, _, value in (override.partition("=") for override in overrides):
        if key.strip() == "split.counts" or (key.strip() == "data.clients" and value.strip() != str(size)):
            raise ConfigError(f"--set {key}={value}: {devices} has {size} clients; leave it out, or change the file")
    overrides = [*overrides, f"data.clients={size}", "split.counts=none"]
    federation = outline(load_config(config, overrides))
    method, levels = federation.method, federation.costs
    trained, counts = [], [0] * len(levels)
    for device, fitting in zip(fleet, assign(fleet, levels), strict=True):
        counts[fitting] += device.count
        level = federation.trained(fitting)
        exceeded = [] if level is None else device.exceeded(levels[level])
        if exceeded and not ignore_limits:
            raise ConfigError(
                f"device class {device.name!r}: {method.name} trains level {level} on it, which needs "
                f"{'; '.join(exceeded)}; choose another method, or write --ignore-limits to train it anyway"
            )
        trained.append((device, level))
    resolved = load_config(config, [*overrides, f"split.counts={counts}"])
    return resolved, federation.with_clients(ClientLevels.grouped(counts), ()), trained
