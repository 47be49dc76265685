"""The module a client trains is the small network itself, not an approximation of it."""

from typing import Any

import pytest
import torch

from incofl.models import ModelOptions, make_model
from incofl.models.resnet import DEPTHS, ResNet
from incofl.split import make_splitter, submodel


@pytest.mark.parametrize(
    ("level", "name"), list(enumerate(["resnet10", "resnet14", "resnet18", "resnet22", "resnet26"]))
)
def test_stage_splitting_gives_the_papers_resnets(level: int, name: str) -> None:
    """Same state dict, same output, as the smaller network built directly."""
    model = make_model("resnet26", ModelOptions(width=0.125), seed=1)
    piece = make_splitter(model.layout, "stage", 5).slice(model.layout, level, 0)
    small = submodel(model.template, model.layout, piece)
    state = piece.take(model.initial)
    small.load_state_dict(state)
    direct = ResNet(DEPTHS[name], width=0.125)
    direct.load_state_dict(state)
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(small.train()(x), direct.train()(x))
    assert torch.equal(small.eval()(x), direct.eval()(x))


def test_stage_splitting_of_signals_gives_shallow_resnets() -> None:
    """Same output as the smaller network in one dimension, built directly."""
    model = make_model("resnet20-1d", ModelOptions(shape=(9, 128), classes=6, width=0.125), seed=1)
    splitter = make_splitter(model.layout, "stage", 5)
    for level, depth in enumerate(splitter.depths):
        piece = splitter.slice(model.layout, level, 0)
        small = submodel(model.template, model.layout, piece)
        direct = ResNet(depth, (9, 128), 6, 0.125)
        for module in (small, direct):
            module.load_state_dict(piece.take(model.initial))
        x = torch.randn(4, 9, 128, generator=torch.Generator().manual_seed(0))
        assert torch.equal(small.eval()(x), direct.eval()(x))


@pytest.mark.parametrize(("level", "width"), list(enumerate([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1])))
def test_hetero_splitting_gives_the_narrow_resnets(level: int, width: float) -> None:
    model = make_model("resnet26", ModelOptions(shape=(1, 8, 8), stem="small"), seed=1)
    piece = make_splitter(model.layout, "hetero", 5).slice(model.layout, level, 0)
    small = submodel(model.template, model.layout, piece)
    state = piece.take(model.initial)
    small.load_state_dict(state)
    direct = ResNet(DEPTHS["resnet26"], (1, 8, 8), width=width, stem="small")
    direct.load_state_dict(state)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(small.eval()(x), direct.eval()(x))


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-resnet-1d", "tiny-mlp", "tiny-vit"])
@pytest.mark.parametrize(
    ("kind", "levels", "depth"),
    [("stage", 2, "full"), ("layer", 2, "full"), ("hetero", 4, "full"), ("hetero", 4, "scaled")],
)
def test_every_level_can_be_trained(name: str, kind: Any, levels: int, depth: Any) -> None:
    shape = (1, 64) if name.endswith("-1d") else (1, 8, 8)
    model = make_model(name, ModelOptions(shape=shape))
    splitter = make_splitter(model.layout, kind, levels, depth)
    for level in range(levels):
        piece = splitter.slice(model.layout, level, 0)
        small = submodel(model.template, model.layout, piece)
        small.load_state_dict(piece.take(model.initial))
        small(torch.randn(3, *shape)).sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
        assert {n: tuple(v.shape) for n, v in small.state_dict().items()} == dict(piece.shapes)


def test_a_rolling_window_can_be_trained() -> None:
    from incofl.split import Splitter

    model = make_model("tiny-resnet", ModelOptions(shape=(1, 8, 8)))
    piece = Splitter((0.5,), ((2, 2),), "rolling").slice(model.layout, 0, 13)
    small = submodel(model.template, model.layout, piece)
    small.load_state_dict(piece.take(model.initial))
    assert small(torch.randn(3, 1, 8, 8)).shape == (3, 10)


def test_sizes_that_modules_remember_are_adjusted() -> None:
    model = make_model("resnet26", ModelOptions(shape=(1, 8, 8)))
    piece = make_splitter(model.layout, "hetero", 5).slice(model.layout, 0, 0)
    small = submodel(model.template, model.layout, piece)
    assert small.get_submodule("fc").in_features == 32
    assert small.get_submodule("layer2.0.conv1").out_channels == 8
    assert small.get_submodule("layer2.0.conv1").in_channels == 4
    assert small.get_submodule("layer2.0.bn1").num_features == 8
