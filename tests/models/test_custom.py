"""Models of the user's own, from the name in a config to the trained module."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import incofl
from incofl.errors import ConfigError, IncoflError
from incofl.models import ModelOptions, make_model
from tests.federations import TINY, run_rounds, tiny_federation

OPTIONS = ModelOptions(shape=(1, 8, 8))
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module into the current directory, which is not on the path; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    written: list[str] = []

    def write(text: str) -> str:
        name = f"own_{tmp_path.name}_{len(written)}".replace("-", "_")
        written.append(name)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def run(name: str, *settings: str, resume: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint after a run."""
    values = {**TINY, "model": {"name": name}, "method": "incoavg"}
    folder = f"runs/{name.replace(':', '-')}{len(settings)}"
    incofl.run(incofl.make_config(values, settings), folder, resume=resume)
    return load_file(f"{folder}/checkpoint/state.safetensors")


def test_a_run_without_a_layout_equals_one_with_a_layout_by_hand(write: Any) -> None:
    """Bit for bit, in this process and in workers that must find the module themselves, and when resumed."""
    name = write(EXAMPLE.read_text())
    inferred = run(f"{name}:inferred")
    for other in (run(f"{name}:by_hand"), run(f"{name}:inferred", "engine.workers=2")):
        assert inferred.keys() == other.keys()
        assert all(torch.equal(value, other[entry]) for entry, value in inferred.items())
    run(f"{name}:by_hand", "rounds=2", "engine.workers=1")
    resumed = run(f"{name}:by_hand", "rounds=3", "engine.workers=1", resume=True)
    assert all(torch.equal(value, resumed[entry]) for entry, value in inferred.items())
    module = incofl.load_model(f"runs/{name}-inferred0")
    assert all(torch.equal(value, inferred[f"shared/{entry}"]) for entry, value in module.state_dict().items())


def test_the_command_line_finds_a_module_of_the_current_directory(write: Any, tmp_path: Path) -> None:
    name = write(EXAMPLE.read_text())
    path = str(Path(incofl.__file__).parents[1])
    command = [sys.executable, "-P", "-m", "incofl", "plan", "--model", f"{name}:inferred"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{name}:inferred at width 1, layer splitting" in done.stdout


def test_initial_weights_follow_the_seed(write: Any) -> None:
    name = write(EXAMPLE.read_text())
    before = torch.random.get_rng_state()
    one, same, other = (make_model(f"{name}:by_hand", OPTIONS, seed=seed).initial["1.weight"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_factory_gets_what_it_names(write: Any) -> None:
    layers = "nn.Flatten(), nn.Linear(64, dim), nn.Linear(dim, classes)"
    name = write(f"from torch import nn\ndef make(classes, dim=8): return nn.Sequential({layers})")
    options = ModelOptions(shape=(1, 8, 8), classes=7, dim=6)
    assert make_model(f"{name}:make", options).layout.shapes["2.weight"] == (7, 6)


SOURCE = """
from torch import nn
number = 3
def fails(): raise ValueError("no luck")
def nothing(): return None
def wide(classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, 2 * classes))
def crooked(): return nn.Linear(5, 10)
def asks(frequency): return nn.Linear(5, 10)
def deep(depth): return nn.Linear(5, 10)
"""


@pytest.mark.parametrize(
    ("factory", "line"),
    [
        ("wyde", "model.name: {} has no 'wyde'; did you mean 'wide'?"),
        ("number", "model.name: {}:number is of type int, expected a function or class"),
        ("fails", "model.name: {}:fails failed: ValueError: no luck"),
        (
            "nothing",
            "model.name: {}:nothing returned NoneType, expected a module, or a pair of a module and its Layout",
        ),
        ("wide", "model.name: {}:wide gives (3, 20) for a batch of 3, expected logits (3, 10)"),
        ("crooked", "model.name: {}:crooked fails on a batch of shape (3, 1, 8, 8): RuntimeError: "),
        ("asks", "model.name: {}:asks needs 'frequency': set model.options.frequency, or give it a default"),
        ("deep", "model.name: {}:deep needs 'depth': set model.depth, or give it a default"),
        ("", "model.name: got '{}:', expected package.module:attribute"),
    ],
)
def test_what_is_wrong_with_a_factory(write: Any, factory: str, line: str) -> None:
    name = write(SOURCE)
    with pytest.raises(ConfigError) as caught:
        make_model(f"{name}:{factory}", OPTIONS)
    assert str(caught.value).startswith(line.format(name))


def test_whole_numbers_that_a_layer_cannot_take_are_refused() -> None:
    """On the meta device a linear layer takes anything; tokens for an embedding are fine."""
    whole = ModelOptions(classes=3, inputs=torch.zeros(20, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"Long and Float; whole numbers reach a model as tokens: .* x.float\(\)"):
        make_model(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)), whole)
    tokens = nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(160, 32), nn.ReLU(), nn.Linear(32, 3))
    assert make_model(tokens, whole).layout.parameters


def test_what_is_wrong_with_a_module(write: Any) -> None:
    with pytest.raises(ConfigError, match="there is no module 'nowhere' in the current directory or among the inst"):
        make_model("nowhere.at_all:make", OPTIONS)
    name = write("import nowhere")
    with pytest.raises(ConfigError, match=f"{name} cannot be imported: ModuleNotFoundError: No module named 'nowhere'"):
        make_model(f"{name}:make", OPTIONS)


def test_settings_that_a_factory_does_not_take_are_refused(write: Any) -> None:
    name = write(SOURCE)
    with pytest.raises(ConfigError, match=f"model.depth: got 3, but {name}:wide has no parameter 'depth'"):
        make_model(f"{name}:wide", ModelOptions(shape=(1, 8, 8), depth=3))


def test_options_of_a_factory(write: Any) -> None:
    """They are keyword arguments, replace what the data say, and may be anything that the factory takes."""
    layers = "nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes)"
    name = write(
        "from torch import nn\n"
        f"def plain(classes, hidden=8): return nn.Sequential({layers})\n"
        "def open(classes, **options): return plain(classes, **options)\n"
    )
    for factory in ("plain", "open"):
        model = make_model(f"{name}:{factory}", ModelOptions(shape=(1, 8, 8), options={"hidden": 6, "classes": 10}))
        assert model.layout.shapes["3.weight"] == (10, 6)
    with pytest.raises(ConfigError) as caught:
        make_model(f"{name}:plain", ModelOptions(shape=(1, 8, 8), options={"hiden": 6}))
    assert str(caught.value) == f"model.options.hiden: {name}:plain has no parameter 'hiden'; did you mean 'hidden'?"


def test_the_output_can_be_anything_where_the_task_is_not_to_classify(write: Any) -> None:
    name = write(
        "from torch import nn\n"
        "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))\n"
        "def classify(classes): return make()\n"
    )
    for options in (ModelOptions(shape=(1, 8, 8), logits=False), ModelOptions(shape=(1, 8, 8), classes=0)):
        assert make_model(f"{name}:make", options).layout.shapes["3.weight"] == (2, 8)
    with pytest.raises(ConfigError, match=r"gives \(3, 2\) for a batch of 3, expected logits \(3, 10\)"):
        make_model(f"{name}:make", OPTIONS)
    with pytest.raises(
        ConfigError, match=f"{name}:classify needs 'classes': set model.options.classes, or give it a d"
    ):
        make_model(f"{name}:classify", ModelOptions(shape=(1, 8, 8), classes=0))


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("head_first", "incomoon"),  # whose sub-models end in a block that was left out
        ("head_first", "heterofl"),  # a batch norm without scale
        ("volumes", "incoavg"),  # no channels-last layout
        ("without_blocks", "heterofl"),
    ],
)
def test_unusual_models_train(model: str, method: str) -> None:
    first, *_, last = run_rounds(tiny_federation(f"model.name=tests.own_models:{model}", f"method={method}"), 2)
    assert any(not torch.equal(value, first.shared[name]) for name, value in last.shared.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["split.kind=layer"], "split.kind"),
        (["method=inclusivefl", "split.kind=hetero"], "inclusivefl needs a model with blocks"),
    ],
)
def test_a_model_without_blocks_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(IncoflError, match=message):
        tiny_federation("model.name=tests.own_models:without_blocks", *settings).start()


@pytest.mark.parametrize("method", ["heterofl", "inclusivefl"])
def test_a_layout_without_classes_is_refused(method: str) -> None:
    """Rather than that label rows, or heads of one's own, silently mean nothing."""
    federation = tiny_federation(f"method={method}", "model.name=tiny-mlp")
    layout = federation.model.layout
    bare = dataclasses.replace(
        layout,
        axes={n: tuple(a if a and a.name != "classes" else None for a in axes) for n, axes in layout.axes.items()},
    )
    nameless = dataclasses.replace(federation, model=dataclasses.replace(federation.model, layout=bare))
    with pytest.raises(ConfigError, match="needs an axis named 'classes'"):
        nameless.check()
