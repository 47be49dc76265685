"""The table of models. A family is named by its largest member; splitting makes the smaller ones."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from incofl.errors import ConfigError, nearest
from incofl.layout import Layout
from incofl.models.resnet import DEPTHS, ResNet, Stem, resnet_layout
from incofl.models.tiny import ResidualMlp, mlp_layout
from incofl.tensors import Tensors, clone

__all__ = ["MODELS", "Model", "Shape", "make_model"]

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Model:
    """A server model: a template of its module on the meta device, its layout, its initial state.

    Attributes:
        template: the module without values; clients' modules are cut from it.
        layout: its structure.
        initial: parameters and buffers at the start.
        input_shape: channels, height and width of one example.
    """

    template: nn.Module
    layout: Layout
    initial: Tensors
    input_shape: Shape


@dataclass(frozen=True)
class ModelOptions:
    """What a config's ``model`` section and data set say about a model."""

    width: float
    stem: Stem
    shape: Shape
    classes: int


def _resnet(depth: tuple[int, ...], options: ModelOptions) -> tuple[nn.Module, Layout]:
    model = ResNet(depth, options.width, options.shape[0], options.classes, options.stem)
    return model, resnet_layout(model)


def _tiny_resnet(options: ModelOptions) -> tuple[nn.Module, Layout]:
    model = ResNet((2, 2), options.width / 8, options.shape[0], options.classes, "small")
    return model, resnet_layout(model)


def _tiny_mlp(options: ModelOptions) -> tuple[nn.Module, Layout]:
    channels, height, width = options.shape
    model = ResidualMlp(6, options.width, channels * height * width, options.classes)
    return model, mlp_layout(model)


Factory = Callable[[ModelOptions], tuple[nn.Module, Layout]]

MODELS: dict[str, Factory] = {name: functools.partial(_resnet, depth) for name, depth in DEPTHS.items()} | {
    "tiny-resnet": _tiny_resnet,
    "tiny-mlp": _tiny_mlp,
}


def make_model(
    name: str,
    *,
    seed: int = 0,
    width: float = 1.0,
    stem: Stem = "imagenet",
    shape: Shape = (3, 32, 32),
    classes: int = 10,
) -> Model:
    """A model of the table, initialised from a seed without touching torch's global random state."""
    if name not in MODELS:
        raise ConfigError(f"model.name: got {name!r}{nearest(name, MODELS)}")
    options = ModelOptions(width, stem, shape, classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, layout = MODELS[name](options)
    initial = clone(module.state_dict())
    return Model(module.to("meta"), layout, initial, shape)
