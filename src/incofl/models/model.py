"""A server model: a module without values, its layout, its initial state, and what it is called with."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.models.resnet import Stem
from incofl.split.submodel import list_tied_once
from incofl.tensors import Inputs, Tensors, call, clone, map_inputs

Shape = tuple[int, ...]
Extend = Callable[[nn.Module, Layout], Layout]  # changes a module in place and returns its new layout
EXAMPLES = 3  # in the batch that shows what a model does


@dataclass(frozen=True)
class ModelOptions:
    """What a config's ``model`` section, the data and the task say about a model; ``None``: the model's default."""

    shape: Shape = (3, 32, 32)  # of one example: (channels, height, width) of an image, (channels, steps), (length,)
    classes: int = 10  # number of classes; 0: unknown
    vocabulary: int = 0  # number of tokens of texts; 0: images
    sequence: bool = False  # whether every position of a text has a class of its own
    width: float = 1.0  # multiplier of all widths
    stem: Stem = "imagenet"  # of a ResNet
    depth: int | None = None  # number of blocks or layers of a transformer or LSTM
    dim: int | None = None  # width of its residual stream or hidden state
    heads: int | None = None  # number of heads of its attention
    patch: int | None = None  # side of a ViT's patches
    options: Mapping[str, Any] = field(default_factory=dict)  # more keyword arguments of a factory of your own
    inputs: Inputs | None = None  # one example on the meta device; None: a tensor of the shape
    blocks: tuple[str, ...] = ()  # the lists of blocks of a model of your own, such as ``model.layers``; else found
    pretrained: str | None = None  # folder or name on the Hub of a model of transformers
    logits: bool = True  # whether the output must be logits of the classes; False: anything

    @property
    def batch(self) -> Inputs:
        """A small batch of zeros."""
        dtype = torch.long if self.vocabulary else torch.get_default_dtype()
        one = torch.empty(self.shape, dtype=dtype, device="meta") if self.inputs is None else self.inputs
        return map_inputs(lambda x: torch.zeros(EXAMPLES, *x.shape, dtype=x.dtype), one)

    @property
    def output(self) -> Shape | None:
        """The shape of the logits of that batch; ``None`` if the output can be anything."""
        if not self.logits or not self.classes:
            return None
        return (EXAMPLES, self.classes, *(self.shape if self.sequence else ()))


@dataclass(frozen=True)
class Model:
    """A server model."""

    template: nn.Module  # on the meta device, without values; clients' modules are cut from it
    layout: Layout
    initial: Tensors  # parameters and buffers at the start
    inputs: Inputs  # one example on the meta device: its shape and type, without values

    def example(self, batch: int) -> Inputs:
        """A batch without values, on the meta device."""
        return map_inputs(lambda x: x.new_empty(batch, *x.shape), self.inputs)


def as_model(module: nn.Module, layout: Layout | None, example: Inputs) -> Model:
    """A server model of a module, which is not changed, and a batch of its inputs; without a layout, it is inferred."""
    layout = layout or Layout.infer(module, map_inputs(lambda x: x[:EXAMPLES], example))
    initial = clone({name: value for name, value in module.state_dict().items() if name not in layout.tied})
    shapes = {name: tuple(value.shape) for name, value in initial.items()}
    for name in (*layout.shapes, *shapes):
        if (says := layout.shapes.get(name)) != (has := shapes.get(name)):
            raise LayoutError(f"layout: {name!r} has shape {says}, but {has} in the given {type(module).__name__}")
    inputs = map_inputs(lambda x: torch.empty(x.shape[1:], dtype=x.dtype, device="meta"), example)
    template = without_values(module)
    list_tied_once(template, layout.tied)
    return Model(template, layout, initial, inputs)


def without_values(module: nn.Module) -> nn.Module:
    """A copy of a module with parameters and buffers on the meta device; ``requires_grad`` flags are kept.

    Buffers that are not part of its state, such as fixed position encodings, keep their values.
    """

    def emptied(value: Tensor) -> Tensor:
        empty = value.detach().to("meta")
        return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty

    return copy.deepcopy(module, {id(value): emptied(value) for value in module.state_dict(keep_vars=True).values()})


def try_out(module: nn.Module, example: Inputs) -> Any:
    """The output of a copy: on meta, which needs no time and no memory, or on the CPU if it cannot run on meta."""
    with torch.random.fork_rng(devices=[]):
        try:
            copied, batch = on_meta(module, example)
            for part in copied.modules():
                part.register_forward_pre_hook(_check_type)  # meta does not
            return call(copied, batch)
        except Exception:  # for example, forward makes a tensor without saying on which device
            return call(*on_cpu(module, example))


def _check_type(part: nn.Module, inputs: tuple[Any, ...]) -> None:
    learned = isinstance(part, nn.Linear | nn.modules.conv._ConvNd) and inputs and isinstance(inputs[0], Tensor)
    if learned and not inputs[0].is_floating_point():
        raise TypeError(f"{type(part).__name__} gets {inputs[0].dtype}")


def on_meta(module: nn.Module, example: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy of a module in evaluation mode and a batch, both without values."""
    return without_values(module).to("meta").eval(), map_inputs(lambda x: x.to("meta"), example)


def on_cpu(module: nn.Module, example: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy of a module in evaluation mode and a batch, both on the CPU."""
    batch = map_inputs(lambda x: torch.zeros_like(x, device="cpu") if x.is_meta else x.cpu(), example)
    return copy.deepcopy(module).cpu().eval(), batch


def first_line(problem: BaseException) -> str:
    """The first line of an exception's message."""
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def shapes_of(inputs: Inputs) -> object:
    """The shape of each tensor of the inputs, for messages."""
    return map_inputs(lambda x: tuple(x.shape), inputs)
