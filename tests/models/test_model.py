"""Modules as server models: values, flags and inputs are kept, and the module of the user is not changed."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import incofl
from incofl.client import LocalSettings
from incofl.costs import costs
from incofl.errors import ConfigError, LayoutError
from incofl.layout import Layout
from incofl.models import ModelOptions, as_model, make_model
from incofl.models.model import shapes_of
from incofl.models.pretrained import with_pretrained
from incofl.split import make_splitter, submodel
from incofl.tensors import Inputs, call, map_inputs
from tests.federations import tiny_config
from tests.own_models import HeadFirst, TwoTowers

IMAGES = torch.rand(5, 1, 8, 8)
PAIR = {"image": torch.rand(5, 1, 8, 8), "words": torch.randint(0, 9, (5, 6))}


def flags(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def half_frozen() -> nn.Module:
    module = HeadFirst(64, 10, 3)
    module.stem.requires_grad_(False)
    module.blocks[1].requires_grad_(False)
    return module


def test_a_module_of_the_user_keeps_its_values_and_is_not_changed() -> None:
    module = half_frozen()
    before, random = copy.deepcopy(module), torch.random.get_rng_state()
    model = as_model(module, None, IMAGES)
    for found in (module.state_dict(), model.initial):
        assert all(torch.equal(found[name], value) for name, value in before.state_dict().items())
    assert flags(module) == flags(before) == flags(model.template)
    assert module.training
    assert all(value.is_meta for value in model.template.state_dict().values())
    assert all(not value.is_meta and not value.requires_grad for value in model.initial.values())
    assert torch.equal(random, torch.random.get_rng_state())
    model.initial["head.bias"].fill_(7.0)
    assert not (module.head.bias == 7.0).any()  # type: ignore[union-attr]
    assert as_model(module, model.layout, IMAGES).layout is model.layout


def test_buffers_outside_of_the_state_keep_their_values() -> None:
    module = HeadFirst(64, 10, 2)
    module.stem.register_buffer("table", torch.arange(4.0), persistent=False)
    template = as_model(module, None, IMAGES).template
    assert torch.equal(template.get_buffer("stem.table"), torch.arange(4.0))


@pytest.mark.parametrize("inputs", [PAIR, tuple(PAIR.values())], ids=["dict", "tuple"])
def test_inputs_of_several_tensors(inputs: Inputs) -> None:
    """The layout is inferred, examples have the same structure, and sub-models run on them."""
    model = as_model(TwoTowers(9, 10), None, inputs)
    batch = model.example(2)
    assert shapes_of(batch) == shapes_of(map_inputs(lambda x: x[:2], inputs))
    assert type(batch) is type(inputs)
    values = batch.values() if isinstance(batch, dict) else batch
    assert [(value.dtype, value.is_meta) for value in values] == [(torch.float32, True), (torch.int64, True)]
    assert model.layout.stages == (("blocks.0", "blocks.1", "blocks.2"),)
    for kind in ("layer", "hetero"):
        piece = make_splitter(model.layout, kind, 2).slice(model.layout, 0, 0)
        module = submodel(model.template, model.layout, piece)
        module.load_state_dict(piece.take(model.initial))
        assert call(module, inputs).shape == (5, 10)


def test_a_factory_for_inputs_of_several_tensors() -> None:
    one = map_inputs(lambda x: x[0].to("meta"), PAIR)
    options = ModelOptions(classes=4, inputs=one, options={"vocabulary": 9})
    model = make_model("tests.own_models:two_towers", options)
    assert shapes_of(model.example(3)) == {"image": (3, 1, 8, 8), "words": (3, 6)}
    assert model.layout.shapes["head.weight"] == (4, 16)
    with pytest.raises(ConfigError, match=r"fails on a batch of shape \(3, 3, 32, 32\): TypeError: "):
        make_model("tests.own_models:two_towers", ModelOptions(options={"vocabulary": 9}))


def test_a_layout_of_another_module_is_refused() -> None:
    module = HeadFirst(64, 10, 3)
    layout = as_model(module, None, IMAGES).layout
    with pytest.raises(LayoutError, match=r"'head.weight' has shape \(10, 16\), but \(7, 16\) in the given HeadFirst"):
        as_model(HeadFirst(64, 7, 3), layout, IMAGES)
    with pytest.raises(LayoutError, match=r"'blocks.3.0.weight' has shape None, but \(16, 16\) in the given HeadFirst"):
        as_model(HeadFirst(64, 10, 4), layout, IMAGES)


def test_layers_of_a_method_are_added_to_a_copy() -> None:
    module = HeadFirst(64, 10, 3)

    def extend(model: nn.Module, layout: Layout) -> Layout:
        model.added = nn.Linear(2, 2)
        return Layout.of(model, layout.axes, layout.stages, layout.shallow)

    options, random = ModelOptions(shape=(1, 8, 8)), torch.random.get_rng_state()
    one, same, other = (make_model(module, options, extend=extend, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.initial["added.weight"], same.initial["added.weight"])
    assert not torch.equal(one.initial["added.weight"], other.initial["added.weight"])
    assert not hasattr(module, "added")
    assert torch.equal(random, torch.random.get_rng_state())


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    """In what a factory makes, and with other initial weights."""

    def factory() -> nn.Module:
        return half_frozen()

    model = make_model(factory, ModelOptions(shape=(1, 8, 8)))
    assert flags(model.template) == flags(half_frozen())
    save_file({name: value + 1 for name, value in model.initial.items()}, tmp_path / "weights.safetensors")
    loaded = with_pretrained(model, str(tmp_path / "weights.safetensors"))
    assert flags(loaded.template) == flags(half_frozen())
    assert torch.equal(loaded.initial["stem.weight"], model.initial["stem.weight"] + 1)


class OnTheCpu(HeadFirst):
    """Makes a tensor without saying on which device, so that it cannot run on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        """Adds a fixed table to the input."""
        return super().forward(x + torch.tensor([0.5] * 8))


def test_models_that_cannot_run_on_the_meta_device() -> None:
    random = torch.random.get_rng_state()
    module = OnTheCpu(64, 10, 3)
    with pytest.raises(Exception, match="meta"):
        copy.deepcopy(module).to("meta")(IMAGES.to("meta"))
    torch.random.set_rng_state(random)
    plain = as_model(HeadFirst(64, 10, 3), None, IMAGES)
    assert as_model(module, None, IMAGES).layout == plain.layout
    assert make_model(lambda: OnTheCpu(64, 10, 3), ModelOptions(shape=(1, 8, 8))).layout == plain.layout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"classes": 0},
            "model.name: got 'resnet10', expected a model of your own: the number of classes is not known",
        ),
        ({"shape": (12,)}, "model.name: got 'resnet10', which reads images, expected a model of your own"),
        ({"inputs": (torch.rand(2), torch.rand(3))}, "which reads images, expected a model of your own"),
        ({"options": {"drop": 1}}, "model.options.drop: resnet10 has no parameter 'drop'"),
    ],
)
def test_built_in_models_refuse_what_they_cannot_use(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_model("resnet10", ModelOptions(**options))
    assert words in str(caught.value)


class LooksAtValues(HeadFirst):
    """Cannot run without values, on whatever device."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the input, or of its opposite."""
        return super().forward(x if float(x.sum()) >= 0 else -x)


@pytest.mark.parametrize("kind", [OnTheCpu, LooksAtValues])
@pytest.mark.parametrize("method", ["incoavg", "heterofl"])
def test_they_cost_the_same_and_train(kind: type[HeadFirst], method: str, tmp_path: Path) -> None:
    plain = as_model(HeadFirst(64, 10, 3), None, IMAGES)
    model = as_model(kind(64, 10, 3), plain.layout, IMAGES)
    splitter = make_splitter(plain.layout, "layer", 3)
    assert costs(model, splitter, LocalSettings()) == costs(plain, splitter, LocalSettings())
    config = tiny_config(f"method={method}", "rounds=1")
    assert incofl.run(config, tmp_path, model=(kind(64, 10, 3), plain.layout))["rounds"] == 1
