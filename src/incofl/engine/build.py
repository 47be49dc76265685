"""From a config to the federation it describes."""

import dataclasses
import functools
import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from incofl.config import Config
from incofl.data import (
    Dataset,
    VirtualPartition,
    find_source,
    load_dataset,
    make_partition,
    natural_partition,
)
from incofl.engine.federation import ClientLevels, Federation
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import BufferPolicy, Method, Weighting
from incofl.methods import find_method
from incofl.methods.noise import UploadNoise
from incofl.models import Model, ModelOptions, add_exits, make_model
from incofl.models.pretrained import with_pretrained
from incofl.models.resnet import Stem
from incofl.seeds import Purpose, numpy_rng, seed_of, torch_rng
from incofl.split import Kind, Splitter, check_ratios, exit_positions, make_exit_splitter, make_splitter, num_depths

_Part = TypeVar("_Part")


def build_model(config: Config) -> Model:
    """The server model, initialised from the seed. Needs no files: ``build`` puts pretrained weights into it."""
    source = find_source(config.data.name)
    m = config.model
    assert m.width is not None  # resolved by Config
    options = ModelOptions(
        shape=source.view(config.data.side).shape,
        classes=source.classes,
        vocabulary=source.vocabulary,
        sequence=source.sequence,
        width=m.width,
        stem=cast(Stem, m.stem),
        depth=m.depth,
        dim=m.dim,
        heads=m.heads,
        patch=m.patch,
    )
    return make_model(
        m.name, options, seed=seed_of(config.seed, Purpose.MODEL), extend=functools.partial(_extend, config)
    )


def _extend(config: Config, module: nn.Module, layout: Layout) -> Layout:
    """Adds an early exit for each level, for methods that train them, and the layers of the method itself."""
    if find_method(config.method).exits:
        levels = config.split.levels
        assert not isinstance(levels, str)  # resolved by Config for every method with exits
        number = levels if isinstance(levels, int) else len(levels)
        positions = exit_positions(len(layout.blocks), number)
        layout = add_exits(config.model.name, module, positions, config.scalefl.head_convs)
    return build_method(config).client.extend(module, layout)


def split_kind(config: Config, layout: Layout) -> Kind:
    """How the model is split; one that the table does not know, as its layout suggests."""
    kind = config.split.kind
    if kind == "auto":
        return "layer" if len(layout.stages) == 1 else "stage"
    return kind


def build_splitter(config: Config, model: Model) -> Splitter:
    """The splitter, checked against the model."""
    method, wanted = find_method(config.method), config.split.levels
    if method.exits:
        assert not isinstance(wanted, str)  # resolved by Config for every model that has exits
        if config.split.depth != "full":
            raise ConfigError(f"split.depth: got {config.split.depth!r}, expected none: exits set the depth of a level")
        return make_exit_splitter(model.layout, None if isinstance(wanted, int) else check_ratios(wanted))
    window = method.window
    if window == "rolling" and config.rolex.direction == "backward":
        window = "rolling-back"
    kind = split_kind(config, model.layout)
    levels = min(5, num_depths(model.layout, kind)) if isinstance(wanted, str) else wanted
    return make_splitter(model.layout, kind, levels, config.split.depth, window)


def build_method(config: Config) -> Method:
    """The method of the table with the config's options in it."""
    method = find_method(config.method)
    server = dataclasses.replace(
        method.server,
        weighting=cast(Weighting, config.aggregate.weighting),  # resolved by Config
        precision=config.aggregate.precision,
        server_lr=cast(float, config.aggregate.server_lr),
        buffers=cast(BufferPolicy, config.buffers),
    )
    return dataclasses.replace(
        method,
        client=_configured(method.client, config),
        server=_configured(server, config),
        uploads=(UploadNoise(config.noise, config.seed),) if config.noise.uploads else (),
        transforms=tuple(_configured(transform, config) for transform in method.transforms),
    )


def _configured(part: _Part, config: Config) -> _Part:
    """A part of a method with its options from the config: it is a section itself, or has one as ``options``."""
    sections = {type(section): section for section in vars(config).values()}
    if type(part) in sections:
        return cast(_Part, sections[type(part)])
    if hasattr(part, "seed"):
        part = cast(_Part, dataclasses.replace(cast(Any, part), seed=config.seed))
    options = getattr(part, "options", None)
    if type(options) in sections:
        return cast(_Part, dataclasses.replace(cast(Any, part), options=sections[type(options)]))
    return part


def build_data(config: Config) -> Dataset:
    """The data set, read from ``data.root``."""
    seed = seed_of(config.seed, Purpose.LIMIT)
    root = Path(config.data.root).expanduser()
    data = load_dataset(config.data.name, root, config.data.limit, seed, config.data.side)
    if config.eval.limit is not None and config.eval.limit < len(data.test):
        chosen = torch.randperm(len(data.test), generator=torch_rng(config.seed, Purpose.TEST_LIMIT))
        data = dataclasses.replace(data, test=data.test.pick(chosen[: config.eval.limit].sort().values))
    return data


def build_partition(config: Config, data: Dataset) -> Sequence[Tensor]:
    """Who holds which examples."""
    labels, c = data.train.y, config.data
    if c.partition == "virtual":
        stream = functools.partial(numpy_rng, config.seed, Purpose.PARTITION, 0)
        return VirtualPartition(labels, c.clients, c.alpha, c.examples, stream)
    rng = numpy_rng(config.seed, Purpose.PARTITION)
    if c.partition == "natural":
        return natural_partition(data.train.groups, c.clients, rng)
    assert c.partition != "auto"  # resolved by Config
    return make_partition(labels, c.clients, c.partition, c.alpha, rng)


def client_levels(config: Config, num_levels: int) -> ClientLevels:
    """The level of each client: contiguous groups, the smallest first; equal unless ``split.counts`` says otherwise."""
    clients, counts = config.data.clients, config.split.counts
    if counts is None:
        firsts = [-(-level * clients // num_levels) for level in range(num_levels + 1)]
        return ClientLevels(tuple(after - first for first, after in itertools.pairwise(firsts)))
    if len(counts) != num_levels:
        raise ConfigError(f"split.counts: got {len(counts)} numbers, expected {num_levels}, one per level")
    return ClientLevels(counts)


def check_device(name: str) -> None:
    """Refuses a torch device that cannot compute here."""
    try:
        float(torch.zeros((), device=name))
    except (RuntimeError, AssertionError, ValueError) as problem:
        reason = str(problem).partition("\n")[0]
        raise ConfigError(
            f"engine.device: got {name!r}, expected a device of this machine such as cpu ({reason})"
        ) from None


def check_compiler(config: Config) -> None:
    """Refuses ``engine.compile`` where torch.compile would fail for want of a C++ compiler."""
    names = [os.environ.get("CXX"), "g++", "clang++"]
    if config.engine.compile and not any(shutil.which(name) for name in names if name):
        raise ConfigError(
            "engine.compile: got true, expected a C++ compiler on this machine: install g++ or leave it out"
        )


def build(config: Config, partition: list[Tensor] | None = None, begun: bool = False) -> Federation:
    """Everything that a run needs.

    A ``partition`` saved with an earlier part of the run is used as it is. Of a run that has ``begun``, initial weights
    are not looked for: its checkpoint takes their place.
    """
    check_device(config.engine.device)
    check_compiler(config)
    model = build_model(config)
    if config.model.pretrained is not None and not begun:
        model = with_pretrained(model, config.model.pretrained)
    splitter = build_splitter(config, model)
    levels = client_levels(config, len(splitter.depths))
    method = build_method(config)
    method.client.check(model.template, model.example(2))
    data = build_data(config)
    return Federation(
        model=model,
        splitter=splitter,
        method=method,
        data=data,
        partition=build_partition(config, data) if partition is None else partition,
        levels=levels,
        local=config.local,
        seed=config.seed,
        device=config.engine.device,
        compile=config.engine.compile,
        measured=config.eval.measured,
    )
