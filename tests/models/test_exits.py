"""ResNets with early exits, and how they are split."""

import functools

import pytest
import torch

from incofl.errors import ConfigError, LayoutError
from incofl.methods.scalefl import ExitRule, ScaleFL, exit_positions
from incofl.models import MODELS, Extend, ModelOptions, make_model
from incofl.models.resnet import ResNet
from incofl.split import submodel

# Millions of parameters of the five levels, by the number of convolutions in an exit.
MILLIONS = {
    0: (0.37, 0.96, 1.54, 4.52, 17.46),
    1: (0.44, 1.32, 2.19, 6.59, 21.15),
    3: (0.58, 2.04, 3.49, 10.74, 28.53),
}


def exits(levels: int, convolutions: int = 3) -> Extend:
    """Adds an exit for each level to a new model, as ScaleFL does."""
    return functools.partial(ExitRule(options=ScaleFL(head_convs=convolutions)).extend, levels=levels)


def test_positions() -> None:
    assert exit_positions(12, 5) == (5, 7, 8, 10, 12)
    assert exit_positions(4, 3) == (2, 3, 4)
    assert exit_positions(12, 1) == (12,)
    with pytest.raises(LayoutError, match=r"split.levels: got 5 levels, expected fewer: the model has only 4 blocks"):
        exit_positions(4, 5)


@pytest.mark.parametrize("convs", [0, 1, 3])
def test_sizes_of_the_levels(convs: int) -> None:
    model = make_model("resnet26", extend=exits(5, convs))
    splitter = ExitRule().splitter(model.layout, "hetero", 5)
    for level, millions in enumerate(MILLIONS[convs]):
        shapes = splitter.slice(model.layout, level, 0).shapes
        size = sum(torch.Size(s).numel() for n, s in shapes.items() if n in model.layout.parameters)
        assert size / 1e6 == pytest.approx(millions, rel=0.03)  # the table rounds widths down


def test_the_trunk_starts_as_without_exits() -> None:
    plain, other = (
        make_model("resnet26", ModelOptions(width=0.125)),
        make_model("resnet26", ModelOptions(width=0.125), extend=exits(5)),
    )
    assert all(torch.equal(plain.initial[name], other.initial[name]) for name in plain.initial)
    assert plain.layout.shallow == other.layout.shallow
    assert plain.layout.first_same_shape == other.layout.first_same_shape


@pytest.mark.parametrize("level", range(5))
def test_a_level_gives_the_logits_of_its_exits(level: int) -> None:
    """All of them in training, the last one in evaluation; and no gradient is lost."""
    model = make_model("resnet26", ModelOptions(width=0.125), extend=exits(5))
    splitter = ExitRule().splitter(model.layout, "hetero", 5)
    piece = splitter.slice(model.layout, level, 0)
    module = submodel(model.template, model.layout, piece)
    module.load_state_dict(piece.take(model.initial))
    assert isinstance(module, ResNet)
    x = torch.randn(4, 3, 32, 32)
    heads = module.train()(x)
    assert [tuple(logits.shape) for logits in heads] == [(4, 10)] * (level + 1)
    sum(logits.sum() for logits in heads).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert torch.is_tensor(module.eval()(x))


def test_the_largest_level_is_the_whole_model() -> None:
    model = make_model("tiny-resnet", ModelOptions(shape=(1, 8, 8)), extend=exits(3))
    piece = ExitRule().splitter(model.layout, "hetero", 3).slice(model.layout, 2)
    assert {name: tuple(value.shape) for name, value in model.initial.items()} == dict(piece.shapes)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_exits(name: str) -> None:
    texts, signals = ModelOptions(shape=(7,), vocabulary=5), ModelOptions(shape=(9, 64), width=0.125)
    options = {"texts": texts, "signals": signals}.get(MODELS[name].input, ModelOptions(width=0.125))
    exits_of = make_model(name, options, extend=exits(3)).layout.exits
    assert len(set(exits_of.values())) == 3
    assert list(exits_of)[:2] == ["exits.0", "exits.1"]


def test_a_model_without_blocks_has_none() -> None:
    with pytest.raises(ConfigError, match="cannot have early exits, expected blocks, an axis of classes"):
        make_model("tests.own_models:without_blocks", ModelOptions(shape=(1, 8, 8)), extend=exits(3))
