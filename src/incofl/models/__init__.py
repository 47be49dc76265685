"""The table of models. A family is named by its largest member; splitting makes the smaller ones."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from incofl.errors import ConfigError, nearest
from incofl.layout import Layout
from incofl.models.custom import SIZES, Factory, as_pair, make_custom, use_module
from incofl.models.hf import PREFIX, make_hf
from incofl.models.model import Extend, Model, ModelOptions, as_model
from incofl.models.resnet import DEPTHS, ResNet
from incofl.models.stacks import ResidualMlp, StackedLstm, TextTransformer
from incofl.models.vit import VisionTransformer, check_sizes, default_patch

__all__ = ["MODELS", "Extend", "Family", "Model", "ModelOptions", "as_model", "find_family", "make_model"]

Made = tuple[nn.Module, Layout]


@dataclass(frozen=True)
class Family:
    """A line of the table."""

    summary: str  # for ``incofl list models``
    build: Callable[..., Any]  # makes a module with a method ``layout``, or a module and its layout
    sizes: Mapping[str, Any] = field(default_factory=dict)  # more arguments of it; a config can set some
    input: Literal["images", "signals", "texts", "any"] = "images"
    split: Literal["stage", "layer"] | None = "stage"  # default depth splitting; None: follows from the layout
    levels: int | None = 5  # default number of sizes; None: follows from the layout
    side: int | None = None  # to which images are resized; None: as they are
    scaled: bool = False  # whether the default width of a data set is meant for it
    stem: bool = False  # whether it has a choice of stems

    def make(self, options: ModelOptions) -> Made:
        """A new module with random weights, and its layout."""
        sizes = {key: getattr(options, key, None) or size for key, size in self.sizes.items()}
        made = self.build(options, **sizes)
        return made if isinstance(made, tuple) else (made, made.layout())


def _resnet(options: ModelOptions, blocks: tuple[int, ...], tiny: bool = False) -> ResNet:
    if tiny:
        options = dataclasses.replace(options, width=options.width / 8, stem="small")
    channels, *places = options.shape
    return ResNet(blocks, options.width, channels, options.classes, options.stem, len(places))


def _tiny_mlp(options: ModelOptions) -> ResidualMlp:
    return ResidualMlp(6, options.width, math.prod(options.shape), options.classes)


def _vit(options: ModelOptions, depth: int, dim: int, heads: int, patch: int | None) -> VisionTransformer:
    patch = patch or default_patch(options.shape)
    check_sizes(options.shape, patch, dim, heads)
    head_dim, heads = dim // heads, math.ceil(options.width * heads)
    return VisionTransformer(options.shape, options.classes, patch, heads * head_dim, depth, heads)


def _lstm(options: ModelOptions, depth: int, dim: int) -> StackedLstm:
    width = math.ceil(options.width * dim)
    return StackedLstm(depth, width, options.vocabulary, options.classes, options.sequence)


def _text_transformer(options: ModelOptions, depth: int, dim: int, heads: int) -> TextTransformer:
    width, (length,) = math.ceil(options.width * dim), options.shape
    if width % heads:
        raise ConfigError(f"model.heads: got {heads}, expected a divisor of the model's width, {width}")
    return TextTransformer(depth, width, heads, options.vocabulary, length, options.classes, options.sequence)


_VIT = Family("for tests", _vit, {"depth": 4, "dim": 32, "heads": 4, "patch": None}, split="layer", levels=3)
_LSTM = Family("for tests", _lstm, {"depth": 3, "dim": 16}, "texts", "layer", levels=3)
_TEXT = Family("for tests", _text_transformer, {"depth": 4, "dim": 16, "heads": 2}, "texts", "layer", levels=3)


def _larger(tiny: Family, summary: str, levels: int = 5, side: int | None = None, **sizes: int) -> Family:
    return dataclasses.replace(tiny, summary=summary, levels=levels, side=side, sizes={**tiny.sizes, **sizes})


def _resnet_family(blocks: tuple[int, ...]) -> Family:
    levels = min(5, 1 + sum(blocks) - len(blocks))  # as many as stage splitting can make
    return Family(f"ResNet of {blocks} blocks", _resnet, {"blocks": blocks}, levels=levels, scaled=True, stem=True)


def _for_signals(family: Family, summary: str) -> Family:
    return dataclasses.replace(family, summary=summary, input="signals")


_TINY_RESNET = Family("for tests", _resnet, {"blocks": (2, 2), "tiny": True}, levels=3, scaled=True)


MODELS: dict[str, Family] = {name: _resnet_family(blocks) for name, blocks in DEPTHS.items()} | {
    "vit-s": _larger(_VIT, "ViT-S of 12 blocks, images shown at 224x224", side=224, depth=12, dim=384, heads=6),
    "vit-tiny": _larger(_VIT, "ViT-Ti of 12 blocks, images as they are", depth=12, dim=192, heads=3),
    "resnet20-1d": _for_signals(_resnet_family((3, 3, 3)), "ResNet of (3, 3, 3) blocks in one dimension, for signals"),
    "tiny-resnet": _TINY_RESNET,
    "tiny-resnet-1d": _for_signals(_TINY_RESNET, "for tests"),
    "tiny-mlp": Family("for tests", _tiny_mlp, scaled=True),
    "tiny-vit": _VIT,
    "lstm": _larger(_LSTM, "4 stacked LSTM layers", levels=4, depth=4, dim=128),
    "text-transformer": _larger(_TEXT, "6 transformer blocks", depth=6, dim=128, heads=4),
    "tiny-lstm": _LSTM,
    "tiny-transformer": _TEXT,
}


AnyModel = str | Factory | nn.Module | Made


def find_family(model: AnyModel) -> Family:
    """The model of a name, or your own: a factory or its name, a module, or a pair of a module and its layout.

    A name such as ``hf:AutoModelForSequenceClassification`` is a class of Hugging Face transformers.
    """
    if isinstance(model, str) and model in MODELS:
        return MODELS[model]
    if isinstance(model, str) and ":" not in model:
        raise ConfigError(f"model.name: got {model!r}{nearest(model, MODELS)}")
    if isinstance(model, nn.Module | tuple):
        build = functools.partial(use_module, *as_pair(model, f"model: got {model!r:.60}"))
    elif isinstance(model, str) and model.startswith(PREFIX):
        build = functools.partial(make_hf, model)
    else:
        build = functools.partial(make_custom, model)
    return Family("your own", build, input="any", split=None, levels=None)


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
    own_sizes = {size: getattr(options, size) for size in SIZES if size not in family.sizes}
    own_sizes["blocks"] = options.blocks or None
    for key, value in (own_sizes | {f"options.{key}": value for key, value in options.options.items()}).items():
        if value is not None:
            raise ConfigError(f"model.{key}: got {value!r}, expected none: {name} has no such option")
    kinds = {1: "texts"} if options.vocabulary else {2: "signals", 3: "images"}
    held = "other" if isinstance(options.inputs, tuple | dict) else kinds.get(len(options.shape), "other")
    if held == "other":
        fitting = "a model of your own"
    else:
        fitting = f"one for {held}: {', '.join(n for n, entry in MODELS.items() if entry.input == held)}"
    if family.input != held:
        raise ConfigError(f"model.name: got {name!r}, which reads {family.input}, expected {fitting}")
    if not options.classes:
        raise ConfigError(f"model.name: got {name!r}, expected a model of your own: the number of classes is not known")
