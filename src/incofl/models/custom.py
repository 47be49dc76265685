"""Models of your own: what a factory makes, named ``package.module:factory`` in a config."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from incofl.errors import ConfigError, IncoflError, nearest
from incofl.imports import describe, load_attribute
from incofl.layout import Layout
from incofl.models.model import ModelOptions, shapes_of, try_out

Factory = Callable[..., Any]  # returns a module, or a module and its layout

# The arguments that a factory can ask for by the names of its parameters: of the data, and sizes of the config.
FROM_DATA = ("shape", "classes", "vocabulary", "sequence")
SIZES = ("depth", "dim", "heads", "patch")


def make_custom(model: str | Factory, options: ModelOptions) -> tuple[nn.Module, Layout]:
    """The module that a factory makes, and the layout that it returns or an inferred one."""
    name, factory = (model, load_attribute(model, "model.name")) if isinstance(model, str) else (_name(model), model)
    if not callable(factory):
        raise ConfigError(f"model.name: {name} is of type {type(factory).__name__}, expected a function or class")
    arguments = arguments_of(name, factory, options)
    try:
        made = factory(**arguments)
    except IncoflError:
        raise
    except Exception as problem:
        raise ConfigError(f"model.name: {name} failed: {describe(problem)}") from problem
    return check_module(name, *as_pair(made, f"model.name: {name} returned {type(made).__name__}"), options)


def as_pair(made: object, problem: str = "") -> tuple[nn.Module, Layout | None]:
    """A module and its layout, of which the layout may be missing; refuses anything else."""
    module, layout = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not isinstance(layout, Layout | None):
        raise ConfigError(
            f"{problem or f'model: got {made!r:.60}'}, expected a module, or a pair of a module and its Layout"
        )
    return module, layout


def check_module(
    name: str, module: nn.Module, layout: Layout | None, options: ModelOptions
) -> tuple[nn.Module, Layout]:
    """Refuses a module that fails on a batch, or whose output is not what the options say; infers a missing layout."""
    if layout is not None and options.blocks:
        raise ConfigError(f"model.blocks: got {options.blocks[0]!r}, expected none: {name} comes with its Layout")
    example, expected = options.batch, options.output
    try:
        output = try_out(module, example)
    except Exception as problem:
        words = f"fails on a batch of shape {shapes_of(example)}: {describe(problem)}"
        if "type" in str(problem) and not all(x.is_floating_point() for x in tree_leaves(example)):
            words += "; whole numbers reach a model as tokens: give numbers as x.float(), or images as uint8"
        raise ConfigError(f"model.name: {name} {words}") from problem
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if expected is not None and got != expected:
        raise ConfigError(f"model.name: {name} gives {got} for a batch of {expected[0]}, expected logits {expected}")
    return module, layout or Layout.infer(module, example, options.blocks)


def _name(factory: Factory) -> str:
    return f"{factory.__module__}:{getattr(factory, '__qualname__', type(factory).__name__)}"


def arguments_of(name: str, factory: Factory, options: ModelOptions) -> dict[str, Any]:
    """The arguments that a factory asks for, and the config's ``model.options``; nothing in the config is ignored."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()  # of a class written in C
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    config = {key: getattr(options, key) for key in SIZES}
    config["width"] = options.width if options.width != 1 or named.get("width") else None
    for key, value in config.items():
        if value is not None and key not in named:
            raise ConfigError(f"model.{key}: got {value:g}, but {name} has no parameter {key!r}")
    for key in options.options:
        if key not in named and not takes_any:
            hint = nearest(key, named) if named else ""
            raise ConfigError(f"model.options.{key}: {name} has no parameter {key!r}{hint}")
    given = config | {key: getattr(options, key) for key in FROM_DATA} | {"classes": options.classes or None}
    arguments = {key: given[key] for key in named if given.get(key) is not None} | dict(options.options)
    for key, required in named.items():
        if required and key not in arguments:
            where = f"model.{key}" if key in config else f"model.options.{key}"
            raise ConfigError(f"model.name: {name} needs {key!r}: set {where}, or give it a default")
    return arguments
