"""Vision transformers: exact sizes, slices that are the small network itself, and sizes that cannot be."""

import functools
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from incofl.cli import app
from incofl.config import load_config, make_config
from incofl.costs import count_macs
from incofl.engine.build import build_model, build_splitter
from incofl.errors import ConfigError
from incofl.layout import Axis
from incofl.models import Model, ModelOptions, make_model
from incofl.models.model import shapes_of
from incofl.models.vit import NORM_EPS, Block, VisionTransformer, default_patch
from incofl.split import Splitter, make_splitter, submodel
from incofl.tensors import Tensors
from tests.federations import run_rounds, tiny_config, tiny_federation

PARAMETERS = [14_571_658, 16_346_122, 18_120_586, 19_895_050, 21_669_514]
TOKENS = 14 * 14 + 1
BLOCK_MACS = TOKENS * 384 * (3 * 384 + 384 + 2 * 4 * 384) + 2 * TOKENS * TOKENS * 384  # layers; q k' and what it weighs
MACS = [196 * 16 * 16 * 3 * 384 + blocks * BLOCK_MACS + 384 * 10 for blocks in range(8, 13)]


@functools.cache
def vit_s() -> Model:
    return make_model("vit-s", ModelOptions(shape=(3, 224, 224)))


def tiny(**options: object) -> Model:
    return make_model("tiny-vit", ModelOptions(shape=(1, 8, 8), **options), seed=1)  # type: ignore[arg-type]


def test_exact_counts_of_the_papers_vits() -> None:
    """A block has 1,774,464 parameters; stem, class token and positions 371,328; the last norm 768; the head 3,850."""
    arguments = ["plan", "--json", "--method", "heteroavg", "--set", "model.name=vit-s", "--set", "data.name=cifar10"]
    plan = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert plan["split"] == "layer"
    assert [level["blocks"] for level in plan["levels"]] == [[8], [9], [10], [11], [12]]
    assert [level["parameters"] for level in plan["levels"]] == PARAMETERS
    assert [371_328 + blocks * 1_774_464 + 768 + 3_850 for blocks in range(8, 13)] == PARAMETERS
    assert [level["macs"] for level in plan["levels"]] == MACS
    assert MACS[-1] == 4_598_502_144


def test_counts_when_heads_are_cut() -> None:
    """Two of four heads of eight channels, half the stream and perceptron, 64 patches of one grey pixel."""
    model = tiny()
    piece = make_splitter(model.layout, "hetero", [0.5, 1.0]).slice(model.layout, 0, 0)
    stem = 64 * 16
    block = 65 * 16 * (48 + 16 + 2 * 64) + 2 * 65 * 65 * 16
    module = submodel(model.template, model.layout, piece).to("meta")
    assert count_macs(module, model.example(1)) == stem + 4 * block + 16 * 10


def reference(state: Tensors, x: Tensor, head_dim: int) -> Tensor:
    """A vision transformer in formulas, a head at a time, from nothing but its weights."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * state[f"{name}.weight"]
            + state[f"{name}.bias"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    patch = state["patch_embed.proj.weight"].shape[-1]
    patches = functional.unfold(x, patch, stride=patch).transpose(1, 2)
    tokens = patches @ state["patch_embed.proj.weight"].flatten(1).T + state["patch_embed.proj.bias"]
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), tokens], 1) + state["pos_embed"]
    for block in sorted({int(name.split(".")[1]) for name in state if name.startswith("blocks.")}):
        at = f"blocks.{block}"
        q, k, v = linear(norm(x, f"{at}.norm1"), f"{at}.attn.qkv").chunk(3, -1)
        heads = []
        for first in range(0, q.shape[-1], head_dim):
            part = slice(first, first + head_dim)
            weights = (q[..., part] @ k[..., part].transpose(1, 2) / head_dim**0.5).softmax(-1)
            heads.append(weights @ v[..., part])
        x = x + linear(torch.cat(heads, -1), f"{at}.attn.proj")
        x = x + linear(functional.gelu(linear(norm(x, f"{at}.norm2"), f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
    return linear(norm(x, "norm")[:, 0], "head")


@pytest.mark.parametrize(
    ("kind", "levels", "level", "dim", "heads"),
    [
        ("layer", [1, 3, 4], 0, 32, 4),
        ("layer", [1, 3, 4], 1, 32, 4),
        ("hetero", 3, 0, 8, 1),
        ("hetero", 3, 1, 16, 2),
        ("hetero", [0.6, 1.0], 0, 20, 3),  # 3 whole heads of 8 channels on a stream of 20
        ("hetero", 3, 2, 32, 4),
    ],
)
@pytest.mark.usefixtures("double")
def test_a_slice_is_the_small_network_itself(kind: str, levels: object, level: int, dim: int, heads: int) -> None:
    """As built directly, bit for bit, and as the formulas say."""
    model = tiny()
    splitter = make_splitter(model.layout, kind, levels)  # type: ignore[arg-type]
    piece = splitter.slice(model.layout, level, 0)
    generator = torch.Generator().manual_seed(0)
    server = {name: torch.randn(value.shape, generator=generator) / 4 for name, value in model.initial.items()}
    state = piece.take(server)
    cut = submodel(model.template, model.layout, piece)
    hidden = state["blocks.0.mlp.fc1.weight"].shape[0]
    direct, (depth,) = VisionTransformer((1, 8, 8), 10, dim=dim, heads=1, patch=1), splitter.depths[level]
    direct.blocks = nn.Sequential(*[Block(dim, heads, 8, hidden, NORM_EPS) for _ in range(depth)])
    x = torch.randn(3, 1, 8, 8, generator=generator)
    for module in (cut, direct):
        module.load_state_dict(state, strict=module is direct)
        torch.testing.assert_close(module(x), reference(state, x, head_dim=8), rtol=1e-10, atol=1e-10)
    assert torch.equal(cut(x), direct(x))


def test_heads_are_cut_whole_in_queries_keys_and_values() -> None:
    """By hand: heads 2 and 3 of four, eight channels each, in a matrix of 32 queries, 32 keys and 32 values."""
    model = tiny()
    piece = Splitter((0.5,), ((4,),), "rolling").slice(model.layout, 0, 2)
    whole = torch.arange(96.0).view(-1, 1).expand(96, 32)
    rows = piece.take({"blocks.1.attn.qkv.weight": whole})["blocks.1.attn.qkv.weight"][:, 0]
    assert rows.tolist() == [*range(16, 32), *range(48, 64), *range(80, 96)]
    columns = torch.arange(32.0).expand(32, 32)
    taken = piece.take({"blocks.1.attn.proj.weight": columns})["blocks.1.attn.proj.weight"]
    assert taken[0].tolist() == [*range(16, 32)]


def test_layout() -> None:
    """Every tensor of the stream has it by name; the released pairing mixes one scale in every block."""
    layout = vit_s().layout
    assert layout.depth == (12,)
    assert layout.shallow == {f"blocks.{b}.norm2.weight": f"blocks.{b}.norm1.weight" for b in range(12)}
    assert layout.axes["blocks.3.attn.qkv.weight"][0] == Axis("blocks.3.heads", 6, copies=3, unit=64)
    assert layout.axes["blocks.3.attn.proj.weight"][1] == Axis("blocks.3.heads", 6, unit=64)
    assert layout.axes["pos_embed"] == (None, None, Axis("stream", 384))
    assert not layout.buffers
    across = layout.across_blocks
    assert len(across) == 11 * 4
    assert across["blocks.11.attn.qkv.weight"] == "blocks.0.attn.qkv.weight"


def test_width_multiplies_heads() -> None:
    """Half of six heads, of 64 channels each; a tenth is one head."""
    for width, dim in ((0.5, 192), (0.1, 64), (1.5, 576)):
        model = make_model("vit-s", ModelOptions(shape=(3, 32, 32), width=width, depth=1))
        assert model.layout.named_axes["stream"].size == dim
        assert model.layout.named_axes["blocks.0.heads"] == Axis("blocks.0.heads", dim // 64, unit=64)
    same = make_model("vit-s", ModelOptions(shape=(3, 32, 32), width=0.5, depth=1)).layout
    assert same.shapes == make_model("vit-tiny", ModelOptions(shape=(3, 32, 32), depth=1)).layout.shapes


@pytest.mark.parametrize(
    ("side", "patch"), [(224, 16), (128, 16), (96, 12), (64, 8), (32, 4), (28, 2), (8, 1), (4, 1), (31, 1)]
)
def test_patches_suit_the_images(side: int, patch: int) -> None:
    assert default_patch((3, side, side)) == patch


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.name=tiny-vit", "model.heads=5"], "model.dim: got 32, expected a multiple of model.heads = 5"),
        (["model.name=tiny-vit", "model.dim=30"], "model.dim: got 30, expected a multiple of model.heads = 4"),
        (
            ["model.name=tiny-vit", "model.patch=3"],
            "model.patch: got 3 for images of 8 x 8, expected what divides them: 1, 2, 4, 8; or another data.side",
        ),
        (["model.name=vit-s", "data.side=200"], "model.patch: got 16 for images of 200 x 200, expected what divides"),
        (["model.name=resnet26", "model.patch=4"], "model.patch: got 4, but resnet26 has no parameter 'patch'"),
        (["model.name=tiny-mlp", "model.depth=4"], "model.depth: got 4, but tiny-mlp has no parameter 'depth'"),
    ],
)
def test_impossible_sizes(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as problem:
        build_model(make_config({}, settings))
    assert words in str(problem.value)


def test_a_shallow_vit_has_as_many_levels_as_blocks() -> None:
    config = make_config({}, ["model.name=vit-tiny", "model.depth=3"])
    assert build_splitter(config, build_model(config)).depths == ((1,), (2,), (3,))


def test_the_papers_protocol() -> None:
    config = load_config("paper-vit-cifar10")
    assert (config.data.side, config.split.kind, config.methods["server"].lr) == (224, "layer", 0.2)
    assert (config.local.optimizer, config.local.lr, config.local.momentum) == ("sgd", 0.01, 0.9)
    assert config.local.weight_decay == 1e-5
    model = build_model(config)
    assert shapes_of(model.example(2)) == (2, 3, 224, 224)
    assert build_splitter(config, model).depths == ((8,), (9,), (10,), (11,), (12,))


def test_released_inco_changes_the_second_norms_alone() -> None:
    options = ["model.name=tiny-vit", "model.patch=2", "data.limit=100"]
    mixed, plain = (
        run_rounds(tiny_federation(f"method={n}", *options), 1)[-1].shared for n in ("incoavg", "heteroavg")
    )
    changed = {name for name in mixed if not torch.equal(mixed[name], plain[name])}
    assert changed == {f"blocks.{b}.norm2.weight" for b in range(4)}


def test_a_stem_is_refused() -> None:
    """Not silently ignored; and a resolved config can be read again."""
    with pytest.raises(ConfigError, match=r"model.stem: got 'small', expected none: tiny-vit has no such option"):
        tiny_config("model.name=tiny-vit", "model.stem=small")
    config = tiny_config("model.name=tiny-vit")
    assert make_config(config.to_dict()) == config
