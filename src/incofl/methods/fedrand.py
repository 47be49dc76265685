"""Random width: in every turn a client trains channels that are drawn for it, as many as it can hold.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource Requirements", 2018 (Federated
Dropout). Of each axis of the model with O channels a level of share c holds c O, drawn anew for every client and round:
tensors that share an axis, such as a residual stream, share the draw. As in dropout, a layer of whose inputs only a
share c is there computes with

    W (x / c) + b        while it is trained

so that what it adds up is on average as large as in the whole model; linear layers and convolutions do, an LSTM, whose
state is among its inputs, does not. The server takes the covered mean.

Differences: the original has fully connected and convolutional layers without shortcuts; public codes draw for each
convolution by itself, which sets the two sides of a shortcut at odds. A level is evaluated on its first channels, and
batch-norm statistics are measured for them; the whole model is what the method trains. c O is rounded up
(``split.rounding``). The original also compresses what is sent.
"""

import functools
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from incofl.client import ClientRule
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.methods.heterofl import scale
from incofl.options import options
from incofl.seeds import Purpose, torch_rng
from incofl.split import Depths, Drawn, Kind, Levels, Slice, Splitter, WidthRule, Window, cut, make_splitter


@options("fedrand")
class FedRand(ClientRule):
    """What clients of random width do."""

    # where the inputs of a layer are divided by the share of them that a client holds: in ``training`` as dropout does,
    # ``always``, which also evaluates a small level as it was trained, or ``never``
    scale: Literal["training", "always", "never"] = "training"

    def prepare(self, model: nn.Module, layout: Layout) -> None:
        for name, layer in model.named_modules() if self.scale != "never" else ():
            if (share := share_of_inputs(layer, layout.shapes.get(f"{name}.weight"))) < 1:
                hook = functools.partial(scale, model, share) if self.scale == "training" else always(share)
                layer.register_forward_pre_hook(hook)

    def deliver(self, model: nn.Module, layout: Layout) -> None:
        if self.scale == "always":
            self.prepare(model, layout)


def share_of_inputs(layer: nn.Module, full: tuple[int, ...] | None) -> float:
    """The share of a layer's inputs that it has left of those in a weight of the full shape."""
    if full is None or not isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
        return 1.0
    inputs = 0 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 1
    return layer.weight.shape[inputs] / full[inputs]


def always(share: float) -> functools.partial[Tensor]:
    """A hook that divides a layer's input."""
    return functools.partial(_divided, share)


def _divided(share: float, layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0] / share


class RandomWindows(Splitter):
    """Channels drawn for each turn; a level is evaluated on its first ones."""

    by_client: ClassVar[bool] = True

    def slice(self, layout: Layout, level: int, round: int = 0, client: int | None = None, drawn: Drawn = ()) -> Slice:
        if client is None:
            return super().slice(layout, level)
        rng, keep = torch_rng(self.seed, Purpose.WINDOWS, round, client), dict[str, Tensor]()
        for axis in layout.narrow_axes:
            order = torch.randperm(axis.size, generator=rng)
            if (width := self.width(axis.size, level)) < axis.size:
                keep[axis.name] = order[:width].sort().values
        return cut(layout, self.blocks(layout, level), keep)


class RandomRule(WidthRule):
    """Width splitting whose channels are drawn."""

    cutter: ClassVar[type[Splitter]] = RandomWindows

    @property
    def window(self) -> Window:
        return "random"

    def splitter(self, layout: Layout, kind: Kind, levels: Levels, depth: Depths = "full") -> Splitter:
        made = make_splitter(layout, kind, levels, depth, self.window)
        return self.cutter(made.shares, made.depths, made.window)


fedrand = Method("fedrand", FedRand(), ServerRule(buffers="static"), RandomRule())
