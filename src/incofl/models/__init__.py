"""The table of models. A family is named by its largest member; splitting makes the smaller ones."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from incofl.errors import ConfigError, nearest
from incofl.layout import Layout
from incofl.models.custom import Factory, factory_name, make_custom, use_module
from incofl.models.model import Extend, Model, ModelOptions, as_model
from incofl.models.resnet import DEPTHS, ResNet, resnet_layout
from incofl.models.text import StackedLstm, TextTransformer, lstm_layout, text_transformer_layout
from incofl.models.tiny import ResidualMlp, mlp_layout
from incofl.models.vit import VisionTransformer, check_sizes, default_patch, vit_layout

__all__ = ["MODELS", "Extend", "Family", "Model", "ModelOptions", "as_model", "find_family", "make_model"]

Size = Literal["depth", "dim", "heads", "patch"]
Make = Callable[[ModelOptions], tuple[nn.Module, Layout]]


@dataclass(frozen=True)
class Family:
    """A line of the table."""

    summary: str  # for ``incofl list models``
    make: Make
    input: Literal["images", "texts", "any"] = "images"
    split: Literal["stage", "layer"] | None = "stage"  # default depth splitting; None: follows from the layout
    levels: int | None = 5  # default number of sizes; None: follows from the layout
    side: int | None = None  # to which images are resized; None: as they are
    scaled: bool = False  # whether the default width of a data set is meant for it
    stem: bool = False  # whether it has a choice of stems
    options: tuple[Size, ...] = ()  # the sizes that a config can set


def _resnet(depth: tuple[int, ...], options: ModelOptions) -> tuple[nn.Module, Layout]:
    model = ResNet(depth, options.width, options.shape[0], options.classes, options.stem)
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
    return model, text_transformer_layout(model)


def _text_family(summary: str, make: Make, levels: int, *sizes: Size) -> Family:
    return Family(summary, make, "texts", "layer", levels, options=("depth", "dim", *sizes))


MODELS: dict[str, Family] = {
    name: Family(
        f"ResNet of {depth} blocks",
        functools.partial(_resnet, depth),
        levels=min(5, 1 + sum(depth) - len(depth)),  # as many as stage splitting can make
        scaled=True,
        stem=True,
    )
    for name, depth in DEPTHS.items()
} | {
    "vit-s": _vit_family("ViT-S of 12 blocks, images shown at 224x224", 384, 12, 6, side=224),
    "vit-tiny": _vit_family("ViT-Ti of 12 blocks, images as they are", 192, 12, 3),
    "tiny-resnet": Family("for tests", _tiny_resnet, levels=3, scaled=True),
    "tiny-mlp": Family("for tests", _tiny_mlp, scaled=True),
    "tiny-vit": _vit_family("for tests", 32, 4, 4, levels=3),
    "lstm": _text_family("4 stacked LSTM layers", functools.partial(_lstm, 4, 128), 4),
    "text-transformer": _text_family(
        "6 transformer blocks", functools.partial(_text_transformer, 6, 128, 4), 5, "heads"
    ),
    "tiny-lstm": _text_family("for tests", functools.partial(_lstm, 3, 16), 3),
    "tiny-transformer": _text_family("for tests", functools.partial(_text_transformer, 4, 16, 2), 3, "heads"),
}


AnyModel = str | Factory | nn.Module | tuple[nn.Module, Layout]


def find_family(model: AnyModel) -> Family:
    """The model of a name, or your own: a factory or its name, a module, or a pair of a module and its layout."""
    if isinstance(model, str) and model in MODELS:
        return MODELS[model]
    if isinstance(model, str) and ":" not in model:
        raise ConfigError(f"model.name: got {model!r}{nearest(model, MODELS)}")
    if isinstance(model, nn.Module | tuple):
        module, layout = model if isinstance(model, tuple) else (model, None)
        if not isinstance(module, nn.Module) or not isinstance(layout, Layout | None):
            raise ConfigError(f"model: got {model!r:.60}, expected a module, or a pair of a module and its Layout")
        make: Make = functools.partial(use_module, module, layout)
    else:
        name, factory = (model, None) if isinstance(model, str) else (factory_name(model), model)
        make = functools.partial(make_custom, name, factory)  # which checks the options itself
    return Family("your own", make, input="any", split=None, levels=None, options=typing.get_args(Size))


def make_model(
    model: AnyModel, options: ModelOptions | None = None, *, seed: int = 0, extend: Extend | None = None
) -> Model:
    """A model of the table or of a factory, initialised from a seed without touching torch's global random state.

    Layers that ``extend`` adds are initialised after all others, which keep the weights that they have without it.
    """
    options, family = options or ModelOptions(), find_family(model)
    if isinstance(model, str) and family.input != "any":
        _check(model, family, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, layout = family.make(options)
        layout = layout if extend is None else extend(module, layout)
    return as_model(module, layout, options.batch)


def _check(name: str, family: Family, options: ModelOptions) -> None:
    """Refuses options that a built-in model does not have, and data that it cannot read."""
    for size in typing.get_args(Size):
        if getattr(options, size) is not None and size not in family.options:
            raise ConfigError(f"model.{size}: got {getattr(options, size)}, expected none: {name} has no such option")
    for key, value in options.options.items():
        raise ConfigError(f"model.options.{key}: got {value!r}, expected none: {name} has no such option")
    if not isinstance(options.inputs, tuple | dict) and len(options.shape) == (1 if options.vocabulary else 3):
        held = "texts" if options.vocabulary else "images"
        fitting = "one for " + held + ": " + ", ".join(n for n, entry in MODELS.items() if entry.input == held)
    else:
        held, fitting = "other", "a model of your own"
    if family.input != held:
        raise ConfigError(f"model.name: got {name!r}, which reads {family.input}, expected {fitting}")
    if not options.classes:
        raise ConfigError(f"model.name: got {name!r}, expected a model of your own: the number of classes is not known")
