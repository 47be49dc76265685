"""The command ``incofl plan``: what each level costs, and which level each class of devices trains."""

from __future__ import annotations  # the types of a plan are imported only when one is made

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import incofl.cli.arguments as arg
from incofl.errors import ConfigError

if TYPE_CHECKING:
    from incofl.config import Config
    from incofl.costs import Cost, DeviceClass


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
    from incofl.cli.display import make_console, print_table
    from incofl.costs import human

    found = make_plan(config, arg.overrides(set_, method=method, model=model), devices, ignore_limits)
    wanted, data = found.config.model, found.config.data
    mean = sum(cost.parameters * found.clients[cost.level] for cost in found.levels) / (sum(found.clients) or 1)
    if as_json:
        numbers: dict[str, object] = {"model": wanted.name, "width": wanted.width, "stem": wanted.stem}
        numbers |= {"data": data.name, "split": found.kind, "mean_parameters": mean}
        numbers["levels"] = [asdict(cost) | {"clients": found.clients[cost.level]} for cost in found.levels]
        numbers["devices"] = [asdict(device) | {"level": level} for device, level in found.devices]
        numbers["kept_whole"] = dict(found.kept_whole)
        typer.echo(json.dumps(numbers, indent=2))
        return
    lines = [["level", "blocks", "width", "params", "MACs", "down", "up", "memory", "clients"]]
    for cost in found.levels:
        sizes = [human(size, "B") for size in (cost.bytes_down, cost.bytes_up, cost.memory)]
        counts = [human(cost.parameters), human(cost.macs), *sizes, str(found.clients[cost.level])]
        lines.append([str(cost.level), " ".join(map(str, cost.blocks)), f"{cost.width:g}", *counts])
    console = make_console()
    print_table(console, lines, f"{wanted.name} at width {wanted.width:g}, {found.kind} splitting, {data.name}")
    console.print("MACs of a forward pass of one example; bytes a round; memory of training, estimated", soft_wrap=True)
    console.print(f"mean over the {sum(found.clients)} clients: {human(mean)} parameters")
    for axis, reason in found.kept_whole.items():
        console.print(f"{axis} is held whole: {reason}", soft_wrap=True)
    if devices is None:
        return
    lines = [["device", "count", "memory", "compute", "bandwidth", "level", "params", "exceeded"]]
    for device, level in found.devices:
        limits = ((device.memory, "B"), (device.compute, "MAC"), (device.bandwidth, "B"))
        cells = [device.name, str(device.count), *("-" if n is None else human(n, unit) for n, unit in limits)]
        trained = None if level is None else found.levels[level]
        size = [str(level), human(trained.parameters)] if trained else ["none", "-"]
        lines.append([*cells, *size, "; ".join(device.exceeded(trained)) if trained else ""])
    within = not any(line[-1] for line in lines[1:])
    title = f"the level that each device class trains with {found.config.method}"
    print_table(console, [line[:-1] for line in lines] if within else lines, title)
    console.print(f"to run it: incofl run ... --devices {devices}{' --ignore-limits' * ignore_limits}", soft_wrap=True)


@dataclass(frozen=True)
class Plan:
    """A config with the clients of a fleet, what its levels cost, and who trains them.

    Attributes:
        clients: number of clients that train each level.
        devices: classes of the fleet with the level that each trains; ``None`` if it takes no part.
        kept_whole: axes that every level holds whole, with the reason.
    """

    config: Config
    kind: str
    levels: list[Cost]
    clients: list[int]
    devices: list[tuple[DeviceClass, int | None]]
    kept_whole: Mapping[str, str]


def make_plan(config: str | None, overrides: list[str], devices: Path | None, ignore_limits: bool = False) -> Plan:
    """Computes the costs of a config; with a file of devices, its clients are those devices."""
    from incofl.config import load_config
    from incofl.costs import assign, costs, load_devices
    from incofl.engine.build import build_method, build_model, build_splitter, client_levels, split_kind
    from incofl.engine.federation import clients_by_level

    fleet = load_devices(devices) if devices is not None else []
    if fleet:
        size = sum(device.count for device in fleet)
        for key, _, value in (override.partition("=") for override in overrides):
            if key.strip() == "split.counts" or (key.strip() == "data.clients" and value.strip() != str(size)):
                raise ConfigError(
                    f"--set {key}={value}: {devices} has {size} clients; leave it out, or change the file"
                )
        overrides = [*overrides, f"data.clients={size}", "split.counts=none"]
    resolved = load_config(config, overrides)
    model, method = build_model(resolved), build_method(resolved)
    levels = costs(model, build_splitter(resolved, model), resolved.local, method)
    by_class = [
        [device.count * (level == fitting) for level in range(len(levels))]
        for device, fitting in zip(fleet, assign(fleet, levels), strict=True)
    ]
    if fleet:
        counts = [sum(own) for own in zip(*by_class, strict=True)]
        resolved = load_config(config, [*overrides, f"split.counts={counts}"])
    trained = []
    for device, own in zip(fleet, by_class, strict=True):
        level = next((level for level, count in enumerate(clients_by_level(method, own)) if count), None)
        exceeded = [] if level is None else device.exceeded(levels[level])
        if exceeded and not ignore_limits:
            raise ConfigError(
                f"device class {device.name!r}: {method.name} trains level {level} on it, which needs "
                f"{'; '.join(exceeded)}; choose another method, or write --ignore-limits to train it anyway"
            )
        trained.append((device, level))
    kind = split_kind(resolved, model.layout)
    clients = clients_by_level(method, client_levels(resolved, len(levels)).counts)
    return Plan(resolved, kind, levels, clients, trained, model.layout.kept_whole if kind == "hetero" else {})
