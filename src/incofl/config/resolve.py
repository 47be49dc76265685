"""From what a config says to all that follows from it: defaults that depend on the method, the data and the model."""

import warnings
from dataclasses import replace
from typing import Any

from incofl.config.objects import GIVEN, find, load_data
from incofl.config.schema import Config, SplitConfig
from incofl.errors import ConfigError
from incofl.method import Method
from incofl.models import Family


def resolve(config: Config) -> Config:
    """Checks what concerns more than one field, and fills in what follows from method, data and model."""
    if "data" not in config.objects and ":" in config.data.name and not config.data.name.startswith(GIVEN):
        config = replace(config, objects=config.objects | {"data": load_data(config.data.name)})
    method: Method = find("method", config.method, config.objects)
    source = find("data", config.data.name, config.objects)
    name = _auto(config.model.name, source.model)
    family: Family = find("model", name, config.objects)
    clients: int = _auto(config.data.clients, source.clients or 20)
    partition = _auto(config.data.partition, source.partition)
    data = replace(config.data, clients=clients, partition=partition, side=config.data.side or family.side)
    if data.side is not None and source.vocabulary:
        raise ConfigError(f"data.side: got {data.side}, expected none: {config.data.name} holds texts")
    stem, width = config.model.stem, config.model.width or (source.width if family.scaled else 1.0)
    if stem != "auto" and not family.stem:
        raise ConfigError(f"model.stem: got {stem!r}, expected none: {name} has no such option")
    model = replace(config.model, name=name, width=width, stem=_auto(stem, source.stem) if family.stem else stem)
    if config.cohort > clients:
        raise ConfigError(f"cohort: got {config.cohort:g}, expected at most data.clients = {clients}")
    if (counts := config.split.counts) is not None and sum(counts) != clients:
        raise ConfigError(f"split.counts: got {sum(counts)} clients, expected data.clients = {clients}")
    return replace(
        config,
        method=config.method if "method" in config.objects or ":" in config.method else method.name,
        data=data,
        model=model,
        split=_split(config.split, method, family, model.depth),
        local=_for_run(config.local, config),
        aggregate=replace(config.aggregate, weighting=_auto(config.aggregate.weighting, method.server.weighting)),
        buffers=_auto(config.buffers, method.server.buffers),
        methods=_options(config, method),
    )


def _auto(value: Any, default: Any) -> Any:
    return default if value == "auto" else value


def _for_run(options: Any, config: Config) -> Any:
    """Options with what follows from the number of rounds and epochs."""
    return options.for_run(config.rounds, config.local.epochs) if hasattr(options, "for_run") else options


def _options(config: Config, method: Method) -> dict[str, Any]:
    """The options of the method, by section; an object keeps its own, and a warning names sections that differ."""
    own = {key: _for_run(value, config) for key, value in method.options.items()}
    asked = {key: _for_run(value, config) for key, value in config.methods.items() if key in own}
    if "method" not in config.objects:
        return own | asked
    if ignored := [f"[{key}]" for key in asked if asked[key] != own[key]]:
        reason = "the method is an object, which has its own options"
        warnings.warn(f"config: ignored {', '.join(ignored)}: {reason}", stacklevel=4)
    return own


def _split(split: SplitConfig, method: Method, family: Family, depth: int | None) -> SplitConfig:
    kind = _auto(split.kind, method.split.kind or family.split or "auto")
    if method.split.kind not in (None, kind):
        raise ConfigError(f"split.kind: got {kind!r}, expected {method.split.kind!r}: {method.name} splits by width")
    number = 5 if kind == "hetero" else family.levels and min(family.levels, depth or family.levels)
    return replace(split, kind=kind, levels=_auto(split.levels, number or "auto"))
