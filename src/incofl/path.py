"""A smaller level's model inside a larger one: it computes with the larger one's parameters, as if it stood alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from incofl.layout import frozen_norms
from incofl.split import Slice
from incofl.split.slices import Index
from incofl.tensors import Inputs, Tensors, call, map_inputs

# Strided 1x1 convolutions of fewer input channels are not computed channels-last: oneDNN's gradient of their weights
# writes beyond its memory where there are fewer channels than it takes at a time, 8 or with AVX-512 16
# (https://github.com/uxlfoundation/oneDNN/issues/6035). It ends the process or, worse, does not.
SAFE_CHANNELS = 16


def image_format(module: nn.Module) -> torch.memory_format:
    """How a module computes with images: channels last, which is faster, where that is safe."""
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    narrow = any(
        layer.kernel_size == (1, 1) and max(layer.stride) > 1 and layer.in_channels < SAFE_CHANNELS
        for layer in convolutions
    )
    others = any(parameter.dim() > 4 for parameter in module.parameters())  # have no such format
    return torch.contiguous_format if narrow or others or not convolutions else torch.channels_last


@dataclass(frozen=True)
class Path:
    """The model of a smaller level, and where its parameters are."""

    module: nn.Module
    part: Slice  # of the larger model's parameters
    format: torch.memory_format = torch.contiguous_format  # in which it computes with images

    def __call__(self, model: nn.Module, x: Inputs) -> Any:
        """What it makes of a batch with the parameters of the larger ``model``, to which gradients flow."""
        own = self.own(dict(model.named_parameters()) | dict(model.named_buffers()))
        self.module.train(model.training)
        for norm in frozen_norms(self.module).values():
            norm.eval()

        def run(*inputs: Tensor, **named: Tensor) -> Any:
            return functional_call(self.module, own, inputs, named)

        return call(run, map_inputs(self._formatted, x))

    def own(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Its part of a larger model's tensors, in memory as where it stands alone.

        With other memory, other kernels would compute, and round sums in another order; some are not safe for it.
        """
        alone = dict(self.module.named_parameters())
        held = self.part.look({name: value for name, value in tensors.items() if name in self.part.index}).items()
        return {name: torch.empty_like(alone[name]).copy_(value) if name in alone else value for name, value in held}

    def _formatted(self, x: Tensor) -> Tensor:
        return x.to(memory_format=self.format) if x.dim() == 4 and x.is_floating_point() else x


def within(small: tuple[Index, ...], large: tuple[Index, ...], shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Where the positions of a slice of a tensor lie in a larger slice of it that holds them all."""
    found = []
    for inner, outer, size in zip(small, large, shape, strict=True):
        held, wanted = torch.arange(size)[outer], torch.arange(size)[inner]
        at = torch.searchsorted(held, wanted).clamp(max=len(held) - 1)  # both are in ascending order
        if not torch.equal(held[at], wanted):
            raise ValueError("the smaller slice is not part of the larger one")
        found.append(slice(int(at[0]), int(at[-1]) + 1) if int(at[-1] - at[0]) + 1 == len(at) else at)
    return tuple(found)
