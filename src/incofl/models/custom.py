"""Models of your own: what a factory makes, named ``package.module:factory`` in a config."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from incofl.errors import ConfigError, IncoflError, nearest
from incofl.imports import describe, load_attribute
from incofl.layout import Layout
from incofl.models.model import ModelOptions, shapes_of, try_out

Factory = Callable[..., Any]  # returns a module, or a module and its layout

# The arguments that a factory can ask for by the names of its parameters.
FROM_DATA = ("shape", "classes", "vocabulary", "sequence")
FROM_CONFIG = ("width", "depth", "dim", "heads", "patch")


def make_custom(name: str, factory: Factory | None, options: ModelOptions) -> tuple[nn.Module, Layout]:
    """The module that a factory makes, and the layout that it returns or an inferred one; ``None``: imports it."""
    factory = load_attribute(name, "model.name") if factory is None else factory
    if not callable(factory):
        raise ConfigError(f"model.name: {name} is of type {type(factory).__name__}, expected a function or class")
    arguments = _arguments(name, factory, options)
    try:
        made = factory(**arguments)
    except IncoflError:
        raise
    except Exception as problem:
        raise ConfigError(f"model.name: {name} failed: {describe(problem)}") from problem
    module, layout = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not isinstance(layout, Layout | None):
        raise ConfigError(
            f"model.name: {name} returned {type(made).__name__}, expected a torch.nn.Module, or one and its Layout"
        )
    return _checked(name, module, layout, options)


def use_module(module: nn.Module, layout: Layout | None, options: ModelOptions) -> tuple[nn.Module, Layout]:
    """A copy of a module that was made in Python, which replaces what the config says, and its layout."""
    return _checked(type(module).__name__, copy.deepcopy(module), layout, options)


def _checked(name: str, module: nn.Module, layout: Layout | None, options: ModelOptions) -> tuple[nn.Module, Layout]:
    """Refuses a module that fails on a batch, or whose output is not what the options say; infers a missing layout."""
    example, expected = options.batch, options.output
    try:
        *_, output = try_out(module, example)
    except Exception as problem:
        words = f"fails on a batch of shape {shapes_of(example)}: {describe(problem)}"
        raise ConfigError(f"model.name: {name} {words}") from problem
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if expected is not None and got != expected:
        raise ConfigError(f"model.name: {name} gives {got} for a batch of {expected[0]}, expected logits {expected}")
    return module, layout or Layout.infer(module, example)


def factory_name(factory: Factory) -> str:
    """The name of a factory, as a config would have it."""
    return f"{factory.__module__}:{getattr(factory, '__qualname__', type(factory).__name__)}"


def _arguments(name: str, factory: Factory, options: ModelOptions) -> dict[str, Any]:
    """The arguments that a factory asks for, and the config's ``model.options``; nothing in the config is ignored."""
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        parameters = {}  # of a class written in C
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    given = {key: getattr(options, key) for key in (*FROM_DATA, *FROM_CONFIG)} | {"classes": options.classes or None}
    if "width" in named and named["width"].default is not inspect.Parameter.empty and options.width == 1:
        del given["width"]  # a config that says nothing leaves it to the factory
    for key in FROM_CONFIG:
        if key not in named and given[key] not in (None, 1.0):
            raise ConfigError(f"model.{key}: got {given[key]:g}, but {name} has no parameter {key!r}")
    for key in options.options:
        if key not in named and not takes_any:
            hint = nearest(key, named) if named else ""
            raise ConfigError(f"model.options.{key}: {name} has no parameter {key!r}{hint}")
    arguments = {key: given[key] for key in named if given.get(key) is not None} | dict(options.options)
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in arguments:
            where = f"model.{key}" if key in FROM_CONFIG else f"model.options.{key}"
            raise ConfigError(f"model.name: {name} needs {key!r}: set {where}, or give it a default")
    return arguments
