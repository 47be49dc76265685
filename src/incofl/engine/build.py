"""From a config to the federation that it describes: the one way, for the engine, Ray and Flower."""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from incofl.attacks import ON_DATA
from incofl.config import Config, find_parts, load_config
from incofl.config.schema import HEADINGS
from incofl.costs import DeviceClass, assign, load_devices
from incofl.data import Data
from incofl.data.partition import VirtualPartition, make_partition, natural_partition
from incofl.engine.federation import ClientLevels, Federation
from incofl.errors import ConfigError, DataError, RunError
from incofl.layout import Layout
from incofl.method import Method
from incofl.models import Model, ModelOptions, make_model
from incofl.models.hf import PREFIX
from incofl.models.infer.closing import find_closing
from incofl.models.pretrained import with_pretrained
from incofl.seeds import Purpose, numpy_rng, seed_of, torch_rng
from incofl.split import Kind, Levels, Splitter, num_depths, submodel
from incofl.split.growth import make_growth
from incofl.split.start import identity_start
from incofl.tensors import map_inputs


def build_model(config: Config) -> Model:
    """The server model, initialised from the seed. Needs no files: ``build`` puts pretrained weights into it."""
    parts, m, data = find_parts(config), config.model, config.objects.get("data")
    source = parts.source
    assert m.width is not None  # resolved
    options = ModelOptions(
        shape=source.view(config.data.side).shape,
        classes=source.classes,
        vocabulary=source.vocabulary,
        sequence=source.sequence,
        width=m.width,
        stem="small" if m.stem == "small" else "imagenet",
        depth=m.depth,
        dim=m.dim,
        heads=m.heads,
        patch=m.patch,
        options=m.options,
        blocks=(m.blocks,) if isinstance(m.blocks, str) else m.blocks or (),
        pretrained=m.pretrained,
        inputs=data.inputs if isinstance(data, Data) else source.inputs,
        logits=parts.task.classes and (source.labelled or source.sequence),
    )
    extend = functools.partial(parts.method.extend, levels=5 if config.split.levels == "auto" else config.split.levels)
    seed = seed_of(config.seed, Purpose.MODEL)
    return make_model(config.objects.get("model") or m.name, options, seed=seed, extend=extend)


def split_kind(config: Config, layout: Layout) -> Kind:
    """How the model is split; one that the table does not know, as its layout suggests."""
    if config.split.kind != "auto":
        return config.split.kind
    if not layout.stages:
        return "hetero"
    return "layer" if len(layout.stages) == 1 else "stage"


def build_splitter(config: Config, model: Model) -> Splitter:
    """The splitter, checked against the model."""
    kind, levels = split_kind(config, model.layout), config.split.levels
    most = 5 if kind in ("hetero", "rank") else min(5, num_depths(model.layout, kind))
    number: Levels = most if levels == "auto" else levels
    made = find_parts(config).method.split.splitter(model.layout, kind, number, config.split.depth)
    return dataclasses.replace(made, seed=config.seed, round_down=config.split.rounding == "down")


def build_method(config: Config) -> Method:
    """The method with the config's options in it."""
    method, aggregate = find_parts(config).method, config.aggregate
    assert aggregate.weighting != "auto"  # resolved
    assert config.buffers != "auto"
    server = dataclasses.replace(
        method.server,
        weighting=aggregate.weighting,
        precision=aggregate.precision,
        buffers=config.buffers,
        anchored=method.anchor.on and config.buffers != "static",
        cohort=config.cohort_size,
        squares=any(getattr(transform, "needs_squares", False) for transform in method.transforms),
    )
    return dataclasses.replace(method, server=server)


def build_data(config: Config) -> Data:
    """The data: an object, or a data set that is read from ``data.root``; limited by the config."""
    data = config.objects.get("data")
    if not isinstance(data, Data):
        source = find_parts(config).source
        train, test = source.load(Path(config.data.root).expanduser())
        pipeline = source.view(config.data.side).pipeline
        data = Data(train, test, classes=source.classes, pipeline=pipeline, name=config.data.name)
    limit = config.data.limit
    if limit is not None and limit < len(data.train):
        if data.clients is not None:
            raise ConfigError("data.limit: got a number, expected none: your data say which client holds what")
        rng = np.random.default_rng(seed_of(config.seed, Purpose.LIMIT))
        keep = torch.from_numpy(np.sort(rng.permutation(len(data.train))[:limit]))
        data = dataclasses.replace(data, train=data.train.pick(keep))
    if config.eval.limit is not None and config.eval.limit < len(data.test):
        chosen = torch.randperm(len(data.test), generator=torch_rng(config.seed, Purpose.TEST_LIMIT))
        data = dataclasses.replace(data, test=data.test.pick(chosen[: config.eval.limit].sort().values))
    return data


def build_partition(config: Config, data: Data) -> Sequence[Tensor]:
    """Who holds which examples."""
    labels, c, clients = data.train.y, config.data, config.num_clients
    if c.partition == "virtual":
        stream = functools.partial(numpy_rng, config.seed, Purpose.PARTITION, 0)
        return VirtualPartition(labels, clients, c.alpha, c.examples, stream)
    rng = numpy_rng(config.seed, Purpose.PARTITION)
    if c.partition == "natural" and data.clients is not None:
        if clients > len(data.clients):
            raise ConfigError(f"data.clients: got {clients}, expected at most {len(data.clients)}, those of your data")
        return list(data.clients[:clients])
    if c.partition == "natural":
        return natural_partition(data.train.groups, clients, rng)
    assert c.partition != "auto"  # resolved
    return make_partition(labels, clients, c.partition, c.alpha, rng)


def client_levels(config: Config, num_levels: int) -> ClientLevels:
    """The level of each client: contiguous groups, the smallest first; equal unless ``split.counts`` says otherwise."""
    clients, counts = config.num_clients, config.split.counts
    if counts is None:
        return ClientLevels(np.arange(clients) * num_levels // clients, num_levels)
    if len(counts) != num_levels:
        raise ConfigError(f"split.counts: got {len(counts)} numbers, expected {num_levels}, one per level")
    return ClientLevels.grouped(counts)


BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")  # how the system calls them, the last on Arm


def has_bf16(known: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has units for bf16; without them it is slower than float32."""
    return known.exists() and not set(BF16_UNITS).isdisjoint(known.read_text().split())


def check_machine(config: Config) -> None:
    """Refuses a device or precision that this machine has not, and ``engine.compile`` without a C++ compiler."""
    device, compilers = config.engine.device, [os.environ.get("CXX"), "g++", "clang++"]
    try:
        float(torch.zeros((), device=device))
    except (RuntimeError, AssertionError, ValueError) as problem:
        reason = str(problem).partition("\n")[0]
        want = f"expected a device of this machine such as cpu ({reason})"
        raise ConfigError(f"engine.device: got {device!r}, {want}") from None
    if config.engine.precision == "bf16" and torch.device(device).type == "cpu" and not has_bf16():
        want = f"expected float32: this processor has no units for it ({', '.join(BF16_UNITS)})"
        raise ConfigError(f"engine.precision: got 'bf16', {want}")
    if config.engine.compile and not any(shutil.which(name) for name in compilers if name):
        want = "expected a C++ compiler on this machine: install g++ or leave it out"
        raise ConfigError(f"engine.compile: got true, {want}")


def with_identity_start(federation: Federation, if_possible: bool, given: bool = False) -> Federation:
    """A federation whose levels all start as the function of the smallest; with a note if that is not possible.

    The values of a module that was ``given``, which may be trained, are kept ``if_possible``.
    """
    if given and if_possible:
        hint = "give a function that makes it, or say split.start = 'identity'"
        note = f"larger levels start with the values of the given module, not as the smallest: {hint}"
        return dataclasses.replace(federation, notes=(*federation.notes, note))
    model, splitter, layout = federation.model, federation.splitter, federation.model.layout
    if not layout.closing:
        module = submodel(model.template, layout, splitter.slice(layout, len(splitter.depths) - 1))
        module.load_state_dict(model.initial)
        example = map_inputs(lambda x: torch.zeros(x.shape, dtype=x.dtype), model.example(2))
        layout = dataclasses.replace(layout, closing=find_closing(module, layout.blocks, example))
    try:
        initial = identity_start(model.initial, model.template, layout, splitter)
    except ConfigError as problem:
        if not if_possible:
            raise
        note = f"larger levels start at random, not as the smallest: {str(problem).rpartition(': ')[2]}"
        return dataclasses.replace(federation, notes=(*federation.notes, note))
    return dataclasses.replace(federation, model=dataclasses.replace(model, initial=initial))


def outline(config: Config) -> Federation:
    """The federation of a config before it has data: enough to check it and to say what it costs. Reads no files."""
    model, method = build_model(config), build_method(config)
    splitter = build_splitter(config, model)
    names, levels = config.split.names, len(splitter.depths)
    if names is not None and (len(names), len({*names} - HEADINGS)) != (levels, levels):
        hint = f"expected a name of its own for each of {levels} levels, none of {', '.join(sorted(HEADINGS))}"
        raise ConfigError(f"split.names: got {names}, {hint}")
    growth = make_growth(config.split.grow, len(splitter.depths), config.rounds)
    return Federation(
        model=model,
        splitter=splitter,
        method=method,
        data=Data((torch.empty(0), torch.empty(0))),
        partition=(),
        levels=client_levels(config, len(splitter.depths)),
        task=find_parts(config).task,
        local=config.local,
        seed=config.seed,
        device=config.engine.device,
        compile=config.engine.compile,
        precision=config.engine.precision,
        vectorise=config.engine.vectorise,
        vectorise_clients=config.engine.vectorise_clients,
        measured=config.eval.measured,
        best_path=config.eval.best_path is True,
        growth=growth if method.level == "own" else None,
        notes=tuple(f"[{key}] has no effect: {method.name} has no such part" for key in config.unused),
    )


def clients_of_fleet(devices: Sequence[DeviceClass], overrides: Sequence[str], where: str) -> list[str]:
    """The overrides with the clients that a fleet has; those that say something else are refused."""
    size = sum(device.count for device in devices)
    for key, _, value in (override.partition("=") for override in overrides):
        if key.strip() in ("split.counts", "split.names") or (
            key.strip() == "data.clients" and value.strip() != str(size)
        ):
            raise ConfigError(f"--set {key}={value}: {where} has {size} clients; leave it out, or change the file")
    return [*overrides, f"data.clients={size}", "split.counts=none"]


def levels_of_fleet(placed: Sequence[tuple[DeviceClass, int]], levels: int) -> list[str]:
    """The values of a config that make devices its clients: how many hold each level, and what these are called."""
    held = [(device.count, device.name, own) for device, own in placed]
    counts = [sum(count for count, _, own in held if own == level) for level in range(levels)]
    names = [" and ".join(name for _, name, own in held if own == level) or f"level {level}" for level in range(levels)]
    named = json.dumps(names, ensure_ascii=False)
    return [f"data.clients={sum(counts)}", f"split.counts={counts}", f"split.names={named}"]


def plan_fleet(
    config: str | None, overrides: Sequence[str], devices: Path | None, ignore_limits: bool
) -> tuple[Config, Federation, list[tuple[DeviceClass, int | None]]]:
    """A config and its federation, whose clients are the devices of a file if there is one, and what each class trains.

    The last are the classes of devices with the level that each trains; ``None`` if it takes no part.
    """
    if devices is None:
        resolved = load_config(config, overrides)
        return resolved, outline(resolved), []
    fleet = load_devices(devices)
    overrides = clients_of_fleet(fleet, overrides, str(devices))
    federation = outline(load_config(config, overrides))
    levels, trained = federation.costs, []
    placed = list(zip(fleet, assign(fleet, levels), strict=True))
    for device, fitting in placed:
        level = federation.trained(fitting)
        exceeded = [] if level is None else device.exceeded(levels[level])
        if exceeded and not ignore_limits:
            why = f"{federation.method.name} trains level {level} on it, which needs {'; '.join(exceeded)}"
            hint = "choose another method, or write --ignore-limits to train it anyway"
            raise ConfigError(f"device class {device.name!r}: {why}; {hint}")
        trained.append((device, level))
    resolved = load_config(config, [*overrides, *levels_of_fleet(placed, len(levels))])
    return resolved, federation.with_clients(client_levels(resolved, len(levels)), ()), trained


def attackers(config: Config, federation: Federation) -> frozenset[int]:
    """The clients that attack."""
    if config.attack.kind is None:
        return frozenset()
    levels = [federation.level_of(client) for client in range(len(federation.levels))]
    return config.attack.clients(levels, config.seed)


def build(config: Config, partition: Sequence[Tensor] | None = None, begun: bool = False) -> Federation:
    """Everything that a run needs.

    A ``partition`` that was saved with an earlier part of the run is used as it is. For a run that has ``begun``,
    pretrained weights are not looked for: its checkpoint takes their place.
    """
    check_machine(config)
    federation = outline(config)
    if config.model.pretrained is not None and config.split.start == "identity":
        raise ConfigError("split.start: got 'identity', expected 'random' with model.pretrained")
    if config.split.start != "random" and config.model.pretrained is None and not begun:
        given = isinstance(config.objects.get("model"), nn.Module | tuple)
        federation = with_identity_start(federation, config.split.start != "identity", given)
    if config.model.pretrained is not None and not begun and not config.model.name.startswith(PREFIX):
        federation = dataclasses.replace(federation, model=with_pretrained(federation.model, config.model.pretrained))
    if federation.method.level == "largest-only" and not federation.levels.counts[-1]:
        name = federation.method.name
        raise ConfigError(f"method: {name} needs clients of the largest level, and no client can hold it")
    data = build_data(config)
    if federation.task.classes and data.train.y.dim() == 1 and data.train.y.is_floating_point():
        hint = "y.long(), or for numbers task='regression' (task.name)"
        raise DataError(f"train: got targets of {data.train.y.dtype}, expected whole numbers, the classes: {hint}")
    last = int(torch.cat([torch.tensor([-1]), *(partition or [])]).max())
    if last >= len(data.train):
        raise RunError(f"partition.json: names example {last}, expected less than {len(data.train)}; delete the folder")
    partition = build_partition(config, data) if partition is None else partition
    federation = dataclasses.replace(federation, data=data, partition=partition)
    if config.attack.kind in ON_DATA:
        if isinstance(partition, VirtualPartition):
            raise ConfigError(f"attack.kind: got {config.attack.kind!r}, expected clients with examples of their own")
        poisoned = config.attack.poison(data, partition, attackers(config, federation), config.seed)
        federation = dataclasses.replace(federation, data=poisoned)
    federation.check()
    return federation
