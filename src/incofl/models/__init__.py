"""The table of models. A family is named by its largest member; splitting makes the smaller ones."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from incofl.errors import ConfigError, nearest
from incofl.layout import Layout
from incofl.models.resnet import DEPTHS, ExitResNet, ResNet, Stem, resnet_layout
from incofl.models.tiny import ResidualMlp, mlp_layout
from incofl.split import exit_positions
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
    exits: int = 0  # how many, the usual head included; 0: no early exits
    head_convs: int = 3


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
    if options.exits:
        raise ConfigError("model.name: got 'tiny-mlp', expected a model with early exits for this method: a ResNet")
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
    exits: int = 0,
    head_convs: int = 3,
) -> Model:
    """A model of the table, initialised from a seed without touching torch's global random state."""
    if name not in MODELS:
        raise ConfigError(f"model.name: got {name!r}{nearest(name, MODELS)}")
    options = ModelOptions(width, stem, shape, classes, exits, head_convs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, layout = MODELS[name](options)
    initial = clone(module.state_dict())
    return Model(module.to("meta"), layout, initial, shape)
