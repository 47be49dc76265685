"""An identity start: all levels compute one function before the first round."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from incofl.config import Config
from incofl.engine.build import build
from incofl.engine.federation import Federation
from incofl.errors import ConfigError
from incofl.models.infer.closing import find_closing
from incofl.split import submodel
from incofl.tensors import call, map_inputs
from tests.federations import FAMILIES, family_config, tiny_config, tiny_federation
from tests.texts import write_shakespeare

START = "split.start=identity"


class Residual(nn.Module):
    """x plus some layers of it."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x)
        total: Tensor = x + (out[0] if isinstance(out, tuple) else out)
        return total


class Rows(nn.Module):
    """A model of the rows of an image, by blocks of one kind."""

    def __init__(self, kind: str, rows: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(rows, 12)
        self.blocks = nn.ModuleList(Residual(self.branch(kind)) for _ in range(3))
        self.head = nn.Linear(12, classes)

    def branch(self, kind: str) -> nn.Module:
        if kind == "gru":
            return nn.GRU(12, 12, batch_first=True)
        return nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def gru(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Rows("gru", shape[-1], classes)


def perceptrons(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Rows("mlp", shape[-1], classes)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_shakespeare(folder)
    return folder


def outputs(federation: Federation, level: int) -> Tensor:
    """What the sub-model of a level computes on a random batch, in float64."""
    module = federation.module(federation.start(), level).double()
    torch.manual_seed(0)

    def values(x: Tensor) -> Tensor:
        return torch.rand(x.shape, dtype=torch.float64) if x.is_floating_point() else torch.randint(1, 5, x.shape)

    made: Tensor = call(module, map_inputs(values, federation.model.example(4)))
    return made


def same_function(config: Config) -> list[bool]:
    """For each level but the smallest, whether it computes what the smallest does."""
    federation = build(config)
    first, *others = (outputs(federation, level) for level in range(len(federation.splitter.depths)))
    return [torch.equal(first, other) for other in others]


@pytest.mark.parametrize("model", [*FAMILIES, "tests.split.test_start:gru", "tests.split.test_start:perceptrons"])
def test_all_depths_are_one_function_bit_for_bit(model: str, texts: Path) -> None:
    assert all(same_function(family_config(model, texts, "split.levels=3", START)))
    assert not any(same_function(family_config(model, texts, "split.levels=3")))


@pytest.mark.parametrize("model", ["tiny-resnet", "tiny-resnet-1d", "tiny-mlp", "tiny-lstm"])
def test_all_widths_are_one_function(model: str, texts: Path) -> None:
    """To the last digits: sums of more terms, some of them zero, are added up in another order."""
    config = family_config(model, texts, "split.kind=hetero", "split.levels=[0.25,0.5,1.0]", START)
    federation = build(config)
    first, *others = (outputs(federation, level) for level in range(3))
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-12, atol=1e-12)
    random = build(family_config(model, texts, "split.kind=hetero", "split.levels=[0.25,0.5,1.0]"))
    assert not torch.allclose(outputs(random, 0), outputs(random, 2), rtol=1e-3)


def test_only_what_not_all_levels_hold_changes() -> None:
    before, after = tiny_federation(), tiny_federation(START)
    changed = {n for n, value in before.model.initial.items() if not torch.equal(value, after.model.initial[n])}
    assert changed == {"layer1.1.bn2.weight", "layer2.1.bn2.weight"}  # biases are zero already
    assert not any(after.model.initial[name].any() for name in changed)


def test_a_wider_channel_feeds_no_narrower_one() -> None:
    """Of eight channels, levels hold 2, 4 and 8: outputs of a level see inputs of that level only."""
    federation = tiny_federation("split.kind=hetero", "split.levels=[0.25,0.5,1.0]", "model.width=1", START)
    weight = federation.model.initial["layer1.1.conv1.weight"]
    assert weight.shape[:2] == (8, 8)
    first = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])
    alive = weight.flatten(2).abs().sum(2) > 0
    assert torch.equal(alive, first.view(1, -1) <= first.view(-1, 1))


@pytest.mark.parametrize("model", [name for name in FAMILIES if ":" not in name])
def test_built_in_layouts_name_what_trying_finds(model: str, texts: Path) -> None:
    federation = build(family_config(model, texts))
    layout = federation.model.layout
    module = submodel(federation.model.template, layout, federation.slice(len(federation.splitter.depths) - 1, 0))
    module.load_state_dict(federation.model.initial)
    example = map_inputs(lambda x: torch.ones(x.shape, dtype=x.dtype), federation.model.example(2))
    later = [block for _, *rest in layout.stages for block in rest]
    found = find_closing(module, later, example)
    assert found == {name: rows for name, rows in layout.closing.items() if layout.block_of[name] in later}
    assert found


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.name=tests.own_models:head_first"], "blocks.2 has no residual branch that can be closed"),
        (["method=fedrolex", "buffers=static"], "the channels of a level move every round"),
        (["model.name=tiny-vit", "model.patch=2", "split.kind=hetero"], "belongs to a norm over channels"),
        (["model.pretrained=nowhere.safetensors"], "expected 'random' with model.pretrained"),
    ],
)
def test_models_without_such_a_start_are_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=r"split\.start: got 'identity'") as line:
        build(tiny_config("split.levels=2", *overrides, START))
    assert reason in str(line.value)
