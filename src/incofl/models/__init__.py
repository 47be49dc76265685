"""The table of models. A family is named by its largest member; splitting makes the smaller ones."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from incofl.errors import ConfigError, nearest
from incofl.layout import Layout
from incofl.models.custom import make_custom
from incofl.models.resnet import DEPTHS, ExitResNet, ResNet, Stem, resnet_layout
from incofl.models.text import StackedLstm, TextTransformer, lstm_layout, transformer_layout
from incofl.models.tiny import ResidualMlp, mlp_layout
from incofl.models.vit import VisionTransformer, check_sizes, default_patch, vit_layout
from incofl.split import exit_positions
from incofl.tensors import Tensors, clone

__all__ = ["MODELS", "Family", "Model", "ModelOptions", "Shape", "find_family", "make_model"]

Shape = tuple[int, ...]
Size = Literal["depth", "dim", "heads", "patch"]


@dataclass(frozen=True)
class ModelOptions:
    """What a config's ``model`` section and data set say about a model.

    Attributes:
        shape: of one example: channels, height and width, or the length of a text.
        classes: how many.
        vocabulary: how many tokens, of texts; 0: images.
        sequence: whether every position of a text gets logits of its own.
        width: multiplier of all widths.
        stem: of ResNets.
        depth: blocks or layers of a transformer or LSTM; ``None``: the family's.
        dim: width of its residual stream or hidden state; ``None``: the family's.
        heads: of its attention; ``None``: the family's.
        patch: side of a ViT's patches; ``None``: what suits the images.
        exits: how many, the usual head included; 0: no early exits.
        head_convs: convolutions of an exit.
    """

    shape: Shape = (3, 32, 32)
    classes: int = 10
    vocabulary: int = 0
    sequence: bool = False
    width: float = 1.0
    stem: Stem = "imagenet"
    depth: int | None = None
    dim: int | None = None
    heads: int | None = None
    patch: int | None = None
    exits: int = 0
    head_convs: int = 3


@dataclass(frozen=True)
class Family:
    """A line of the table.

    Attributes:
        summary: for ``incofl list models``.
        make: the module and its layout.
        input: what it reads.
        split: the depth splitting that suits it; ``None``: that follows from its layout.
        levels: how many sizes suit it; ``None``: that follows from its layout.
        side: at which images are shown to it; ``None``: as they are.
        scaled: whether the width that a data set asks for is meant for it.
        stem: whether it has one to choose.
        exits: whether it can have early exits.
        options: which of the sizes that a config can leave to the family it knows; others are refused.
    """

    summary: str
    make: Callable[[ModelOptions], tuple[nn.Module, Layout]]
    input: Literal["images", "texts", "any"] = "images"
    split: Literal["stage", "layer"] | None = "stage"
    levels: int | None = 5
    side: int | None = None
    scaled: bool = False
    stem: bool = False
    exits: bool = False
    options: tuple[Size, ...] = ()


@dataclass(frozen=True)
class Model:
    """A server model: a template of its module on the meta device, its layout, its initial state.

    Attributes:
        template: the module without values; clients' modules are cut from it.
        layout: its structure.
        initial: parameters and buffers at the start.
        input_shape: of one example.
        input_dtype: of one example; whole numbers for texts.
    """

    template: nn.Module
    layout: Layout
    initial: Tensors
    input_shape: Shape
    input_dtype: torch.dtype = torch.float32

    def example(self, batch: int) -> Tensor:
        """A batch without values, on the meta device."""
        return torch.empty(batch, *self.input_shape, dtype=self.input_dtype, device="meta")


def _resnet(depth: tuple[int, ...], options: ModelOptions) -> tuple[nn.Module, Layout]:
    common = (depth, options.width, options.shape[0], options.classes, options.stem)
    if not options.exits:
        model = ResNet(*common)
    else:
        model = ExitResNet(*common, exit_positions(sum(depth), options.exits), options.head_convs)
    return model, resnet_layout(model)


def _tiny_resnet(options: ModelOptions) -> tuple[nn.Module, Layout]:
    return _resnet((2, 2), dataclasses.replace(options, width=options.width / 8, stem="small"))


def _tiny_mlp(options: ModelOptions) -> tuple[nn.Module, Layout]:
    channels, height, width = options.shape
    model = ResidualMlp(6, options.width, channels * height * width, options.classes)
    return model, mlp_layout(model)


def _vit(dim: int, depth: int, heads: int, options: ModelOptions) -> tuple[nn.Module, Layout]:
    dim, depth, heads = options.dim or dim, options.depth or depth, options.heads or heads
    patch = options.patch or default_patch(options.shape)
    check_sizes(options.shape, patch, dim, heads)
    head_dim, heads = dim // heads, math.ceil(options.width * heads)
    model = VisionTransformer(options.shape, options.classes, patch, heads * head_dim, depth, heads)
    return model, vit_layout(model)


def _vit_family(summary: str, dim: int, depth: int, heads: int, levels: int = 5, side: int | None = None) -> Family:
    make = functools.partial(_vit, dim, depth, heads)
    sizes: tuple[Size, ...] = ("depth", "dim", "heads", "patch")
    return Family(summary, make, split="layer", levels=levels, side=side, options=sizes)


def _lstm(depth: int, dim: int, options: ModelOptions) -> tuple[nn.Module, Layout]:
    width = math.ceil(options.width * (options.dim or dim))
    model = StackedLstm(options.depth or depth, width, options.vocabulary, options.classes, options.sequence)
    return model, lstm_layout(model)


def _text_transformer(depth: int, dim: int, heads: int, options: ModelOptions) -> tuple[nn.Module, Layout]:
    width, heads = math.ceil(options.width * (options.dim or dim)), options.heads or heads
    if width % heads:
        raise ConfigError(f"model.heads: got {heads}, expected a divisor of the model's width, {width}")
    (length,) = options.shape
    model = TextTransformer(
        options.depth or depth, width, heads, options.vocabulary, length, options.classes, options.sequence
    )
    return model, transformer_layout(model)


def _text_family(
    summary: str, make: Callable[[ModelOptions], tuple[nn.Module, Layout]], levels: int, *sizes: Size
) -> Family:
    return Family(summary, make, "texts", "layer", levels, options=("depth", "dim", *sizes))


MODELS: dict[str, Family] = {
    name: Family(f"ResNet of {depth} blocks", functools.partial(_resnet, depth), scaled=True, stem=True, exits=True)
    for name, depth in DEPTHS.items()
} | {
    "vit-s": _vit_family("ViT-S of 12 blocks, images shown at 224x224", 384, 12, 6, side=224),
    "vit-tiny": _vit_family("ViT-Ti of 12 blocks, images as they are", 192, 12, 3),
    "tiny-resnet": Family("for tests", _tiny_resnet, scaled=True, exits=True),
    "tiny-mlp": Family("for tests", _tiny_mlp, scaled=True),
    "tiny-vit": _vit_family("for tests", 32, 4, 4, levels=3),
    "lstm": _text_family("4 stacked LSTM layers", functools.partial(_lstm, 4, 128), 4),
    "text-transformer": _text_family(
        "6 transformer blocks", functools.partial(_text_transformer, 6, 128, 4), 5, "heads"
    ),
    "tiny-lstm": _text_family("for tests", functools.partial(_lstm, 3, 16), 3),
    "tiny-transformer": _text_family("for tests", functools.partial(_text_transformer, 4, 16, 2), 3, "heads"),
}


def find_family(name: str) -> Family:
    """The model of that name, one of the user's own, or one clear line with the nearest name."""
    if ":" in name:
        make = functools.partial(make_custom, name)  # which refuses what it does not know itself
        return Family("of your own", make, input="any", split=None, levels=None, options=typing.get_args(Size))
    if name not in MODELS:
        raise ConfigError(f"model.name: got {name!r}{nearest(name, MODELS)}")
    return MODELS[name]


Extend = Callable[[nn.Module, Layout], Layout]  # changes a module in place, and gives its new layout


def make_model(
    name: str,
    options: ModelOptions | None = None,
    *,
    seed: int = 0,
    extend: Extend = lambda module, layout: layout,
) -> Model:
    """A model of the table, initialised from a seed without touching torch's global random state.

    Layers that ``extend`` adds are initialised after all others, which so keep the weights that they have without.
    """
    options, family = options or ModelOptions(), find_family(name)
    if options.exits and not family.exits:
        with_exits = ", ".join(other for other, entry in MODELS.items() if entry.exits)
        raise ConfigError(f"model.name: got {name!r}, expected a model with early exits for this method: {with_exits}")
    for size in typing.get_args(Size):
        if getattr(options, size) is not None and size not in family.options:
            raise ConfigError(f"model.{size}: got {getattr(options, size)}, expected none: {name} has no such option")
    held = "texts" if options.vocabulary else "images"
    if family.input not in (held, "any"):
        fitting = ", ".join(other for other, entry in MODELS.items() if entry.input == held)
        raise ConfigError(f"model.name: got {name!r}, which reads {family.input}, expected one for {held}: {fitting}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, layout = family.make(options)
        layout = extend(module, layout)
    return as_model(module, layout, options)


def as_model(module: nn.Module, layout: Layout, options: ModelOptions) -> Model:
    """A server model from a module with values, which becomes its template."""
    initial = clone(module.state_dict())
    kept = {name: buffer for name, buffer in module.named_buffers() if name not in initial}  # not part of its state
    module.to("meta")
    for name, buffer in kept.items():
        parent, _, child = name.rpartition(".")
        module.get_submodule(parent).register_buffer(child, buffer, persistent=False)
    return Model(
        module, layout, initial, options.shape, torch.long if options.vocabulary else torch.get_default_dtype()
    )
