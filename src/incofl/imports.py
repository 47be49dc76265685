"""Python objects that a config names ``package.module:attribute``."""

import importlib
import inspect
import os
import sys
from typing import Any

from incofl.errors import ConfigError, nearest


def load_attribute(name: str, what: str, kind: type = object) -> Any:
    """Imports ``package.module:attribute``, the value of the config key ``what``, which must be of a kind."""
    path, _, attribute = name.partition(":")
    if path.endswith(".py") or "/" in path or path.startswith("."):
        dotted = path.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(f"{what}: got {name!r}, expected a module, not a file; did you mean '{dotted}:{attribute}'?")
    if not path or not attribute.isidentifier():
        raise ConfigError(f"{what}: got {name!r}, expected package.module:attribute")
    if os.getcwd() not in sys.path:  # like python -m; worker processes get the same path
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(path)
    except Exception as problem:
        if isinstance(problem, ModuleNotFoundError) and problem.name and f"{path}.".startswith(f"{problem.name}."):
            where = "in the current directory or among the installed packages"
            raise ConfigError(f"{what}: got {name!r}, but there is no module {problem.name!r} {where}") from None
        raise ConfigError(f"{what}: {path} cannot be imported: {describe(problem)}") from problem
    if not hasattr(module, attribute):
        names = [key for key, value in vars(module).items() if not key.startswith("_") and not inspect.ismodule(value)]
        raise ConfigError(f"{what}: {path} has no {attribute!r}{nearest(attribute, names)}")
    if not isinstance(found := getattr(module, attribute), kind):
        raise ConfigError(f"{what}: {name} is of type {type(found).__name__}, expected a {kind.__name__}")
    return found


def describe(problem: Exception) -> str:
    """The type and the message of an exception in one line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"
