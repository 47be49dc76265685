"""Windows that are drawn: random width and FedEcover."""

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import incofl
from incofl.config import make_config
from incofl.engine.build import build, build_method
from incofl.engine.worker import Worker
from incofl.errors import ConfigError
from incofl.layout import Axis, Layout
from incofl.methods import METHODS
from incofl.methods.fedecover import PooledWindows, drawn_units
from incofl.methods.fedrand import FedRand, RandomWindows, share_of_inputs
from incofl.methods.server_optimizers import ServerSchedule
from incofl.models import ModelOptions, make_model
from incofl.split import Splitter, submodel
from tests.federations import run_rounds, tiny_config, tiny_federation
from tests.methods.test_identities import near, plain_fedavg, same

MODELS = {
    "tiny-resnet": make_model("tiny-resnet", ModelOptions(shape=(1, 8, 8)), seed=1),
    "tiny-vit": make_model("tiny-vit", ModelOptions(shape=(1, 8, 8), patch=2), seed=1),
    "tests.own_models:encoder": make_model("tests.own_models:encoder", ModelOptions(shape=(1, 8, 8)), seed=1),
}
RESNET = MODELS["tiny-resnet"].layout


def windows(kind: type[RandomWindows], *shares: float, layout: Layout = RESNET, seed: int = 0) -> RandomWindows:
    return kind(shares, (layout.depth,) * len(shares), "random", seed)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["fedrand", "fedecover"])
def test_one_level_is_plain_fedavg(method: str) -> None:
    options = ["split.levels=1", "buffers=average", "aggregate.precision=float64"]
    federation = tiny_federation(f"method={method}", *options)
    assert near(run_rounds(federation, 2)[-1].shared, plain_fedavg(federation, rounds=2, cohort=4))


@given(seed=st.integers(0, 2**20), share=st.floats(0.05, 0.95), pooled=st.booleans(), name=st.sampled_from([*MODELS]))
def test_tensors_that_share_an_axis_share_the_draw(seed: int, share: float, pooled: bool, name: str) -> None:
    """A residual stream agrees by construction: of each axis, every tensor holds the same units."""
    layout = MODELS[name].layout
    splitter = windows(PooledWindows if pooled else RandomWindows, share, layout=layout, seed=seed)
    drawn, _ = splitter.draw(layout, {}, 0, 3, 5)
    piece, held = splitter.slice(layout, 0, 3, 5, drawn), dict[str, Tensor]()
    for entry, at in piece.index.items():
        for axis, index in zip(layout.axes[entry], at, strict=True):
            if axis is not None and not axis.fixed:
                units = (torch.arange(axis.length)[index] // axis.unit % axis.size).unique()  # type: ignore[no-untyped-call]
                assert torch.equal(units, held.setdefault(axis.name, units)), entry
                assert len(units) == splitter.width(axis.size, 0)


@pytest.mark.usefixtures("double")
def test_a_drawn_sub_model_is_the_model_without_the_other_channels() -> None:
    """Zeros in place of all that a client does not hold: where a shortcut met other channels, logits would differ."""
    model = make_model("tiny-resnet", ModelOptions(shape=(1, 8, 8)), seed=1)
    layout, splitter = model.layout, windows(RandomWindows, 0.6)
    torch.manual_seed(0)
    state = {n: torch.rand(v.shape) if n in layout.buffers and v.dim() else v for n, v in model.initial.items()}
    piece = splitter.slice(layout, 0, 7, 3)
    narrow = submodel(model.template, layout, piece)
    narrow.load_state_dict(piece.take(state))
    masked = {name: torch.zeros_like(value) for name, value in state.items()}
    piece.write(piece.take(state), masked)
    whole = submodel(model.template, layout, Splitter((1.0,), (layout.depth,)).slice(layout, 0))
    whole.load_state_dict(masked)
    x = torch.randn(4, 1, 8, 8)
    assert torch.allclose(narrow.eval()(x), whole.eval()(x), atol=1e-12)


def test_draws_follow_from_seed_round_and_client() -> None:
    def held(seed: int, round: int, client: int) -> list[int]:
        index = windows(RandomWindows, 0.5, seed=seed).slice(RESNET, 0, round, client).index["layer2.0.conv1.weight"][0]
        assert isinstance(index, Tensor)
        assert index.tolist() == sorted(index.tolist())
        return index.tolist()

    assert held(0, 1, 2) == held(0, 1, 2)
    others = [held(1, 1, 2), held(0, 2, 2), held(0, 1, 3)]
    assert all(held(0, 1, 2) != other for other in others)


def test_draws_from_a_pool_follow_from_seed_round_and_client() -> None:
    """Channels that were trained equally often are drawn in a random order."""

    def drawn(seed: int, round: int, client: int) -> tuple[int, ...]:
        return windows(PooledWindows, 0.5, seed=seed).draw(RESNET, {}, 0, round, client)[0]

    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    assert len({drawn(0, 1, 2), drawn(1, 1, 2), drawn(0, 2, 2), drawn(0, 1, 3)}) == 4


def test_a_level_is_evaluated_on_its_first_channels() -> None:
    prefix = Splitter((0.5,), (RESNET.depth,)).slice(RESNET, 0)
    for kind in (RandomWindows, PooledWindows):
        assert windows(kind, 0.5).slice(RESNET, 0, 9) == prefix


@given(widths=st.lists(st.integers(1, 5), min_size=1, max_size=25), seed=st.integers(0, 999))
def test_a_pool_covers_every_channel_once_before_any_twice(widths: list[int], seed: int) -> None:
    """Draws of any sizes, one after the other, against a pool that is written down literally."""
    axis = Axis("hidden", 5)
    layout = Layout.of(nn.Linear(1, 5), {"weight": (axis, None), "bias": (axis,)}, [], {})
    counts: Mapping[str, Tensor] = {}
    left = set(range(5))
    for turn, width in enumerate(widths):
        splitter = PooledWindows((width / 5,), ((),), "random", seed)
        drawn, counts = splitter.draw(layout, counts, 0, turn, 0)
        if width == 5:
            assert drawn == ()  # all of them: nothing to draw, and the pool is as it was
            continue
        assert len(set(drawn)) == len(drawn) == width
        if width <= len(left):
            assert set(drawn) <= left
            left -= set(drawn)
        else:
            assert left <= set(drawn)
            left = set(range(5)) - (set(drawn) - left)
        left = left or set(range(5))
        lowest = min(counts[axis.name].tolist())
        assert {at for at, count in enumerate(counts[axis.name].tolist()) if count == lowest} == left


@pytest.mark.parametrize("model", ["tiny-resnet", "tiny-vit"])
def test_pools_are_the_servers_and_count_what_arrived(model: str) -> None:
    """After three rounds each channel or head was trained as often as it was drawn; what is lost is not counted."""
    patch = ["model.patch=2"] if "vit" in model else []
    federation = tiny_federation("method=fedecover", f"model.name={model}", *patch)
    servers, splitter, layout = run_rounds(federation, 3), federation.splitter, federation.model.layout
    assert isinstance(splitter, PooledWindows)
    expected: dict[str, Tensor] = {}
    for server in servers[:-1]:
        for job in federation.schedule(server.round, 4, server=server):
            left = iter(job.drawn)
            for axis in splitter.axes(layout, job.level) if job.drawn else ():
                units = list(itertools.islice(left, splitter.width(axis.size, job.level)))
                expected.setdefault(axis.name, torch.zeros(axis.size, dtype=torch.int64))[units] += 1
    assert same(dict(servers[-1].extra["drawn"]), expected)
    assert all(int(counts.max() - counts.min()) <= 1 for counts in expected.values())
    lost = tiny_federation("method=fedecover", "local.lr=3e38", "local.optimizer=sgd", "local.epochs=3")
    assert run_rounds(lost, 1)[-1].extra == {}


def test_a_level_draws_of_the_blocks_that_it_holds() -> None:
    """One block of each stage at half of the width: what is counted on arrival is what was drawn."""
    splitter = PooledWindows((0.5,), ((1, 1),), "random")
    drawn, counts = splitter.draw(RESNET, {}, 0, 0, 0)
    arrived = drawn_units(RESNET, splitter.slice(RESNET, 0, 0, 0, drawn))
    assert {axis.name for axis in arrived} == counts.keys() == {axis.name for axis in splitter.axes(RESNET, 0)}
    assert all(torch.equal(counts[axis.name].nonzero().flatten(), units) for axis, units in arrived.items())
    assert not any(name.startswith(("layer1.1", "layer2.1")) for name in counts)


def test_clients_of_a_round_share_the_pool() -> None:
    """Two clients at half of the width hold all channels between them; drawn independently they would not."""
    layout, splitter = RESNET, PooledWindows((0.5,), (RESNET.depth,), "random")
    first, counts = splitter.draw(layout, {}, 0, 0, 0)
    second, _ = splitter.draw(layout, counts, 0, 0, 1)
    axes = splitter.axes(layout, 0)
    assert len(first) == sum(axis.size // 2 for axis in axes)
    start = 0
    for axis in axes:
        end = start + axis.size // 2
        assert sorted(first[start:end] + second[start:end]) == list(range(axis.size))
        start = end


def test_a_layer_divides_its_inputs_while_it_is_trained() -> None:
    """Half of the inputs of a head: 2 W x + b in training, W x + b in evaluation; the whole model is untouched."""
    layout = RESNET
    for rule, training, evaluated in (("training", 2, 1), ("always", 2, 2), ("never", 1, 1)):
        piece = windows(RandomWindows, 0.5).slice(layout, 0, 0, 0)
        model = submodel(MODELS["tiny-resnet"].template, layout, piece)
        model.load_state_dict(piece.take(MODELS["tiny-resnet"].initial))
        head = model.get_submodule("fc")
        assert isinstance(head, nn.Linear)
        FedRand(scale=rule).prepare(model, layout)  # type: ignore[arg-type]
        x = torch.randn(3, head.in_features)
        for mode, factor in ((True, training), (False, evaluated)):
            model.train(mode)
            assert torch.allclose(head(x), factor * x @ head.weight.T + head.bias, atol=1e-6)
        stem = model.get_submodule("conv1")
        assert not stem._forward_pre_hooks  # the channels of an image are all there
    whole = submodel(MODELS["tiny-resnet"].template, layout, Splitter((1.0,), (layout.depth,)).slice(layout, 0))
    FedRand().prepare(whole, layout)
    assert not any(layer._forward_pre_hooks for layer in whole.modules())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("kind", "inputs"), [(nn.Linear, 1), (nn.Conv1d, 1), (nn.Conv2d, 1), (nn.ConvTranspose2d, 0)])
def test_every_kind_of_layer_divides_by_the_share_of_its_inputs(kind: type[nn.Linear], inputs: int) -> None:
    """Two of eight inputs, three of four outputs: 4 W x + b."""
    size = () if kind is nn.Linear else (1,)
    whole, layer = kind(8, 4, *size), kind(2, 3, *size)
    plain, sizes = copy.deepcopy(layer), tuple(whole.weight.shape)
    assert sizes[inputs] == 8
    assert share_of_inputs(layer, sizes) == 1 / 4
    model = nn.Sequential(layer)
    layout = Layout.of(nn.Sequential(whole), {}, [], {})
    FedRand().prepare(model, layout)
    x = torch.randn(5, 2, *[3] * (whole.weight.dim() - 2))
    bias = layer.bias.view(-1, *[1] * (whole.weight.dim() - 2))
    assert torch.allclose(model(x), 4 * (plain(x) - bias) + bias)
    assert torch.equal(model.eval()(x), plain(x))


@pytest.mark.parametrize("scale", ["training", "always"])
def test_a_loaded_model_computes_what_was_evaluated(scale: str, tmp_path: Path) -> None:
    """A small level that is always scaled is so outside of its run, too."""
    config = tiny_config("method=fedrand", f"fedrand.scale={scale}", "rounds=2")
    result = incofl.run(config, tmp_path / "run", progress=False)
    federation, x = build(config), torch.randn(4, 1, 8, 8)
    model = incofl.load_model(tmp_path / "run", level=0)
    worker = Worker(federation).module(0, 2).eval()
    worker.load_state_dict(model.state_dict())
    assert torch.equal(model(x), worker(x))
    assert torch.equal(model(x), result.model(0)(x))
    assert any(layer._forward_pre_hooks for layer in model.modules()) == (scale == "always")


def test_the_servers_step_falls_until_round_200() -> None:
    (schedule,) = (t for t in METHODS["fedecover"].transforms if isinstance(t, ServerSchedule))
    assert [schedule.factor(round) for round in (0, 9, 10, 20)] == [1, 1, 0.9, pytest.approx(0.81)]
    assert schedule.factor(200) == schedule.factor(500) == pytest.approx(0.9**20)
    assert ServerSchedule(schedule="step").factor(500) == pytest.approx(0.9**50)


def test_a_config_that_says_something_else_leaves_the_schedule() -> None:
    """What is left out of a section is the method's own default, not that of other methods."""
    config = make_config({"method": "fedecover", "server": {"lr": 0.5}})
    chosen = build_method(config).options["server"]
    assert (chosen.lr, chosen.schedule, chosen.decay_rounds) == (0.5, "step", 200)
    assert build_method(make_config({"method": "fedrand"})).options["server"].schedule == "constant"
    assert build_method(make_config({"method": "fedecover"}, ["server.schedule=constant"])).options["server"].lr == 1


def test_shares_can_be_rounded_down() -> None:
    """As in FedEcover's published curves: 0.1 of 64, 128 and 256 channels are 6, 12 and 25, not 7, 13 and 26."""
    up, down = (Splitter((0.1,), ((),), round_down=d) for d in (False, True))
    assert [up.width(size, 0) for size in (64, 128, 256, 3)] == [7, 13, 26, 1]
    assert [down.width(size, 0) for size in (64, 128, 256, 3)] == [6, 12, 25, 1]
    assert Splitter((0.29,), ((),), round_down=True).width(100, 0) == 29  # 28.999999999999996 in floating point
    federation = tiny_federation("method=heterofl", "split.levels=[0.4,1]", "split.rounding=down")
    whole, narrow = (federation.slice(level, 0).shapes["fc.weight"][1] for level in (1, 0))
    assert narrow == int(0.4 * whole) < 0.4 * whole


def test_refusals() -> None:
    for words, settings in {
        "buffers: got 'per-level', expected 'static' or 'average': fedrand moves a window": ["buffers=per-level"],
        "split.kind: got 'stage', expected 'hetero': fedrand splits by width": ["split.kind=stage"],
        "split.start: got 'identity', expected 'random': the channels of a level move": ["split.start=identity"],
        "fedrand.scale: got 'no', expected 'training' or 'always' or 'never'": ["fedrand.scale=no"],
        "method: fedrand+anchor moves what a level holds": ["method=fedrand+anchor"],
    }.items():
        with pytest.raises(ConfigError) as problem:
            tiny_federation("method=fedrand", *settings)
        assert words in str(problem.value)
