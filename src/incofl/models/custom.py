"""Models of the user's own, named ``package.module:factory`` in a config."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from incofl.errors import ConfigError, IncoflError
from incofl.imports import describe, load_attribute
from incofl.layout import Layout

# What a factory may ask for by the names of its parameters; those of the config's model section can be left out there.
FROM_DATA = ("shape", "classes", "vocabulary", "sequence")
FROM_CONFIG = ("width", "depth", "dim", "heads", "patch")
EXAMPLES = 3  # in the batch that shows what a model does


def make_custom(name: str, options: Any) -> tuple[nn.Module, Layout]:
    """The module that a factory makes, with its layout: the factory's, or an inferred one."""
    factory = _find(name)
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
    dtype = torch.long if options.vocabulary else torch.get_default_dtype()
    example = torch.zeros(EXAMPLES, *options.shape, dtype=dtype)
    _check_output(name, module, example, options)
    return module, layout or Layout.infer(module, example)


_given: dict[str, Callable[..., Any]] = {}


def name_factory(factory: Callable[..., Any]) -> str:
    """The name by which configs mean a factory, from now on in this process even where it cannot be imported."""
    name = f"{factory.__module__}:{factory.__qualname__}"
    _given[name] = factory
    return name


def _find(name: str) -> Callable[..., Any]:
    factory = _given[name] if name in _given else load_attribute(name, "model.name")
    if not callable(factory):
        raise ConfigError(f"model.name: {name} is of type {type(factory).__name__}, expected a function or class")
    return factory


def _arguments(name: str, factory: Callable[..., Any], options: Any) -> dict[str, Any]:
    """What the factory asks for; nothing that the config says is ignored."""
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        parameters = {}  # of a class written in C
    arguments = {}
    for key in (*FROM_DATA, *FROM_CONFIG):
        value = getattr(options, key)
        if key in parameters and value is not None:
            arguments[key] = value
        elif key in FROM_CONFIG and key not in parameters and value not in (None, 1.0):
            raise ConfigError(f"model.{key}: got {value:g}, but {name} has no parameter {key!r}")
    for key, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if required and key not in arguments:
            hint = f"set model.{key}" if key in FROM_CONFIG else f"expected among {', '.join(FROM_DATA + FROM_CONFIG)}"
            raise ConfigError(f"model.name: {name} needs {key!r}: {hint}, or give it a default")
    return arguments


def _check_output(name: str, module: nn.Module, example: Tensor, options: Any) -> None:
    expected = (EXAMPLES, options.classes, *([example.shape[1]] if options.sequence else []))
    try:
        output = copy.deepcopy(module).to("meta").eval()(example.to("meta"))
    except Exception as problem:
        raise ConfigError(
            f"model.name: {name} fails on a batch of shape {tuple(example.shape)}: {describe(problem)}"
        ) from problem
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if got != expected:
        raise ConfigError(f"model.name: {name} gives {got} for a batch of {EXAMPLES}, expected logits {expected}")
