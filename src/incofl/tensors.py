"""Models, updates and slices are dicts of tensors, by name, never by position; inputs of models may be tuples, too."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
Tensors = dict[str, Tensor]
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]  # of a model


def memory_format(dims: int) -> torch.memory_format:
    """Channels last for convolution weights and images, which makes convolutions and sums over kernels faster."""
    return torch.channels_last if dims == 4 else torch.contiguous_format


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor of undefined values in the memory format of models and updates."""
    return torch.empty(tuple(shape), dtype=dtype, memory_format=memory_format(len(shape)))


def clone(a: Mapping[str, Tensor]) -> Tensors:
    """A snapshot that later in-place changes of ``a`` cannot reach."""
    return {name: _clone(value.detach()) for name, value in a.items()}


def _clone(value: Tensor) -> Tensor:
    if value.is_cpu:
        return value.clone(memory_format=memory_format(value.dim()))
    return empty(value.shape, value.dtype).copy_(value)


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensors:
    """What ``a`` is more than the entries of ``b`` of the same names; shares memory with neither."""
    values = list(a.values())
    if all(value.is_cpu and value.dim() != 4 for value in values):  # those have a memory format of their own
        return dict(zip(a, torch._foreach_sub(values, [b[name] for name in a]), strict=True)) if a else {}
    return {name: value.sub_(b[name].cpu()) for name, value in clone(a).items()}


def only(a: Mapping[str, _T], names: Set[str]) -> dict[str, _T]:
    """The entries that have one of some names."""
    return {name: value for name, value in a.items() if name in names}


def norm(tensor: Tensor) -> float:
    """The Frobenius norm; row by row first, for the sum of a whole tensor depends on how many threads share it."""
    rows = tensor if tensor.dim() else tensor[None]
    return math.sqrt(float(rows.reshape(len(rows), -1).square().sum(1).sum()))


def length(a: Mapping[str, Tensor]) -> float:
    """The norm of all entries together, as one vector; computed so that no square is too large."""
    return math.sqrt(math.fsum(norm(value.double()) ** 2 for value in a.values()))


def num_bytes(a: Mapping[str, Tensor]) -> int:
    """Bytes of the elements, as they would cross a network uncompressed."""
    return sum(value.nbytes for value in a.values())


def all_finite(a: Mapping[str, Tensor]) -> bool:
    """Whether no element is NaN or infinite."""
    return all(bool(torch.isfinite(value).all()) for value in a.values())


def all_bounded(values: Sequence[Tensor], most: float) -> bool:
    """Whether the norm of every tensor is at most a bound; none with a NaN in it is. Counters are whole numbers."""
    floats = [x for x in values if x.dtype.is_floating_point]
    if len(floats) < len(values):
        counters = torch.cat([x.reshape(-1) for x in values if not x.dtype.is_floating_point])
        if float(counters.to(torch.float64).norm()) > most:  # of all together
            return False
    return not floats or float(torch.stack(torch._foreach_norm(floats)).max()) <= most


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


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread inside, the previous number afterwards."""
    if (before := torch.get_num_threads()) == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
