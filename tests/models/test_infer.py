"""Layouts found by tracing: hand-derived axes, equality with the hand-written ones, and what is held whole."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.models import MODELS, Family, ModelOptions, as_model, build_module
from incofl.split import Splitter, make_splitter, submodel


class Net(nn.Module):
    """Named parts, and a function that says how they are computed."""

    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.compute = forward

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.compute(self, x)
        return out


IMAGES = torch.zeros(3, 3, 8, 8)
TOKENS = torch.zeros(3, 7, dtype=torch.long)
VECTORS = torch.zeros(3, 12)
SEQUENCES = torch.zeros(3, 7, 6)


def axes_of(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Axes that can be narrowed as (name, units, copies, unit); the classes by their name; what is whole as None."""

    def plain(axis: Any) -> Any:
        if axis is None or axis.size == 1 or (axis.fixed and axis.name != "classes"):
            return None
        return "classes" if axis.fixed else (axis.name, axis.size, axis.copies, axis.unit)

    return {entry: tuple(map(plain, axes)) for entry, axes in layout.axes.items()}


def canonical(layout: Layout) -> Any:
    """A layout up to the names of its axes."""
    numbers: dict[str, int] = {}
    axes = {
        entry: tuple(
            (numbers.setdefault(axis[0], len(numbers)), *axis[1:]) if isinstance(axis, tuple) else axis for axis in own
        )
        for entry, own in axes_of(layout).items()
    }
    return axes, layout.shapes, layout.stages, dict(layout.shallow), layout.buffers


def weights(layout: Layout, *names: str) -> list[tuple[Any, ...]]:
    return [axes_of(layout)[f"{name}.weight"] for name in names]


def options_of(family: Family) -> ModelOptions:
    if family.input == "texts":
        return ModelOptions(shape=(7,), classes=5, vocabulary=30)
    if family.input == "signals":
        return ModelOptions(shape=(9, 64), classes=6, width=0.25)
    side = 32 if family.side is None else family.side
    return ModelOptions(shape=(3, side, side), width=0.25 if family.scaled else 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_the_layouts_written_by_hand(name: str) -> None:
    options = options_of(MODELS[name])
    module, by_hand = build_module(name, options)
    dtype = torch.long if options.vocabulary else torch.float32
    before = copy.deepcopy(module.state_dict())
    layout = Layout.infer(module, torch.zeros(3, *options.shape, dtype=dtype))
    assert canonical(layout) == canonical(by_hand)
    assert layout.kept_whole == {}
    assert module.training
    assert all(torch.equal(before[entry], value) for entry, value in module.state_dict().items())


def test_perceptron() -> None:
    net = Net(lambda s, x: s.out(s.mid(x).relu()), mid=nn.Linear(12, 8), out=nn.Linear(8, 5))
    layout = Layout.infer(net, VECTORS)
    assert weights(layout, "mid", "out") == [(("mid", 8, 1, 1), None), ("classes", ("mid", 8, 1, 1))]
    assert layout.stages == ()
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_flattened_channels_are_units_of_their_pixels() -> None:
    """6 channels of 4 x 4 pixels after pooling: 96 columns, 16 for each channel."""
    net = Net(
        lambda s, x: s.out(functional.max_pool2d(s.b(s.a(x).relu()), 2).flatten(1)),
        a=nn.Conv2d(3, 8, 3, padding=1),
        b=nn.Conv2d(8, 6, 3, padding=1),
        out=nn.Linear(96, 5),
    )
    a, b = ("a", 8, 1, 1), ("b", 6, 1, 1)
    assert weights(Layout.infer(net, IMAGES), "a", "b", "out") == [
        (a, None, None, None),
        (b, a, None, None),
        ("classes", ("b", 6, 1, 16)),
    ]


def test_residual_additions_join_streams() -> None:
    """The 1x1 convolution of the shortcut ends in the stream of the branch; the branch has a width of its own."""
    net = Net(
        lambda s, x: s.out((s.short(x) + s.two(s.norm(s.one(x)).relu())).mean((2, 3))),
        one=nn.Conv2d(3, 4, 3, padding=1),
        norm=nn.BatchNorm2d(4),
        two=nn.Conv2d(4, 6, 3, padding=1),
        short=nn.Conv2d(3, 6, 1),
        out=nn.Linear(6, 5),
    )
    one, two = ("one", 4, 1, 1), ("two", 6, 1, 1)
    layout = Layout.infer(net, IMAGES)
    assert weights(layout, "one", "norm", "two", "short", "out") == [
        (one, None, None, None),
        (one,),
        (two, one, None, None),
        (two, None, None, None),
        ("classes", two),
    ]
    assert axes_of(layout)["norm.running_mean"] == (one,)


def attention(shape: tuple[int, ...]) -> Net:
    """Queries, keys and values in one matrix of 3 x 4 heads x 6; ``shape`` is how they are told apart."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.qkv(s.stem(x)).unflatten(2, shape).permute(2, 0, 3, 1, 4)
        out: Tensor = s.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))
        return out

    return Net(forward, stem=nn.Linear(6, 24), qkv=nn.Linear(24, 72), out=nn.Linear(24, 5))


def test_heads_of_an_attention() -> None:
    layout = Layout.infer(attention((3, -1, 6)), SEQUENCES)
    assert weights(layout, "qkv", "out") == [
        (("qkv", 4, 3, 6), ("stem", 24, 1, 1)),
        ("classes", ("qkv", 4, 1, 6)),
    ]


def test_a_view_that_would_make_other_heads_of_fewer_channels_is_noticed() -> None:
    """It runs, and its output has the right shape; but half of the heads would become heads of half the width."""
    layout = Layout.infer(attention((3, 4, -1)), SEQUENCES)
    assert weights(layout, "qkv", "out") == [(None, ("stem", 24, 1, 1)), ("classes", None)]
    assert layout.kept_whole == {"qkv": "the model itself is written for one size of it (unflatten)"}


def test_a_filter_per_channel_and_groups_of_a_norm() -> None:
    """Two filters for each of 8 channels, in two groups of 4: each group loses the same channels."""
    net = Net(
        lambda s, x: s.out(s.each(s.norm(s.stem(x))).mean((2, 3))),
        stem=nn.Conv2d(3, 8, 3),
        norm=nn.GroupNorm(2, 8),
        each=nn.Conv2d(8, 16, 3, groups=8),
        out=nn.Linear(16, 5),
    )
    assert weights(Layout.infer(net, IMAGES), "stem", "norm", "each", "out") == [
        (("stem", 4, 2, 1), None, None, None),
        (("stem", 4, 2, 1),),
        (("stem", 4, 2, 2), None, None, None),
        ("classes", ("stem", 4, 2, 2)),
    ]


def test_norms_that_remember_their_size() -> None:
    """Their narrowed copies compute with the smaller size."""
    rms = Net(lambda s, x: s.out(s.norm(s.mid(x))), mid=nn.Linear(12, 8), norm=nn.RMSNorm(8), out=nn.Linear(8, 5))
    mid = ("mid", 8, 1, 1)
    assert weights(Layout.infer(rms, VECTORS), "mid", "norm", "out") == [(mid, None), (mid,), ("classes", mid)]
    instance = Net(
        lambda s, x: s.out(s.norm(s.mid(x)).mean((2, 3))),
        mid=nn.Conv2d(3, 8, 3),
        norm=nn.InstanceNorm2d(8, affine=True),
        out=nn.Linear(8, 5),
    )
    assert weights(Layout.infer(instance, IMAGES), "norm", "out") == [(mid,), ("classes", mid)]


def test_sums_by_an_equation() -> None:
    """With and without an ellipsis; what two tensors of the input are summed over is whole, as in an attention."""
    for equation in ("bld,hd->blh", "...d,hd->...h"):
        net = Net(
            lambda s, x, equation=equation: s.out(torch.einsum(equation, x, s.mid.weight).mean(1)),
            mid=nn.Linear(6, 8, bias=False),
            out=nn.Linear(8, 5),
        )
        mid = ("mid", 8, 1, 1)
        assert weights(Layout.infer(net, SEQUENCES), "mid", "out") == [(mid, None), ("classes", mid)]
    scores = Net(
        lambda s, x: s.out(s.mid(torch.einsum("...qd,...kd->...qk", s.a(x), s.b(x))).mean(1)),
        a=nn.Linear(6, 8),
        b=nn.Linear(6, 8),
        mid=nn.Linear(7, 4),
        out=nn.Linear(4, 5),
    )
    layout = Layout.infer(scores, SEQUENCES)
    assert weights(layout, "a", "b") == [(None, None), (None, None)]
    assert layout.kept_whole == {"a": "the scale of an attention depends on it"}


def test_recurrent_layers() -> None:
    """Two layers in both directions: gates are three copies of the state, outputs two."""
    net = Net(
        lambda s, x: s.out(s.gru(s.embedding(x))[0].mean(1)),
        embedding=nn.Embedding(20, 8),
        gru=nn.GRU(8, 12, num_layers=2, bidirectional=True, batch_first=True),
        out=nn.Linear(24, 5),
    )
    axes = axes_of(Layout.infer(net, TOKENS))
    assert axes["embedding.weight"] == (None, ("embedding", 8, 1, 1))
    assert axes["gru.weight_ih_l0"] == (("gru", 12, 3, 1), ("embedding", 8, 1, 1))
    assert axes["gru.weight_hh_l1_reverse"] == (("gru", 12, 3, 1), ("gru", 12, 1, 1))
    assert axes["gru.weight_ih_l1"] == (("gru", 12, 3, 1), ("gru", 12, 2, 1))
    assert axes["out.weight"] == ("classes", ("gru", 12, 2, 1))


def test_halves_are_copies_and_unlike_widths_side_by_side_are_whole() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        value, gate = s.up(x).chunk(2, -1)
        hidden = value * gate.sigmoid()
        out: Tensor = s.out(torch.cat([s.a(hidden), s.b(hidden)], 1))
        return out

    net = Net(forward, up=nn.Linear(12, 20), a=nn.Linear(10, 6), b=nn.Linear(10, 4), out=nn.Linear(10, 5))
    layout = Layout.infer(net, VECTORS)
    assert weights(layout, "up", "a", "b", "out") == [
        (("up", 10, 2, 1), None),
        (None, ("up", 10, 1, 1)),
        (None, ("up", 10, 1, 1)),
        ("classes", None),
    ]
    reason = "the model itself puts unlike widths side by side (cat)"
    assert layout.kept_whole == {"a": reason, "b": reason}


def test_what_has_no_rule_is_whole() -> None:
    net = Net(
        lambda s, x: s.out(s.mid(torch.sort(s.stem(x), 1)[0])),
        stem=nn.Linear(12, 8),
        mid=nn.Linear(8, 6),
        out=nn.Linear(6, 5),
    )
    layout = Layout.infer(net, VECTORS)
    assert weights(layout, "stem", "mid") == [(None, None), (("mid", 6, 1, 1), None)]
    assert layout.kept_whole == {"stem": "the model itself computes something unknown with it (sort)"}


def test_parallel_branches_are_no_stage() -> None:
    branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    net = Net(
        lambda s, x: s.out(sum(branch(s.stem(x)) for branch in s.branches)),
        stem=nn.Linear(12, 8),
        branches=branches,
        out=nn.Linear(8, 5),
    )
    assert Layout.infer(net, VECTORS).stages == ()


def test_blocks_that_change_the_shape_start_stages() -> None:
    layers = nn.Sequential(*[nn.Linear(n, m) for n, m in ((12, 8), (8, 8), (8, 6), (6, 6), (6, 6))])
    layout = Layout.infer(Net(lambda s, x: s.out(s.layers(x)), layers=layers, out=nn.Linear(6, 5)), VECTORS)
    assert layout.stages == (("layers.0", "layers.1"), ("layers.2", "layers.3", "layers.4"))
    assert layout.shallow == {"layers.4.weight": "layers.3.weight"}  # of one shape


def encoder() -> Net:
    """A model that we did not write."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return Net(
        lambda s, x: s.out(s.encoder(s.embedding(x)).mean(1)),
        embedding=nn.Embedding(20, 16),
        encoder=nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
        out=nn.Linear(16, 5),
    )


def test_transformer_encoder() -> None:
    """Its attention asserts its width, which the whole stream has; the perceptrons can be narrowed."""
    layout = Layout.infer(encoder(), TOKENS)
    assert layout.stages == (tuple(f"encoder.layers.{b}" for b in range(3)),)
    assert [axis.name for axis in layout.narrow_axes] == [f"encoder.layers.{b}.linear1" for b in range(3)]
    assert layout.kept_whole["embedding"] == (
        "with 8 of 16 the model fails: was expecting embedding dimension of 16, but got 8"
    )
    norm = "encoder.layers.{}.norm{}.weight"
    assert layout.shallow == {norm.format(b, 2): norm.format(b, 1) for b in range(3)}


def test_parameters_that_do_not_train_change_nothing() -> None:
    """Without gradients torch's encoder may take a fast path, which has no rule; the layout does not depend on it."""
    frozen = encoder().requires_grad_(False)
    layout, trained = Layout.infer(frozen, TOKENS), Layout.infer(encoder(), TOKENS)
    assert (layout.axes, layout.stages) == (trained.axes, trained.stages)
    assert layout.frozen == trained.parameters
    assert layout.shallow == {}
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


class Output:
    """As Hugging Face models return it: an object with logits and other things."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.loss = logits, None


def test_outputs_of_other_shapes() -> None:
    """The axis of the classes is the second dimension, or the last one of (batch, length, classes)."""
    mid = ("mid", 8, 1, 1)
    named = Net(lambda s, x: Output(s.out(s.mid(x))), mid=nn.Linear(12, 8), out=nn.Linear(8, 5))
    assert weights(Layout.infer(named, VECTORS), "mid", "out") == [(mid, None), ("classes", mid)]
    tokens = Net(lambda s, x: s.out(s.mid(x)), mid=nn.Embedding(20, 8), out=nn.Linear(8, 20))
    assert weights(Layout.infer(tokens, TOKENS), "mid", "out") == [(None, mid), ("classes", mid)]
    number = Net(lambda s, x: s.out(s.mid(x)).squeeze(1), mid=nn.Linear(12, 8), out=nn.Linear(8, 1))
    assert weights(Layout.infer(number, VECTORS), "mid", "out") == [(mid, None), (None, mid)]
    pixels = Net(lambda s, x: s.out(s.mid(x)), mid=nn.Conv2d(3, 8, 1), out=nn.Conv2d(8, 5, 1))
    assert weights(Layout.infer(pixels, IMAGES), "out") == [("classes", mid, None, None)]


def test_an_overload_that_a_rule_is_not_for_is_whole() -> None:
    """The larger of two tensors has the name of the largest element of one."""
    net = Net(
        lambda s, x: s.out(torch.max(s.a(x), s.b(x))), a=nn.Linear(12, 8), b=nn.Linear(12, 8), out=nn.Linear(8, 5)
    )
    reason = r"the model itself computes something unknown with it \(max\)"
    with pytest.raises(LayoutError, match=reason):
        Layout.infer(net, VECTORS)


NETS = {"attention": (attention((3, -1, 6)), SEQUENCES), "encoder": (encoder(), TOKENS)}
LAYOUTS = {name: Layout.infer(net, example) for name, (net, example) in NETS.items()}


@settings(max_examples=10)
@given(ratio=st.floats(0.05, 1), round=st.integers(0, 30), name=st.sampled_from(sorted(NETS)))
def test_every_width_runs(ratio: float, round: int, name: str) -> None:
    (net, example), layout = NETS[name], LAYOUTS[name]
    piece = Splitter((ratio,), (layout.depth,), "rolling").slice(layout, 0, round)
    small = submodel(net, layout, piece)
    small.load_state_dict(piece.take(net.state_dict()))
    small(example).sum().backward()
    with torch.inference_mode():
        assert small.eval()(example).shape == (3, 5)


def error(module: nn.Module, example: Tensor) -> str:
    with pytest.raises(LayoutError) as caught:
        Layout.infer(module, example)
    return str(caught.value)


def test_refusals(capfd: pytest.CaptureFixture[str]) -> None:
    assert error(nn.Linear(12, 5), VECTORS) == (
        "layout: Linear can be split neither by depth nor by width: it has no numbered children of one class, such as "
        "those of a ModuleList, that keep the shape of what they get, and no width can be narrowed (all are those of "
        "its input or output); name its blocks with model.blocks, or write its Layout by hand"
    )
    assert error(nn.Linear(11, 5), VECTORS).startswith("layout: Linear fails on a batch of shape (3, 12): ")
    chooses = Net(lambda s, x: s.a(x) if x.sum() > 0 else s.b(x), a=nn.Linear(12, 5), b=nn.Linear(12, 5))
    assert "(every width: torch.export cannot follow Net (its steps depend on values))" in error(chooses, VECTORS)
    assert capfd.readouterr() == ("", "")
    pair = Net(lambda s, x: (s.a(x), x), a=nn.Linear(12, 5))
    assert "gives something else than one tensor" in error(pair, VECTORS)


def test_splitting_what_cannot_be_split() -> None:
    flat = Layout.infer(Net(lambda s, x: s.out(s.mid(x)), mid=nn.Linear(12, 8), out=nn.Linear(8, 5)), VECTORS)
    with pytest.raises(LayoutError, match="expected 'hetero': the model has no repeated blocks"):
        make_splitter(flat, "stage", 1)
    stiff = Net(
        lambda s, x: s.out(s.blocks(x)),
        blocks=nn.Sequential(*[Net(lambda s, x: x + s.add(x), add=nn.Linear(12, 12)) for _ in range(2)]),
        out=nn.Linear(12, 5),
    )
    with pytest.raises(LayoutError, match=r"expected 'stage' or 'layer': no width can be narrowed \(all are those of"):
        make_splitter(Layout.infer(stiff, VECTORS), "hetero", 2)


class Block(nn.Module):
    """A residual block; with ``pair`` it returns a tuple, whose second element it passes on."""

    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.pair = nn.Linear(8, 16), nn.Linear(16, 8), pair

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        out = x + self.down(self.up(x).relu()) + bias
        return (out, bias, out.sum()) if self.pair else out


class Looks(nn.Module):
    """Its first step depends on values, which a trace cannot follow; its blocks can still be left out."""

    def __init__(self, pair: bool = False, looks: bool = True) -> None:
        super().__init__()
        self.stem, self.blocks, self.out = (
            nn.Linear(12, 8),
            nn.ModuleList(Block(pair) for _ in range(3)),
            nn.Linear(8, 5),
        )
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(-x if self.looks and float(x.sum()) > 0 else x)
        bias = torch.ones_like(x)
        for block in self.blocks:
            x = block(x, bias)
            if isinstance(x, tuple):
                x, bias, _ = x
        out: Tensor = self.out(x)
        return out


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def test_what_cannot_be_traced_is_split_by_depth(capfd: pytest.CaptureFixture[str]) -> None:
    layout = Layout.infer(Looks(), VECTORS)
    assert (layout.stages, layout.narrow_axes) == ((BLOCKS,), ())
    assert layout.kept_whole == {"every width": "torch.export cannot follow Looks (its steps depend on values)"}
    assert capfd.readouterr() == ("", "")


def test_blocks_that_return_tuples() -> None:
    """A block that is left out passes on what the block passes on: the bias."""
    net = Looks(pair=True, looks=False)
    layout = Layout.infer(net, VECTORS)
    assert layout.stages == (BLOCKS,)
    assert layout.results == dict.fromkeys(BLOCKS, (0, 1, None))
    slice_ = make_splitter(layout, "layer", [1]).slice(layout, 0)
    small = submodel(net, layout, slice_)
    small.load_state_dict(slice_.take(net.state_dict()))
    x = torch.rand(3, 12)
    stem = net.stem(x)
    assert torch.equal(small(x), net.out(net.blocks[0](stem, torch.ones_like(stem))[0]))


def test_blocks_named_by_hand() -> None:
    """Between these blocks something else is mixed in, so they are not taken for blocks unless they are named."""
    net = Net(
        lambda s, x: s.out(functools.reduce(lambda h, b: s.stem(x) + b(h), s.steps, s.stem(x))),
        stem=nn.Linear(12, 8),
        steps=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
        out=nn.Linear(8, 5),
    )
    assert Layout.infer(net, VECTORS).stages == ()
    assert Layout.infer(net, VECTORS, blocks=["steps"]).stages == (("steps.0", "steps.1", "steps.2"),)
    with pytest.raises(
        LayoutError, match=r"^model.blocks: got 'layers', expected the path of a list of blocks, as 'mod"
    ):
        Layout.infer(net, VECTORS, blocks=["layers"])


def test_tied_parameters_are_one_entry() -> None:
    mid, out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    out.weight = mid.weight
    net = Net(lambda s, x: s.out(s.mid(x).relu()), mid=mid, out=out)
    layout = Layout.infer(net, TOKENS)
    assert layout.tied == {"out.weight": "mid.weight"}
    assert axes_of(layout) == {"mid.weight": ("classes", ("mid", 8, 1, 1))}
    model = as_model(net, layout, TOKENS)
    assert model.initial.keys() == {"mid.weight"}
    slice_ = make_splitter(layout, "hetero", [0.5]).slice(layout, 0)
    small = submodel(model.template, layout, slice_)
    small.load_state_dict(slice_.take(model.initial))
    assert small.get_submodule("out").weight is small.get_submodule("mid").weight
    assert small.state_dict().keys() == {"mid.weight"}
    assert [name for name, _ in small.named_parameters()] == ["mid.weight"]


def test_a_list_of_norms_is_no_list_of_blocks_nor_are_unlike_containers() -> None:
    norms = Net(
        lambda s, x: s.out(s.norms(s.mid(x))),
        mid=nn.Linear(12, 8),
        norms=nn.Sequential(*[nn.LayerNorm(8) for _ in range(3)]),
        out=nn.Linear(8, 5),
    )
    assert Layout.infer(norms, VECTORS).stages == ()
    unlike = nn.Sequential(nn.Sequential(nn.Linear(12, 12)), nn.Sequential(nn.Linear(12, 12), nn.ReLU()))
    assert Layout.infer(nn.Sequential(nn.Linear(12, 12), unlike, nn.Linear(12, 5)), VECTORS).stages == ()
