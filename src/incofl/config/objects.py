"""Objects in the place of names: a model, data, a method or a task from Python, and how a record names them."""

import sys
from typing import Any

from incofl.data import Data
from incofl.errors import ConfigError
from incofl.imports import load_attribute
from incofl.methods import METHODS

# Where the name of each kind of object stands in a config: table and key.
OBJECTS = {"model": ("model", "name"), "data": ("data", "name"), "method": ("", "method"), "task": ("task", "name")}
GIVEN = "object:"  # what a record says of an object that cannot be imported


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
        raise ConfigError(
            f"data.name: {name} is of type {type(data).__name__}, expected Data or a function without "
            "arguments that makes one"
        )
    return data


def check_given(name: str, key: str) -> None:
    """Refuses a name that stands for an object of a Python script, where there is no such object."""
    if name.startswith(GIVEN):
        raise ConfigError(
            f"{key}: got {name!r}: this run was made from an object in Python; resume it with the same script: "
            "incofl.run(..., resume=True)"
        )
