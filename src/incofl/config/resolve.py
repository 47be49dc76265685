"""From what a config says to what it means: the method, data, model and task that it names, and all defaults."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from incofl.config.schema import Config, SplitConfig
from incofl.data import Data, Source, find_source, source_of
from incofl.data.tokenizers import TOKENIZER
from incofl.errors import ConfigError
from incofl.imports import load_attribute
from incofl.method import Method
from incofl.methods import METHODS, find_method
from incofl.models import Family, find_family
from incofl.models.hf import PREFIX
from incofl.task import Task, find_task

# Where the name of each kind of object stands in a config: table and key.
OBJECTS = {"model": ("model", "name"), "data": ("data", "name"), "method": ("", "method"), "task": ("task", "name")}
GIVEN = "object:"  # what a record says of an object that cannot be imported
_TYPES: dict[str, Any] = {"model": object, "data": Data, "method": Method, "task": Task}
_FIND: dict[str, Any] = {"model": find_family, "data": find_source, "method": find_method, "task": find_task}


class Parts(NamedTuple):
    """What a config names; the method has its options."""

    method: Method
    source: Source
    task: Task


def find_parts(config: Config) -> Parts:
    """The method, data and task of a resolved config."""
    names = {"method": config.method, "task": config.task.name}
    method, task = (find(kind, name, config.objects) for kind, name in names.items())
    return Parts(method.with_options(config.methods), _source(config), task)


def _source(config: Config) -> Source:
    """What is known of the data, read as the config says."""
    source: Source = find("data", config.data.name, config.objects)
    return source.read_as(config.data.tokenizer, config.data.length, config.data.target)


def find(kind: str, name: str, objects: Mapping[str, Any]) -> Any:
    """The method, source of data, family of models or task that is given as an object, or that a name means."""
    given = objects.get(kind, name)
    if isinstance(given, str) and given.startswith(GIVEN):
        key = ".".join(filter(None, OBJECTS[kind]))
        hint = "resume it with the same script, or give it to load_model, export_model, analyze or write_report"
        raise ConfigError(f"{key}: got {name!r}: this run was made from an object in Python; {hint}")
    if not isinstance(given, str | _TYPES[kind]):
        got = f"a {type(given).__name__}" if kind == "data" else f"{given!r:.60}"
        wrap = "; wrap it: incofl.Data((x, y))" if kind == "data" else ""
        raise ConfigError(f"{kind}: got {got}, expected a name or an object of type {_TYPES[kind].__name__}{wrap}")
    if isinstance(given, Task):
        return given
    return source_of(given) if isinstance(given, Data) else _FIND[kind](given)


def name_of(value: Any) -> str:
    """``package.module:attribute`` where that finds an object, which it does not in a script; else ``object:NAME``."""
    if isinstance(value, str):
        return value
    if isinstance(value, Method) and METHODS.get(value.name) == value:
        return value.name
    if isinstance(value, Data) and ":" in value.name:  # it was loaded by that name
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
        kind = type(data).__name__
        raise ConfigError(f"data.name: {name} is of type {kind}, expected Data or a function that makes one")
    return replace(data, name=name)


def resolve(config: Config) -> Config:
    """Checks what concerns more than one field, and fills in what follows from method, data and model."""
    if "data" not in config.objects and ":" in config.data.name and not config.data.name.startswith(GIVEN):
        config = replace(config, objects=config.objects | {"data": load_data(config.data.name)})
    method: Method = find("method", config.method, config.objects)
    config = replace(config, data=replace(config.data, tokenizer=_tokenizer(config)))
    source = _source(config)
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
        hint = "set cohort, as a number or as a share such as 0.4"
        raise ConfigError(f"cohort: got {config.cohort:g}, expected at most data.clients = {clients}: {hint}")
    if (counts := config.split.counts) is not None and sum(counts) != clients:
        raise ConfigError(f"split.counts: got {sum(counts)} clients, expected data.clients = {clients}")
    resolved = replace(
        config,
        method=config.method if "method" in config.objects or ":" in config.method else method.name,
        data=data,
        model=model,
        split=_split(config.split, method, family, model.depth),
        local=_for_run(config.local, config),
        aggregate=replace(config.aggregate, weighting=_auto(config.aggregate.weighting, method.server.weighting)),
        buffers=_auto(config.buffers, method.server.buffers),
        eval=replace(config.eval, best_path=_auto(config.eval.best_path, method.best_path)),
        methods={k: _for_fleet(v, config, clients) for k, v in _options(config, method).items()},
    )
    least, taken_back = config.validation.least, not method.server.mean.confidential
    if taken_back and least > resolved.cohort_size:
        most = f"expected at most the {resolved.cohort_size} clients of a round (cohort)"
        raise ConfigError(f"validation.least: got {least}, {most}")
    return resolved


def _tokenizer(config: Config) -> str | None:
    """The tokenizer of texts: what the config says, or the one in the folder of a model of transformers."""
    chosen, folder, own = config.data.tokenizer, config.model.pretrained, "data" in config.objects
    if chosen is not None or folder is None or own or not config.model.name.startswith(PREFIX):
        return chosen
    there = (Path(folder).expanduser() / TOKENIZER).is_file()
    return folder if there and find_source(config.data.name).vocabulary else None


def _auto(value: Any, default: Any) -> Any:
    return default if value == "auto" else value


def _for_run(options: Any, config: Config) -> Any:
    """Options with what follows from the number of rounds and epochs."""
    return options.for_run(config.rounds, config.local.epochs) if hasattr(options, "for_run") else options


def _for_fleet(options: Any, config: Config, clients: int) -> Any:
    """Options with what follows from the number of clients that take part."""
    if not hasattr(options, "for_fleet"):
        return options
    cohort = config.cohort if config.cohort >= 1 else max(1, round(config.cohort * clients))
    return options.for_fleet(int(cohort), clients, config.rounds)


def _options(config: Config, method: Method) -> dict[str, Any]:
    """The options of the method, by section: its own, or what the config says; other sections are left out."""
    return {key: _for_run(config.methods.get(key, own), config) for key, own in method.options.items()}


def changed_options(config: Config) -> dict[str, dict[str, Any]]:
    """What a resolved config says differently than its method, by section: what another method can take over."""
    changed = {}
    for key, own in _options(replace(config, methods={}), find("method", config.method, config.objects)).items():
        options = vars(config.methods.get(key, own))
        changed[key] = {name: value for name, value in options.items() if value != getattr(own, name)}
    return {key: values for key, values in changed.items() if values}


def _split(split: SplitConfig, method: Method, family: Family, depth: int | None) -> SplitConfig:
    kind = _auto(split.kind, method.split.kind or family.split or "auto")
    if method.split.kind not in (None, kind):
        by = {"hetero": "width", "rank": "rank"}[str(method.split.kind)]
        raise ConfigError(f"split.kind: got {kind!r}, expected {method.split.kind!r}: {method.name} splits by {by}")
    number = {"hetero": 5, "rank": 3}.get(kind) or (family.levels and min(family.levels, depth or family.levels))
    start, grow = _auto(split.start, method.split.start), _auto(split.grow, method.split.grow)
    return replace(split, kind=kind, levels=_auto(split.levels, number or "auto"), start=start, grow=grow)
