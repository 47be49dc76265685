"""From what a config says to all that follows from it: the method, data, model and task that it names, and defaults."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from incofl.config.objects import check_given
from incofl.config.schema import Config, SplitConfig
from incofl.data import Source, find_source, source_of
from incofl.errors import ConfigError
from incofl.method import Method
from incofl.methods import find_method
from incofl.models import Family, find_family
from incofl.split import Kind
from incofl.task import Task, find_task


@dataclass(frozen=True)
class Parts:
    """What a config names.

    Attributes:
        method: the method, with its options.
        source: the data set.
        family: the model.
        task: what it is trained for.
    """

    method: Method
    source: Source
    family: Family
    task: Task


def find_parts(config: Config) -> Parts:
    """The method, data, model and task of a resolved config."""
    return Parts(
        method=find_method_of(config.method, config.objects).with_options(config.methods),
        source=_find_source(config),
        family=_find_family(config.model.name, config.objects),
        task=_find_task(config.task.name, config.objects),
    )


def find_method_of(name: str, objects: dict[str, Any]) -> Method:
    """The method that is given as an object, or that a name means."""
    if isinstance(given := objects.get("method"), Method):
        return given
    check_given(name, "method")
    return find_method(name)


def _find_source(config: Config) -> Source:
    if (given := objects_of(config, "data")) is not None:
        return source_of(given)
    check_given(config.data.name, "data.name")
    return find_source(config.data.name)


def _find_family(name: str, objects: dict[str, Any]) -> Family:
    given = objects.get("model")
    if given is None or isinstance(given, str):
        check_given(name, "model.name")
    return find_family(name if given is None else given)


def _find_task(name: str, objects: dict[str, Any]) -> Task:
    if isinstance(given := objects.get("task"), Task):
        return given
    check_given(name, "task.name")
    return find_task(name)


def objects_of(config: Config, kind: str) -> Any:
    """The object that takes the place of a name in a config, if there is one."""
    given = config.objects.get(kind)
    return None if isinstance(given, str) else given


def resolve(config: Config) -> Config:
    """Checks what concerns more than one field, and fills in what follows from method, data and model."""
    method, source = find_method_of(config.method, config.objects), _find_source(config)
    given = objects_of(config, "method") is not None
    chosen = {} if given else config.methods
    options = {key: _for_run(chosen.get(key, default), config) for key, default in method.options.items()}
    name = source.model if config.model.name == "auto" else config.model.name
    family = _find_family(name, config.objects)
    clients = config.data.clients
    if clients == "auto":
        clients = source.clients or 20
    data = dataclasses.replace(
        config.data,
        clients=clients,
        partition=source.partition if config.data.partition == "auto" else config.data.partition,
        side=config.data.side or family.side,
    )
    if data.side is not None and source.vocabulary:
        raise ConfigError(f"data.side: got {data.side}, expected none: {config.data.name} holds texts")
    model = dataclasses.replace(
        config.model,
        name=name,
        width=config.model.width or (source.width if family.scaled else 1.0),
        stem=source.stem if config.model.stem == "auto" and family.stem else config.model.stem,
    )
    if model.stem != "auto" and not family.stem:
        raise ConfigError(f"model.stem: got {model.stem!r}, expected none: {name} has no such option")
    if config.cohort > clients:
        raise ConfigError(f"cohort: got {config.cohort:g}, expected at most data.clients = {clients}")
    if (counts := config.split.counts) is not None and sum(counts) != clients:
        raise ConfigError(f"split.counts: got {sum(counts)} clients, expected data.clients = {clients}")
    weighting = config.aggregate.weighting
    return dataclasses.replace(
        config,
        method=config.method if given or ":" in config.method else method.name,
        data=data,
        model=model,
        split=_split(config.split, method, family, model.depth),
        local=config.local.for_run(config.rounds, config.local.epochs),
        aggregate=dataclasses.replace(
            config.aggregate, weighting=method.server.weighting if weighting == "auto" else weighting
        ),
        buffers=method.server.buffers if config.buffers == "auto" else config.buffers,
        methods=options,
    )


def _for_run(options: Any, config: Config) -> Any:
    """Options with what follows from the number of rounds and epochs."""
    return options.for_run(config.rounds, config.local.epochs) if hasattr(options, "for_run") else options


def _split(split: SplitConfig, method: Method, family: Family, depth: int | None) -> SplitConfig:
    kind: Kind | Literal["auto"] = split.kind
    if kind == "auto":
        kind = method.split.kind or family.split or "auto"
    if method.split.kind is not None and kind != method.split.kind:
        raise ConfigError(f"split.kind: got {kind!r}, expected {method.split.kind!r}: {method.name} splits by width")
    levels = split.levels
    if levels == "auto" and kind == "hetero":
        levels = 5
    elif levels == "auto" and family.levels:
        levels = min(family.levels, depth or family.levels)
    return dataclasses.replace(split, kind=kind, levels=levels)
