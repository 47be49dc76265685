"""Objects in the place of names: the model, data, method and task of a config, and how a record names them."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from incofl.config.schema import Config
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


class Parts(NamedTuple):
    """What a config names; the method has its options."""

    method: Method
    source: Source
    family: Family
    task: Task


def find_parts(config: Config) -> Parts:
    """The method, data, model and task of a resolved config."""
    names = {"method": config.method, "data": config.data.name, "model": config.model.name, "task": config.task.name}
    method, *others = (find(kind, name, config.objects) for kind, name in names.items())
    return Parts(method.with_options(config.methods), *others)


def find(kind: str, name: str, objects: Mapping[str, Any]) -> Any:
    """The method, source of data, family of models or task that is given as an object, or that a name means."""
    given = objects.get(kind)
    if given is None and name.startswith(GIVEN):
        key = ".".join(filter(None, OBJECTS[kind]))
        hint = "resume it with the same script: incofl.run(..., resume=True)"
        raise ConfigError(f"{key}: got {name!r}: this run was made from an object in Python; {hint}")
    if kind == "model":
        return find_family(name if given is None else given)
    if kind == "data":
        return find_source(name) if given is None else source_of(given)
    return given or {"method": find_method, "task": find_task}[kind](name)


def name_of(value: Any, kind: str) -> str:
    """The name of an object: itself if it is one, ``package.module:attribute`` if that finds it, else ``object:NAME``.

    What is defined in a script or a notebook cannot be found by its name later.
    """
    if isinstance(value, str):
        return value
    if kind == "method" and METHODS.get(value.name) == value:
        return str(value.name)
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
