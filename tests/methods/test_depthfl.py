"""DepthFL, and early exits of any model."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import incofl
from incofl.client import ClientInput, Local, LocalSettings
from incofl.engine.federation import Federation
from incofl.errors import ConfigError, LayoutError
from incofl.layout import Axis
from incofl.methods.depthfl import DepthFL, depth_positions, mutual, risen
from incofl.methods.exits import Head, stream_after, tail
from incofl.models import ModelOptions, make_model
from incofl.split import submodel
from tests.federations import FAMILIES, family_config, run_rounds, tiny_config, tiny_federation
from tests.methods.test_battery import text_root as text_root
from tests.methods.test_identities import near, plain_fedavg, same


def module_of(federation: Federation, level: int) -> nn.Module:
    piece = federation.slice(level, 0)
    module = submodel(federation.model.template, federation.model.layout, piece)
    module.load_state_dict(piece.take(federation.model.initial))
    return module


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("model", ["tiny-resnet", "tiny-mlp"])
def test_one_exit_is_plain_fedavg(model: str) -> None:
    """Cross-entropy alone, on the model as it is."""
    settings = ["split.levels=1", "aggregate.precision=float64", f"model.name={model}"]
    federation = tiny_federation("method=depthfl", *settings)
    plain = tiny_federation("method=heteroavg", *settings)
    assert near(run_rounds(federation, 2)[-1].state(0), plain_fedavg(plain, rounds=2, cohort=4))


def test_lambda_rises() -> None:
    assert risen(0, 300) == pytest.approx(math.exp(-5))
    assert risen(150, 300) == pytest.approx(math.exp(-5 / 4))
    assert risen(300, 300) == risen(999, 300) == 1
    assert [DepthFL().for_run(rounds, 5).rise for rounds in (1000, 1)] == [300, 1]
    assert DepthFL(rise=7).for_run(1000, 5).rise == 7


def test_distillation_by_hand() -> None:
    """Two exits that say (3/4, 1/4) and (1/4, 3/4): each divergence is log 3 / 2; three exits weigh pairs by 1/2."""
    log3 = math.log(3)
    a, b = torch.tensor([[log3, 0.0]], requires_grad=True), torch.tensor([[0.0, log3]], requires_grad=True)
    loss = mutual([a, b])
    assert float(loss.detach()) == pytest.approx(2 * log3 / 2, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None  # softmax(a) - softmax(b): only as a student
    assert a.grad.flatten().tolist() == pytest.approx([0.5, -0.5], abs=1e-6)
    three = mutual([a.detach(), b.detach(), a.detach()])
    assert float(three) == pytest.approx(4 * log3 / 2 / 2, abs=1e-6)
    assert float(mutual([a.detach(), a.detach()])) == pytest.approx(0, abs=1e-7)


def test_the_loss_of_a_level_by_hand() -> None:
    """Cross-entropies of all exits and the divergences with lambda of the round, times the factor."""
    torch.manual_seed(0)
    logits, y = [torch.randn(4, 3) for _ in range(3)], torch.tensor([0, 1, 2, 1])

    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return logits

    local = Local(Fixed(), ClientInput({}, round=5), LocalSettings())
    probabilities = [o.softmax(1) for o in logits]
    losses = sum(float(-p[range(4), y].log().mean()) for p in probabilities)
    taught = sum(float((q * (q / p).log()).sum(1).mean()) for p in probabilities for q in probabilities)
    for factor in (1.0, 0.3, 0.0):
        loss = DepthFL(rise=10, distil=factor).loss(local, torch.zeros(1), y)
        assert float(loss) == pytest.approx(losses + factor * math.exp(-5 / 4) / 2 * taught, abs=1e-5)


def test_positions() -> None:
    layout = make_model("resnet26", ModelOptions(width=0.125)).layout
    assert depth_positions(layout, 4) == (3, 6, 9, 12)  # the ends of the stages
    assert depth_positions(layout, 5) == (2, 5, 7, 10, 12)
    assert depth_positions(layout, [1, 12]) == (1, 12)
    for levels in ([3, 2, 12], [1, 2], [0.5, 12], [0, 12]):
        with pytest.raises(LayoutError, match=r"split.levels: got .*, expected numbers of blocks from small to large"):
            depth_positions(layout, levels)
    with pytest.raises(LayoutError, match=r"split.levels: got 13 levels, expected fewer"):
        depth_positions(layout, 13)
    with pytest.raises(LayoutError, match=r"split.kind: got 'hetero', expected 'stage' or 'layer': exits leave"):
        tiny_federation("method=depthfl", "split.kind=hetero")


@pytest.mark.parametrize("method", ["depthfl", "scalefl"])
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.slow) if f == "tiny-lstm" else f for f in FAMILIES]
)
def test_every_family_has_exits(method: str, family: str, text_root: Path) -> None:
    """All logits in training, the last or their mean in evaluation; every parameter of a level is trained."""
    config = family_config(family, text_root, f"method={method}")
    federation = incofl.engine.build.build(config)
    x = federation.data.pipeline.test(federation.data.train.pick(slice(4)).x)
    assert isinstance(x, torch.Tensor)
    for level in range(3):
        module = module_of(federation, level)
        logits = module.train()(x)
        assert len(logits) == level + 1
        assert len({tuple(o.shape) for o in logits}) == 1
        sum(o.square().sum() for o in logits).backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        module.eval().training = True  # its layers compute as in evaluation
        with torch.no_grad():
            every, answer = module(x), module.eval()(x)
        expected = torch.stack(every).mean(0) if method == "depthfl" else every[-1]
        assert torch.allclose(answer, expected, atol=1e-5)


@pytest.mark.parametrize("channels_first", [True, False])
def test_a_head_takes_the_mean_of_all_pixels_or_tokens(channels_first: bool) -> None:
    """Features (0, 0) and (2, 4): their mean (1, 2), normalised (-1, 1), times (1, 10); or of every position."""
    head = Head(2, 1, channels_first, norm=True)
    head.fc.load_state_dict({"weight": torch.tensor([[1.0, 10.0]]), "bias": torch.zeros(1)})
    x = torch.tensor([[[0.0, 0.0], [2.0, 4.0]]])  # (batch, token, channel)
    x = x.transpose(1, 2) if channels_first else x
    assert float(head(x, every=False).detach()) == pytest.approx(9, abs=1e-3)
    assert head(x, every=True).flatten().tolist() == pytest.approx([0, 9], abs=1e-3)
    plain = Head(2, 1, channels_first, norm=False)
    plain.load_state_dict(head.fc.state_dict(prefix="fc."))
    assert float(plain(x, every=False).detach()) == pytest.approx(21, abs=1e-5)


def test_a_head_has_a_norm_where_the_blocks_have_one() -> None:
    for model, norm in (("tiny-vit", True), ("tiny-mlp", False)):
        patch = ["model.patch=2"] if norm else []
        layout = tiny_federation("method=depthfl", f"model.name={model}", *patch).model.layout
        assert ("exits.0.norm.weight" in layout.parameters) == norm


@pytest.mark.parametrize("model", ["tiny-resnet", "tiny-mlp"])
def test_a_level_can_answer_with_its_last_exit(model: str) -> None:
    x = torch.randn(4, 1, 8, 8)
    for mean in (True, False):
        federation = tiny_federation("method=depthfl", f"model.name={model}", f"depthfl.mean={str(mean).lower()}")
        module = module_of(federation, 1)
        module.eval().training = True
        with torch.no_grad():
            exits, answer = module(x), module.eval()(x)
        assert torch.allclose(answer, torch.stack(exits).mean(0) if mean else exits[-1], atol=1e-5)


def test_what_the_layout_tells() -> None:
    """The stream after a block of a ViT, of an LSTM (whose gates are four copies of it) and of a ResNet's stage."""
    vit = make_model("tiny-vit", ModelOptions(shape=(1, 8, 8), patch=2)).layout
    lstm = make_model("tiny-lstm", ModelOptions(shape=(7,), vocabulary=5)).layout
    resnet = make_model("tiny-resnet", ModelOptions(shape=(1, 8, 8))).layout
    own = make_model("tests.own_models:encoder", ModelOptions(shape=(1, 8, 8))).layout
    assert tail(vit) == ("norm", "head")
    assert stream_after(vit, 2) == (vit.named_axes["stream"], 32)
    assert stream_after(lstm, 1) == (Axis("stream", 16), 16)
    assert [axis and axis.name for axis, _ in (stream_after(resnet, at) for at in (1, 2, 3, 4))] == [
        *["layer1"] * 2,
        *["layer2"] * 2,
    ]
    assert stream_after(own, 1) == (None, 16)  # torch's encoder cannot be narrowed


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("model", ["tiny-resnet", "tiny-vit", "tiny-mlp"])
def test_an_exit_can_be_used(model: str, tmp_path: Path) -> None:
    """``load_model(..., exit=k)`` gives the logits of that exit, without what comes after it."""
    patch = ["model.patch=2"] if "vit" in model else []
    result = incofl.run(tiny_config("method=depthfl", f"model.name={model}", "rounds=1", *patch), tmp_path / "run")
    whole, x = incofl.load_model(tmp_path / "run"), torch.randn(4, 1, 8, 8)
    ends = [incofl.load_model(tmp_path / "run", exit=number) for number in range(3)]
    logits = [end(x) for end in ends]
    assert torch.allclose(torch.stack(logits).mean(0), whole(x), atol=1e-10)
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)
    assert torch.equal(result.model(exit=-1)(x), logits[2])
    small = incofl.load_model(tmp_path / "run", level=1, exit=1)
    sizes = [sum(p.numel() for p in end.parameters()) for end in ends]
    assert sizes[0] < sizes[1] < sizes[2] == sum(p.numel() for p in whole.parameters())
    assert small(x).shape == (4, 10)
    with pytest.raises(ConfigError, match=r"exit: got 3, expected 0 to 2, or -1 for the last"):
        incofl.load_model(tmp_path / "run", exit=3)
    with pytest.raises(ConfigError, match=r"exit: got 1, expected 0 to 0"):
        incofl.load_model(tmp_path / "run", level=0, exit=1)


@pytest.mark.parametrize("model", ["tiny-resnet", "tiny-mlp"])
def test_an_exit_of_scalefl_can_be_used(model: str, tmp_path: Path) -> None:
    incofl.run(tiny_config("method=scalefl", f"model.name={model}", "rounds=1"), tmp_path / "run", progress=False)
    whole, x = incofl.load_model(tmp_path / "run"), torch.randn(4, 1, 8, 8)
    ends = [incofl.load_model(tmp_path / "run", exit=number)(x) for number in range(3)]
    assert torch.equal(whole(x), ends[2])
    whole.training = True  # its layers compute as in evaluation
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole(x), ends, strict=True))
    assert not torch.allclose(ends[0], ends[1], atol=1e-3)


def test_a_model_without_exits_has_none(tmp_path: Path) -> None:
    incofl.run(tiny_config("rounds=1"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"exit: got 0, expected none: the model has no early exits"):
        incofl.load_model(tmp_path / "run", exit=0)


def test_feddyn_is_optional() -> None:
    """With alpha the server keeps h and clients h_i; without, nothing is kept."""
    plain, regularised = (
        run_rounds(tiny_federation("method=depthfl", f"depthfl.alpha={alpha}"), 1)[-1] for alpha in (0, 0.1)
    )
    assert plain.extra == {}
    assert regularised.extra.keys() == {"h"}
    assert not same(plain.shared, regularised.shared)
    h, alpha = regularised.extra["h"]["conv1.weight"], 0.1
    assert torch.allclose(plain.shared["conv1.weight"] - h / alpha, regularised.shared["conv1.weight"], atol=2e-2)


def test_with_one_exit_it_is_feddyn() -> None:
    """The same terms, memories and h: bit for bit, with clients that come back."""
    settings = ["split.levels=1", "data.clients=4"]
    ours, theirs = (
        run_rounds(tiny_federation(*words, *settings), 3)[-1]
        for words in (["method=depthfl", "depthfl.alpha=0.3"], ["method=heterodyn", "feddyn.alpha=0.3"])
    )
    assert same(ours.state(0), theirs.state(0))
    assert same(dict(ours.extra["h"]), dict(theirs.extra["h"]))


def test_refused_without_blocks() -> None:
    with pytest.raises(ConfigError, match="HeadFirst cannot have early exits, expected blocks, an axis of classes"):
        tiny_federation("method=depthfl", "model.name=tests.own_models:without_blocks", "split.kind=stage")
