"""What a model is called with: a tensor, a tuple of tensors, or a dict of tensors."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

_T = TypeVar("_T")
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def map_inputs(f: Callable[[Tensor], _T], inputs: Inputs) -> _T | tuple[_T, ...] | dict[str, _T]:
    """Applies a function to every tensor of the inputs."""
    if isinstance(inputs, tuple):
        return tuple(f(value) for value in inputs)
    if isinstance(inputs, dict):
        return {name: f(value) for name, value in inputs.items()}
    return f(inputs)


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Calls a model with ``x``, ``*inputs`` or ``**inputs``; returns the ``logits`` of an output that has them."""
    if isinstance(inputs, dict):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return getattr(output, "logits", output)


def num_examples(inputs: Inputs) -> int:
    """Number of examples in a batch of inputs."""
    if isinstance(inputs, dict):
        inputs = tuple(inputs.values())
    return len(inputs[0] if isinstance(inputs, tuple) else inputs)
