"""From a fleet of unequal devices to a recommendation: what the fleet can do, what that costs, what each device gains.

Every device gets the largest level that fits it under all the options, so that these can be compared device by device.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from incofl.config import AnyConfig, Config, make_config
from incofl.config.schema import called
from incofl.costs import Cost, DeviceClass
from incofl.engine.build import build_data, clients_of_fleet, levels_of_fleet, outline
from incofl.engine.federation import Federation
from incofl.errors import ConfigError, DataError
from incofl.methods import BASELINES, FOR_EQUALS, RECOMMENDED, SLICES
from incofl.split import submodel
from incofl.statistics import Estimate, plus_minus
from incofl.studies.gains import DEVICES, Setting
from incofl.tensors import call, map_inputs

OPTIONS: Mapping[str, str] = BASELINES | SLICES  # in plain words
TIMED = 3  # training steps of each level, of which the fastest counts
ASSUMED_EXAMPLES = 100  # of a client, where the data cannot be read
PASSES = 3  # a training step costs about three forward passes


@dataclass(frozen=True)
class Assigned:
    """A class of devices and what it can hold."""

    device: DeviceClass
    level: int | None  # none: left out
    why: str = ""  # it is left out


@dataclass(frozen=True)
class Option:
    """What one option costs."""

    method: str
    words: str
    devices: int  # number of devices that take part
    bytes: float  # of a round, down and up, all clients together, on average
    memory: int  # that the largest level needs, estimated
    seconds: float  # of the longest turn of a device


@dataclass(frozen=True)
class Advice:
    """What a fleet can do."""

    config: Config  # of a run with this fleet
    levels: list[Cost]
    fleet: list[Assigned]
    options: list[Option]
    examples: float  # of a client, on average
    measured: bool  # whether these were counted, not assumed

    @property
    def held(self) -> list[int]:
        """The levels that some device holds."""
        return [level for level, count in enumerate(self.counts) if count]

    @property
    def recommended(self) -> str:
        """The method to begin with; where all devices hold the same size, that of equal clients."""
        return RECOMMENDED if len(self.held) > 1 else FOR_EQUALS

    @property
    def words(self) -> str:
        """What the recommended method does, and why where that is not plain."""
        if len(self.held) > 1:
            return OPTIONS[self.recommended]
        fits = "; a larger model would fit, too" if self.held[0] == len(self.levels) - 1 else ""
        return f"for all devices hold the same size, level {self.held[0]}{fits}"

    @property
    def warnings(self) -> list[str]:
        """What a user should know of the levels."""
        below = ", ".join(str(level) for level in range(self.held[0]))
        unused = f"level {below}: every device holds more, but allsmall and the floor of fedfloor train level 0"
        return (
            [f"{unused}; choose split.levels so that the smallest is what your weakest device holds"] if below else []
        )

    @property
    def counts(self) -> list[int]:
        """Number of devices of each level."""
        return list(self.config.split.counts or ())


def advise(
    config: AnyConfig = None,
    devices: Sequence[DeviceClass] = (),
    *,
    overrides: Sequence[str] = (),
    methods: Sequence[str] = tuple(OPTIONS),
    **objects: Any,
) -> Advice:
    """Says which level each class of devices trains, and what each option costs.

    Args:
        config: as for ``run``.
        devices: the fleet; left out, the clients of the config, a class for each level.
        overrides: more values for the config, each as after ``--set``.
        methods: the options, names of methods.
        objects: ``model``, ``data`` and ``task``, as for ``run``.
    """
    federations, fleet = place(config, devices, overrides=overrides, methods=methods, **objects)
    held = [(each, each.level) for each in fleet if each.level is not None]
    if not held:
        raise ConfigError(f"devices: no level fits any class; {fleet[0].device.name}: {fleet[0].why}")
    costs = {name: federation.costs for name, federation in federations.items()}
    first = next(iter(federations.values()))
    chosen = make_config(config, [*overrides, *clients_of(fleet, len(first.costs))], **objects)
    examples, measured = _examples(chosen)
    speeds = _speeds(first, sorted({0, *(level for _, level in held)}))  # some options train the smallest everywhere
    options = []
    for name, federation in federations.items():
        turns = [(each, level) for each, own in held if (level := federation.trained(own)) is not None]
        if not turns:
            continue
        taking = sum(each.device.count for each, _ in turns)
        sent = [
            each.device.count * (costs[name][level].bytes_down + costs[name][level].bytes_up) for each, level in turns
        ]
        work = PASSES * examples
        seconds = max(work * federation.turn(n) / (each.device.speed or speeds[n]) for each, n in turns)
        memory = max(costs[name][level].memory for _, level in turns)
        cohort = min(chosen.cohort_size, taking)
        options.append(Option(name, OPTIONS.get(name, name), taking, cohort * sum(sent) / taking, memory, seconds))
    return Advice(chosen, first.costs, fleet, options, examples, measured)


def place(
    config: AnyConfig,
    devices: Sequence[DeviceClass],
    *,
    overrides: Sequence[str],
    methods: Sequence[str],
    **objects: Any,
) -> tuple[dict[str, Federation], list[Assigned]]:
    """The federation of each method, and the largest level of each class of devices that fits it under all of them."""
    given = clients_of_fleet(devices, overrides, "the fleet") if devices else overrides
    configs = {name: make_config(config, [*given, f"method={name}"], **objects) for name in methods}
    federations = {name: outline(chosen) for name, chosen in configs.items()}
    first, names = federations[methods[0]], configs[methods[0]].split.names
    own = [Assigned(DeviceClass(called(names, n), count), n) for n, count in enumerate(first.levels.counts) if count]
    return federations, _assigned(devices, [one.costs for one in federations.values()]) if devices else own


def clients_of(fleet: Sequence[Assigned], levels: int) -> list[str]:
    """The values of a config that make the devices of a fleet its clients, without those that are left out."""
    return levels_of_fleet([(each.device, each.level) for each in fleet if each.level is not None], levels)


def _assigned(devices: Sequence[DeviceClass], options: Sequence[Sequence[Cost]]) -> list[Assigned]:
    """The largest level of each class that fits it under all options."""
    found = []
    for device in devices:
        fits = [level for level, needs in enumerate(zip(*options, strict=True)) if not any(map(device.exceeded, needs))]
        why = "" if fits else f"the smallest level needs {'; '.join(_most(device, [cost[0] for cost in options]))}"
        found.append(Assigned(device, max(fits, default=None), why))
    return found


def _most(device: DeviceClass, needs: Sequence[Cost]) -> list[str]:
    return max((device.exceeded(cost) for cost in needs), key=len)


def _examples(config: Config) -> tuple[float, bool]:
    """The mean number of examples of a client, and whether it was counted."""
    if config.data.partition == "virtual":
        return config.data.examples, True
    try:
        return len(build_data(config).train) / config.num_clients, True
    except (DataError, OSError):
        return ASSUMED_EXAMPLES, False


def _speeds(federation: Federation, levels: Sequence[int]) -> dict[int, float]:
    """The multiply-accumulates a second of a training step of each level on one core of this machine."""
    model, batch_size, threads, found = federation.model, federation.local.batch_size, torch.get_num_threads(), {}
    batch = map_inputs(lambda x: torch.zeros(x.shape, dtype=x.dtype), model.example(batch_size))
    torch.set_num_threads(1)
    for level in levels:
        module, times = submodel(model.template, model.layout, federation.slice(level, 0)).train(), []
        for _ in range(TIMED):
            start = time.perf_counter()
            output = call(module, batch)
            last = output[-1] if isinstance(output, list | tuple) else output
            torch.as_tensor(last).square().mean().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            times.append(time.perf_counter() - start)
        found[level] = PASSES * batch_size * federation.costs[level].macs / min(times)
    torch.set_num_threads(threads)
    return found


def accuracies(advice: Advice, setting: Setting) -> list[list[str]]:
    """What each class of devices gets from each option that was tried; headings first."""
    classes = gotten(advice, setting)
    arms = list(classes[0].accuracy)
    lines = [["devices", "count", "level", *arms]]
    for each in classes:
        cells = ("nothing" if found is None else plus_minus(found) for found in each.accuracy.values())
        level = "none" if each.level is None else str(each.level)
        lines.append([each.name, str(each.count), level, *(["-"] * len(arms) if each.level is None else cells)])
    fleet = [setting.estimate(arm, DEVICES) for arm in arms]
    total = str(sum(each.device.count for each in advice.fleet if each.level is not None))
    return [*lines, ["all devices", total, "", *(plus_minus(mean) if mean else "-" for mean in fleet)]]


@dataclass(frozen=True)
class Gotten:
    """What a class of devices gets."""

    name: str
    count: int
    level: int | None
    accuracy: dict[str, Estimate | None]  # in percent, by option; none: no model


def gotten(advice: Advice, setting: Setting) -> list[Gotten]:
    """What each class of devices gets from each option that was tried."""
    arms = [option.method for option in advice.options if option.method in setting.values]
    return [
        Gotten(
            each.device.name,
            each.device.count,
            each.level,
            {arm: None if each.level is None else setting.estimate(arm, str(each.level)) for arm in arms},
        )
        for each in advice.fleet
    ]
