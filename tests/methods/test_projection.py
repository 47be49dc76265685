"""MOON's projection: layers that a method adds to the server model."""

from pathlib import Path

import pytest
import torch

import incofl
from incofl.config import make_config
from incofl.engine.build import build_model, build_splitter
from incofl.methods.moon import with_features
from incofl.split import submodel
from tests.federations import run_rounds, tiny_config, tiny_federation


@pytest.mark.parametrize(("model", "head"), [("resnet26", "fc"), ("tiny-mlp", "head")])
def test_shapes(model: str, head: str) -> None:
    """Linear(F, F), ReLU, Linear(F, 256), head on 256; all other entries are as without, weights included."""
    plain, projected = (
        build_model(make_config({}, ["method=heteromoon", f"model.name={model}", f"moon.projection={size}"]))
        for size in (0, 256)
    )
    classes, features = plain.layout.shapes[f"{head}.weight"]
    added = {
        f"{head}.0.weight": (features, features),
        f"{head}.0.bias": (features,),
        f"{head}.2.weight": (256, features),
        f"{head}.2.bias": (256,),
        f"{head}.3.weight": (classes, 256),
        f"{head}.3.bias": (classes,),
    }
    others = {name: shape for name, shape in plain.layout.shapes.items() if not name.startswith(f"{head}.")}
    assert projected.layout.shapes == others | added
    assert {name: tuple(value.shape) for name, value in projected.initial.items()} == others | added
    assert all(torch.equal(plain.initial[name], projected.initial[name]) for name in others)
    assert {name: projected.layout.axes[name] for name in others} == {n: plain.layout.axes[n] for n in others}
    assert projected.layout.shallow == plain.layout.shallow
    assert projected.layout.buffers == plain.layout.buffers
    assert projected.layout.stages == plain.layout.stages


def test_without_it_the_model_is_the_usual_one() -> None:
    moon, plain = (build_model(make_config({}, [f"method={name}"])) for name in ("heteromoon", "heteroavg"))
    assert moon.layout == plain.layout
    assert all(torch.equal(moon.initial[name], plain.initial[name]) for name in plain.initial)
    ignored = build_model(make_config({}, ["method=heteroavg", "moon.projection=256"]))
    assert ignored.layout == plain.layout


def test_width_splitting_narrows_it() -> None:
    """Half the channels of 16 features and of 6 projected ones; the small network is a network."""
    config = tiny_config("method=heteromoon", "model.width=1", "split.kind=hetero", "moon.projection=6")
    model = build_model(config)
    piece = build_splitter(config, model).slice(model.layout, 1, 0)
    shapes = {name: shape for name, shape in piece.shapes.items() if name.startswith("fc.")}
    assert shapes == {
        "fc.0.weight": (8, 8),
        "fc.0.bias": (8,),
        "fc.2.weight": (3, 8),
        "fc.2.bias": (3,),
        "fc.3.weight": (10, 3),
        "fc.3.bias": (10,),
    }
    small = submodel(model.template, model.layout, piece).eval()
    small.load_state_dict(piece.take(model.initial))
    logits, z = with_features(small, torch.randn(5, 1, 8, 8))
    assert (logits.shape, z.shape) == ((5, 10), (5, 3))
    assert torch.equal(logits, small.get_submodule("fc.3")(z))


@pytest.mark.parametrize("split", ["stage", "hetero"])
def test_runs_and_loads(split: str, tmp_path: Path) -> None:
    """On digits; the contrastive term acts on projected features and trains the projection."""
    settings = ["method=incomoon", f"split.kind={split}", "moon.projection=16", "data.clients=4", "rounds=2"]
    summary = incofl.run(tiny_config(*settings, "eval.every=2"), tmp_path)
    assert summary["rejected"] == 0
    model = incofl.load_model(tmp_path, 0)
    assert isinstance(model.get_submodule("fc"), torch.nn.Sequential)
    with_it, without = (
        run_rounds(tiny_federation(*settings, f"moon.mu={mu}"), 2)[-1].shared["fc.2.weight"] for mu in (1, 0)
    )
    assert not torch.equal(with_it, without)
