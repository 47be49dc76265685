"""The table of models. A family is named by its largest member; splitting makes the smaller ones."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from incofl.errors import ConfigError, nearest
from incofl.layout import Layout
from incofl.models.custom import FROM_DATA, SIZES, Factory, arguments_of, as_pair, check_module, make_custom
from incofl.models.hf import PREFIX, make_hf
from incofl.models.model import Extend, Model, ModelOptions, Shape, as_model
from incofl.models.resnet import DEPTHS, ResNet
from incofl.models.stacks import ResidualMlp, StackedLstm, TextTransformer
from incofl.models.vit import VisionTransformer

__all__ = ["MODELS", "Extend", "Family", "Model", "ModelOptions", "as_model", "find_family", "make_model"]

Made = tuple[nn.Module, Layout]


@dataclass(frozen=True)
class Family:
    """A line of the table."""

    summary: str  # for ``incofl list models``
    factory: Callable[..., Any]  # makes a module with a method ``layout``, or a module and its layout, as your own does
    input: Literal["images", "signals", "texts", "any"] = "images"
    split: Literal["stage", "layer"] | None = "stage"  # default depth splitting; None: follows from the layout
    levels: int | None = 5  # default number of sizes; None: follows from the layout
    side: int | None = None  # to which images are resized; None: as they are
    scaled: bool = False  # whether the default width of a data set is meant for it
    stem: bool = False  # whether it has a choice of stems


def _tiny_resnet(shape: Shape, classes: int, width: float = 1.0, norm: Literal["batch", "group"] = "batch") -> ResNet:
    return ResNet((2, 2), shape, classes, width / 8, "small", norm)


def _resnet_family(summary: str, *blocks: int, input: Literal["images", "signals"] = "images") -> Family:
    levels = min(5, 1 + sum(blocks) - len(blocks))  # as many as stage splitting can make
    return Family(summary, partial(ResNet, blocks), input, levels=levels, scaled=True, stem=True)


MODELS: dict[str, Family] = {
    **{name: _resnet_family(f"ResNet of {blocks} blocks", *blocks) for name, blocks in DEPTHS.items()},
    "vit-s": Family("ViT-S of 12 blocks, images shown at 224x224", VisionTransformer, split="layer", side=224),
    "vit-tiny": Family(
        "ViT-Ti of 12 blocks, images as they are", partial(VisionTransformer, dim=192, heads=3), split="layer"
    ),
    "resnet20-1d": _resnet_family("ResNet of (3, 3, 3) blocks in one dimension, for signals", 3, 3, 3, input="signals"),
    "tiny-resnet": Family("for tests", _tiny_resnet, levels=3, scaled=True),
    "tiny-resnet-1d": Family("for tests", _tiny_resnet, "signals", levels=3, scaled=True),
    "tiny-mlp": Family("for tests", ResidualMlp, scaled=True),
    "tiny-vit": Family("for tests", partial(VisionTransformer, depth=4, dim=32, heads=4), split="layer", levels=3),
    "lstm": Family("4 stacked LSTM layers", StackedLstm, "texts", "layer", 4),
    "text-transformer": Family("6 transformer blocks", TextTransformer, "texts", "layer"),
    "tiny-lstm": Family("for tests", partial(StackedLstm, depth=3, dim=16), "texts", "layer", 3),
    "tiny-transformer": Family("for tests", partial(TextTransformer, depth=4, dim=16, heads=2), "texts", "layer", 3),
}
OWN = Family("your own", Layout, input="any", split=None, levels=None)


AnyModel = str | Factory | nn.Module | Made


def find_family(model: AnyModel) -> Family:
    """The model of a name, or your own: a factory or its name, a module, or a pair of a module and its layout.

    A name such as ``hf:AutoModelForSequenceClassification`` is a class of Hugging Face transformers.
    """
    if isinstance(model, str) and model not in MODELS and ":" not in model:
        raise ConfigError(f"model.name: got {model!r}{nearest(model, MODELS)}")
    if isinstance(model, nn.Module | tuple):
        as_pair(model)
    return MODELS.get(model, OWN) if isinstance(model, str) else OWN


def make_model(
    model: AnyModel, options: ModelOptions | None = None, *, seed: int = 0, extend: Extend | None = None
) -> Model:
    """A model of the table or of a factory, initialised from a seed without touching torch's global random state.

    Layers that ``extend`` adds are initialised after all others, which keep the weights that they have without it.
    """
    options = options or ModelOptions()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, layout = build_module(model, options)
        layout = layout if extend is None else extend(module, layout)
    return as_model(module, layout, options.batch)


def build_module(model: AnyModel, options: ModelOptions) -> Made:
    """A new module with random weights, and its layout."""
    family = find_family(model)
    if isinstance(model, nn.Module | tuple):
        module, layout = as_pair(model)
        return check_module(type(module).__name__, copy.deepcopy(module), layout, options)
    if isinstance(model, str) and model.startswith(PREFIX):
        return make_hf(model, options)
    if not isinstance(model, str) or family is OWN:
        return make_custom(model, options)
    _check(model, family, options)
    stem = {"stem": options.stem} if family.stem else {}
    made = family.factory(**stem | arguments_of(model, family.factory, options))
    return made if isinstance(made, tuple) else (made, made.layout())


def _check(name: str, family: Family, options: ModelOptions) -> None:
    """Refuses data that a built-in model cannot read, and options that are keys of ``model`` or of the data."""
    if known := [key for key in options.options if key in ("width", "stem", *SIZES, *FROM_DATA)]:
        hint = f"write model.{known[0]}" if known[0] not in FROM_DATA else "it follows from the data"
        raise ConfigError(f"model.options.{known[0]}: expected none: {hint}")
    if options.blocks:
        raise ConfigError(f"model.blocks: got {options.blocks[0]!r}, expected none: {name} has its own")
    kinds = {1: "texts"} if options.vocabulary else {2: "signals", 3: "images"}
    held = "other" if isinstance(options.inputs, tuple | dict) else kinds.get(len(options.shape), "other")
    if family.input != held:
        fitting = ", ".join(other for other, entry in MODELS.items() if entry.input == held)
        expected = f"one for {held}: {fitting}" if fitting else "a model of your own"
        raise ConfigError(f"model.name: got {name!r}, which reads {family.input}, expected {expected}")
    if not options.classes:
        raise ConfigError(f"model.name: got {name!r}, expected a model of your own: the number of classes is not known")
