"""Layers that mix examples or draw, in a stack of models: for each client by itself."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from incofl.engine.stacked_batches import Declined


@dataclass
class Side:
    """What the layers of a stack know about the batch."""

    mask: Tensor | None = None  # inside ``vmap`` one client's, (B,)
    sizes: list[int] = field(default_factory=list)
    generators: list[Generator] = field(default_factory=list)  # for layers that draw


def draws(module: nn.Module) -> bool:
    """Whether a layer draws random numbers in training."""
    return any(isinstance(layer, OwnDropout) and layer.p > 0 for layer in module.modules())


def with_own_layers(module: nn.Module, side: Side) -> nn.Module:
    """A copy of a module in which layers that mix examples or draw do so for each client by itself."""
    copied = copy.deepcopy(module)
    copied.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # not among its typed forms
    kinds: list[tuple[type[nn.Module], type[OwnLayer]]] = [
        (nn.modules.batchnorm._BatchNorm, OwnNorm),
        (nn.Dropout, OwnDropout),
        (nn.LSTM, OwnLstm),
    ]
    for layer in copied.modules():
        for kind, own in kinds:
            if isinstance(layer, kind):
                layer.__class__ = type(own.__name__, (own, type(layer)), {})
                vars(layer)["side"] = side
    return copied


class OwnLayer(nn.Module):
    """A layer in a stack of models."""

    side: Side


class OwnNorm(OwnLayer):
    """Batch norm over the examples that are no padding."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        mask = self.side.mask
        if mask is None or not self.training:
            return super().forward(x)  # type: ignore[no-any-return]  # that of batch norm
        given, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))  # bf16 is too short for sums
        dims, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        kept = mask.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
        count = kept.sum() * (x[0, 0].numel())
        mean = (x * kept).sum(dims) / count
        centred = x - mean.view(shape)
        var = (centred.square() * kept).sum(dims) / count
        if layer.track_running_stats:
            unbiased = var.detach() * count / (count - 1)
            layer.running_mean.add_(mean.detach() - layer.running_mean, alpha=layer.momentum)
            layer.running_var.add_(unbiased - layer.running_var, alpha=layer.momentum)
            layer.num_batches_tracked.add_(1)
        out: Tensor = centred * (var + layer.eps).rsqrt().view(shape)
        if layer.affine:
            out = out * layer.weight.view(shape) + layer.bias.view(shape)
        return out.to(given)


class OwnDropout(OwnLayer):
    """Dropout from each client's own stream."""

    p: float

    def forward(self, x: Tensor) -> Tensor:
        return x * Noise.apply(x.detach(), self.p, self.side) if self.training and self.p else x  # type: ignore[no-untyped-call]


class Noise(torch.autograd.Function):
    """What a dropout layer multiplies with, drawn as in a turn: of as many examples as the client's batch has."""

    @staticmethod
    def forward(x: Tensor, p: float, side: Side) -> Tensor:
        raise NotImplementedError  # only ever inside vmap

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, p: float, side: Side) -> tuple[Tensor, int]:
        """The noise of all clients."""
        noise = torch.zeros_like(x.movedim(in_dims[0], 0), memory_format=torch.contiguous_format)
        for own, size, generator in zip(noise, side.sizes, side.generators, strict=False):
            own[:size].bernoulli_(1 - p, generator=generator).div_(1 - p)
        return noise, 0


class OwnLstm(OwnLayer):
    """An LSTM, position by position: the fused one cannot be batched."""

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        layer: Any = self
        if state is not None or layer.bidirectional or layer.proj_size or layer.dropout:
            raise Declined("an LSTM that has a first state, two directions, a projection or dropout")
        out = x if layer.batch_first else x.transpose(0, 1)
        last: list[tuple[Tensor, Tensor]] = []
        for number in range(layer.num_layers):
            w_ih, w_hh, *biases = (getattr(layer, name) for name in layer._all_weights[number])
            fed = functional.linear(out, w_ih, sum(biases) if biases else None)
            h = c = out.new_zeros(len(out), layer.hidden_size)
            outputs = []
            for position in fed.unbind(1):
                i, f, g, o = (position + functional.linear(h, w_hh)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outputs.append(h)
            out = torch.stack(outputs, 1)
            last.append((h, c))
        ends = tuple(torch.stack(column) for column in zip(*last, strict=True))
        return (out if layer.batch_first else out.transpose(0, 1)), (ends[0], ends[1])
