"""Models of texts: what is padding, what is the future, and that a slice is the small network itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from incofl.client import LocalSettings
from incofl.costs import activation_bytes, costs, count_macs, unroll
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.models import Model, ModelOptions, make_model
from incofl.models.stacks import StackedLstm, TextTransformer
from incofl.models.vit import Attention
from incofl.split import Splitter, make_splitter, submodel

TEXTS = ModelOptions(shape=(12,), classes=3, vocabulary=20)
SEQUENCES = ModelOptions(shape=(12,), classes=20, vocabulary=20, sequence=True)
NAMES = ["tiny-lstm", "tiny-transformer"]


def made(name: str, options: ModelOptions) -> nn.Module:
    """The whole network with its values."""
    model = make_model(name, options, seed=1)
    return part_of(model, make_splitter(model.layout, "layer", [len(model.layout.blocks)]), 0)[0]


def part_of(model: Model, splitter: Any, level: int, round: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    piece = splitter.slice(model.layout, level, round)
    module, state = submodel(model.template, model.layout, piece), piece.take(model.initial)
    module.load_state_dict(state)
    return module.eval(), state


def tokens(rows: int = 4, low: int = 1) -> Tensor:
    return torch.randint(low, 20, (rows, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
class TestBoth:
    def test_padding_does_not_matter(self, name: str) -> None:
        """A text of seven tokens has the logits that it has without padding, alone or beside a longer one."""
        model, x = made(name, TEXTS), tokens()
        x[1, 7:] = 0
        logits = model(x)
        assert logits.shape == (4, 3)
        assert torch.allclose(logits[1], model(x[1:2, :7])[0], atol=1e-6)
        y = x.clone()
        y[1, 7] = 5
        assert not torch.allclose(logits[1], model(y)[1], atol=1e-3)

    def test_an_empty_text_is_finite(self, name: str) -> None:
        model = made(name, TEXTS).train()
        logits = model(torch.zeros(2, 12, dtype=torch.long))
        logits.sum().backward()
        assert torch.isfinite(logits).all()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    def test_a_position_does_not_see_what_follows(self, name: str) -> None:
        model, x = made(name, SEQUENCES), tokens(low=0)
        y = x.clone()
        y[:, 8:] = (y[:, 8:] + 1) % 20
        before, after = model(x), model(y)
        assert before.shape == (4, 20, 12)
        assert torch.allclose(before[:, :, :8], after[:, :, :8], atol=1e-6)
        assert not torch.allclose(before[:, :, 8:], after[:, :, 8:], atol=1e-3)
        z = x.clone()
        z[:, 0] = (z[:, 0] + 1) % 20
        assert not torch.allclose(before[:, :, 7], model(z)[:, :, 7], atol=1e-6)  # but what is before

    @pytest.mark.parametrize("options", [TEXTS, SEQUENCES])
    def test_layer_splitting_gives_the_shallow_network(self, name: str, options: ModelOptions) -> None:
        model = make_model(name, options, seed=1)
        for level, depth in enumerate((2, 3)):
            module, state = part_of(model, make_splitter(model.layout, "layer", [2, 3]), level)
            direct = direct_network(name, options, depth, 16, 2)
            direct.load_state_dict(state)
            assert torch.equal(module(tokens()), direct.eval()(tokens()))

    @pytest.mark.parametrize("options", [TEXTS, SEQUENCES])
    @pytest.mark.parametrize(("level", "dim"), list(enumerate([8, 16])))
    def test_hetero_splitting_gives_the_narrow_network(
        self, name: str, options: ModelOptions, level: int, dim: int
    ) -> None:
        """Half of a network of 16 channels and 2 heads of 8 is one of 8 channels and one head of 8."""
        model = make_model(name, options, seed=1)
        module, state = part_of(model, make_splitter(model.layout, "hetero", 2), level)
        direct = direct_network(name, options, len(model.layout.blocks), dim, dim // 8)
        direct.load_state_dict(state)
        assert torch.equal(module(tokens()), direct.eval()(tokens()))

    def test_a_rolling_window_and_scaled_depth_can_be_trained(self, name: str) -> None:
        model = make_model(name, SEQUENCES)
        rolling = Splitter((0.3, 1.0), (model.layout.depth,) * 2, "rolling")
        for splitter in (rolling, make_splitter(model.layout, "hetero", 5, "scaled")):
            module, state = part_of(model, splitter, 0, round=7)
            module.train()(tokens()).sum().backward()
            assert {n: v.shape for n, v in module.state_dict().items()} == {n: v.shape for n, v in state.items()}
            assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())

    def test_width_multiplies_and_depth_is_free(self, name: str) -> None:
        options = ModelOptions(shape=(12,), classes=3, vocabulary=20, width=0.5, depth=5, dim=32)
        layout = make_model(name, options).layout
        assert layout.shapes["head.weight"] == (3, 16)
        assert len(layout.blocks) == 5

    def test_images_are_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"got '{name}', which reads texts, expected one for images: resnet10"):
            make_model(name, ModelOptions())


def direct_network(name: str, options: ModelOptions, depth: int, dim: int, heads: int) -> nn.Module:
    if name == "tiny-lstm":
        return StackedLstm(options.vocabulary, options.classes, options.sequence, depth=depth, dim=dim)
    text = (12,), options.vocabulary, options.classes, options.sequence
    return TextTransformer(*text, depth=depth, dim=dim, heads=heads)


def test_models_of_images_refuse_texts() -> None:
    with pytest.raises(ConfigError, match="which reads images, expected one for texts: lstm, text-transformer"):
        make_model("resnet10", TEXTS)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match=r"model.heads: got 3, expected a divisor of the model's width, 16"):
        make_model("tiny-transformer", ModelOptions(shape=(12,), vocabulary=20, heads=3))


def test_an_lstm_by_hand() -> None:
    """One narrowed layer, step by step: h = o tanh(c), c = f c + i g, with gates i, f, g, o one after the other."""
    model = make_model("tiny-lstm", SEQUENCES, seed=1)
    w = model.initial
    rows = torch.cat([torch.arange(gate * 16, gate * 16 + 8) for gate in range(4)])  # the first half of each gate
    module, _ = part_of(model, Splitter((0.5,), ((1,),)), 0)
    x = tokens()
    embedded = w["embedding.weight"][x][:, :, :8]
    h = c = torch.zeros(4, 8)
    prefix = "layers.0.lstm"
    for t in range(12):
        gates = embedded[:, t] @ w[f"{prefix}.weight_ih_l0"][rows, :8].T + w[f"{prefix}.bias_ih_l0"][rows]
        gates = gates + h @ w[f"{prefix}.weight_hh_l0"][rows, :8].T + w[f"{prefix}.bias_hh_l0"][rows]
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        logits = (embedded[:, t] + h) @ w["head.weight"][:, :8].T + w["head.bias"]
        assert torch.allclose(module(x)[:, :, t], logits, atol=1e-5)


def test_attention_by_hand() -> None:
    """One head of two kept: softmax(q k / sqrt(d)) v over what is no padding."""
    torch.manual_seed(0)
    attention = Attention(8, 1, 8)
    x = torch.randn(1, 5, 8)
    mask = torch.tensor([True, True, True, False, False])
    q, k, v = attention.qkv(x)[0].chunk(3, 1)
    weights = (q @ k[:3].T / 8**0.5).softmax(1)
    expected = attention.proj(weights @ v[:3])
    assert torch.allclose(attention(x, mask[None, None, None])[0], expected, atol=1e-6)


class TestPairs:
    def test_lstm(self) -> None:
        """Both matrices of later layers with those of the first; the same rule as across blocks."""
        layout = make_model("tiny-lstm", TEXTS).layout
        assert layout.shallow == layout.across_blocks
        assert layout.shallow["layers.2.lstm.weight_hh_l0"] == "layers.0.lstm.weight_hh_l0"
        assert len(layout.shallow) == 4

    def test_transformer(self) -> None:
        """The paper's rule: in each block the second norm with the first."""
        layout = make_model("tiny-transformer", TEXTS).layout
        assert layout.shallow == {f"blocks.{b}.norm2.weight": f"blocks.{b}.norm1.weight" for b in range(4)}
        assert layout.across_blocks["blocks.3.attn.qkv.weight"] == "blocks.0.attn.qkv.weight"


def axis_names(layout: Layout, name: str) -> list[str | None]:
    return [None if axis is None else axis.name for axis in layout.axes[name]]


def test_axes() -> None:
    lstm, transformer = (make_model(name, TEXTS).layout for name in NAMES)
    assert axis_names(lstm, "layers.1.lstm.weight_ih_l0") == ["stream", "stream"]
    assert axis_names(lstm, "embedding.weight") == [None, "stream"]
    assert axis_names(transformer, "blocks.1.attn.qkv.weight") == ["blocks.1.heads", "stream"]
    assert axis_names(transformer, "blocks.1.attn.proj.weight") == ["stream", "blocks.1.heads"]
    for layout in (lstm, transformer):
        assert layout.named_axes["classes"].fixed
        assert not layout.buffers
        assert not [name for name, axes in layout.axes.items() if all(axis is None for axis in axes)]


class TestCosts:
    def test_by_hand(self) -> None:
        """Per position 4 (in + hidden) hidden for a layer, and dim x classes for the head at each of 12 positions."""
        model = make_model("tiny-lstm", SEQUENCES)
        found = costs(model, make_splitter(model.layout, "layer", 3), LocalSettings())
        head = 12 * 16 * 20
        assert [cost.macs for cost in found] == [12 * layers * 4 * (16 + 16) * 16 + head for layers in (1, 2, 3)]
        embedding, layer = 20 * 16, 4 * 16 * (16 + 16) + 2 * 4 * 16
        assert [cost.parameters for cost in found] == [embedding + n * layer + 16 * 20 + 20 for n in (1, 2, 3)]
        narrow = costs(model, make_splitter(model.layout, "hetero", [0.5]), LocalSettings())
        assert narrow[0].macs == 12 * 3 * 4 * (8 + 8) * 8 + 12 * 8 * 20

    def test_all_positions_at_once_cost_as_much_as_one_after_the_other(self) -> None:
        """In operations and in what is kept for the backward pass, also of layers that a user stacks."""
        for lstm in (
            nn.LSTM(6, 5, batch_first=True),
            nn.LSTM(6, 5, num_layers=2),
            nn.LSTM(6, 5, bias=False),
        ):
            module, x = lstm.to("meta"), torch.empty(3, 7, 6, device="meta")
            shapes = [tensor.shape for tensor in (module(x)[0], *module(x)[1])]
            before = count_macs(module, x), activation_bytes(module, x)
            unroll(module)
            assert [tensor.shape for tensor in (module(x)[0], *module(x)[1])] == shapes
            assert count_macs(module, x) == before[0]
            assert activation_bytes(module, x) == pytest.approx(before[1], rel=0.2)

    def test_built_in_models_exactly(self) -> None:
        model = make_model("tiny-lstm", SEQUENCES)
        stepwise = activation_bytes(model.template, model.example(3))
        unroll(model.template)
        assert activation_bytes(model.template, model.example(3)) == stepwise
