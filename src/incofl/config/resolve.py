"""From what a config says to what it means: the method, data, model and task that it names, and all defaults."""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from incofl.config.schema import Config, SplitConfig
from incofl.data import Data, Source, find_source, source_of
from incofl.errors import ConfigError
from incofl.imports import load_attribute
from incofl.method import Method
from incofl.methods import METHODS, find_method
from incofl.models import Family, find_family
from incofl.task import Task, find_task

# Where the name of each kind of object stands in a config: table and key.
OBJECTS = {"model": ("model", "name"), "data": ("data", "name"), "method": ("", "method"), "task": ("task", "name")}
GIVEN = "object:"  # what a record says of an object that cannot be imported
_KINDS: dict[str, Any] = {"data": (Data, find_source), "method": (Method, find_method), "task": (Task, find_task)}


class Parts(NamedTuple):
    """What a config names; the method has its options."""

    method: Method
    source: Source
    task: Task


def find_parts(config: Config) -> Parts:
    """The method, data and task of a resolved config."""
    method = find("method", config.method, config.objects).with_options(config.methods)
    source, task = find("data", config.data.name, config.objects), find("task", config.task.name, config.objects)
    return Parts(method, source, task)


def find(kind: str, name: str, objects: Mapping[str, Any]) -> Any:
    """The method, source of data, family of models or task that is given as an object, or that a name means."""
    given = objects.get(kind)
    if given is None and name.startswith(GIVEN):
        key = ".".join(filter(None, OBJECTS[kind]))
        hint = "resume it with the same script: incofl.run(..., resume=True)"
        raise ConfigError(f"{key}: got {name!r}: this run was made from an object in Python; {hint}")
    if kind == "model":
        return find_family(name if given is None else given)
    expected, by_name = _KINDS[kind]
    if given is None:
        return by_name(name)
    if not isinstance(given, expected):
        raise ConfigError(f"{kind}: got {given!r:.60}, expected a name or an object of type {expected.__name__}")
    return source_of(given) if kind == "data" else given


def name_of(value: Any) -> str:
    """The name of an object: itself if it is one, ``package.module:attribute`` if that finds it, else ``object:NAME``.

    What is defined in a script or a notebook cannot be found by its name later.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Method) and METHODS.get(value.name) == value:
        return value.name
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(str(module)), attribute, None) is value:
        return f"{module}:{attribute}"
    return f"{GIVEN}{attribute or getattr(value, 'name', None) or type(value).__name__}"


def load_data(name: str) -> Data:
    """The data that ``package.module:attribute`` names: a ``Data``, or a function that makes one."""
    found = load_attribute(name, "data.name")
    data = found() if callable(found) else found
    if not isinstance(data, Data):
        expected = "expected Data or a function without arguments that makes one"
        raise ConfigError(f"data.name: {name} is of type {type(data).__name__}, {expected}")
    return data


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
    start, grow = _auto(split.start, method.split.start), _auto(split.grow, method.split.grow)
    return replace(split, kind=kind, levels=_auto(split.levels, number or "auto"), start=start, grow=grow)
