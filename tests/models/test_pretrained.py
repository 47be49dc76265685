"""Pretrained weights: what fits is taken as it is, what may differ is adapted, what cannot fit is refused."""

import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import incofl
from incofl.errors import ConfigError
from incofl.models import Extend, Model, ModelOptions, make_model
from incofl.models.pretrained import resize_positions, with_pretrained
from incofl.split import make_splitter
from incofl.tensors import Tensors
from tests.federations import tiny_config, tiny_federation
from tests.models.test_exits import exits


def random_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    save_file(state, path)
    return state


def timm_vit_small() -> dict[str, tuple[int, ...]]:
    """Names and shapes of vit_small_patch16_224 with its 1000 classes, written out."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, 384),
        "pos_embed": (1, 197, 384),
        "patch_embed.proj.weight": (384, 3, 16, 16),
        "patch_embed.proj.bias": (384,),
        "norm.weight": (384,),
        "norm.bias": (384,),
        "head.weight": (1000, 384),
        "head.bias": (1000,),
    }
    layers = {"attn.qkv": (1152, 384), "attn.proj": (384, 384), "mlp.fc1": (1536, 384), "mlp.fc2": (384, 1536)}
    for block in range(12):
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{block}.{norm}.weight": (384,), f"blocks.{block}.{norm}.bias": (384,)}
        for layer, shape in layers.items():
            shapes |= {f"blocks.{block}.{layer}.weight": shape, f"blocks.{block}.{layer}.bias": shape[:1]}
    return shapes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tensors]:
    path = tmp_path_factory.mktemp("timm") / "model.safetensors"
    return str(path), random_file(path, timm_vit_small())


def test_timms_vit_small_loads_into_all_five_depths(checkpoint: tuple[str, Tensors]) -> None:
    """Block by block: every level's slice holds the file's tensors, and so does a server model of fewer blocks."""
    path, file = checkpoint
    assert sum(value.numel() for value in file.values()) == 22_050_664  # as timm counts it
    fresh = make_model("vit-s", ModelOptions(shape=(3, 224, 224)))
    model = with_pretrained(fresh, path)
    splitter = make_splitter(model.layout, "layer", 5)
    for level, depth in enumerate(range(8, 13)):
        state = splitter.slice(model.layout, level, 0).take(model.initial)
        assert len(state) == 8 + 12 * depth
        for name, value in state.items():
            assert torch.equal(value, fresh.initial[name] if name.startswith("head.") else file[name]), name
    shallow = with_pretrained(make_model("vit-s", ModelOptions(shape=(3, 224, 224), depth=2)), path).initial
    assert len(shallow) == 8 + 12 * 2
    assert all(torch.equal(value, file[name]) for name, value in shallow.items() if not name.startswith("head."))


def test_the_same_classes_keep_the_head(checkpoint: tuple[str, Tensors]) -> None:
    path, file = checkpoint
    model = with_pretrained(make_model("vit-s", ModelOptions(shape=(3, 224, 224), classes=1000, depth=1)), path)
    assert all(torch.equal(value, file[name]) for name, value in model.initial.items())


def test_other_images(checkpoint: tuple[str, Tensors]) -> None:
    """Grey, at 32 x 32 in patches of 16: the filters of three colours summed, and a grid of 2 x 2 positions."""
    path, file = checkpoint
    initial = with_pretrained(make_model("vit-s", ModelOptions(shape=(1, 32, 32), patch=16, depth=1)), path).initial
    grey = file["patch_embed.proj.weight"]
    torch.testing.assert_close(initial["patch_embed.proj.weight"][:, 0], grey[:, 0] + grey[:, 1] + grey[:, 2])
    assert initial["pos_embed"].shape == (1, 5, 384)
    assert torch.equal(initial["pos_embed"][:, 0], file["pos_embed"][:, 0])


@pytest.mark.parametrize("grid", [(8, 8), (24, 24), (7, 20)])
def test_positions_are_interpolated(grid: tuple[int, int]) -> None:
    """A constant stays constant; a slope keeps its values at the patches' centres, away from the border."""
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    old = torch.stack([torch.full((16, 16), 3.0), rows, columns], dim=-1).view(1, 256, 3)
    token = torch.tensor([[[7.0, 8.0, 9.0]]])
    new = resize_positions(torch.cat([token, old], dim=1), grid)
    assert torch.equal(new[:, :1], token)
    constant, down, across = new[0, 1:].view(*grid, 3).unbind(-1)
    torch.testing.assert_close(constant, torch.full(grid, 3.0))
    # Centre i of n patches lies at (i + 1/2) 16 / n - 1/2 in the old grid; four rows at each border see the edge.
    for found, size in ((down[:, grid[1] // 2], grid[0]), (across[grid[0] // 2], grid[1])):
        expected = (torch.arange(size) + 0.5) * 16 / size - 0.5
        inner = (expected > 4) & (expected < 11)
        assert inner.sum() >= 2
        torch.testing.assert_close(found[inner], expected[inner], rtol=1e-4, atol=1e-4)


def test_positions_of_the_same_grid_are_kept_as_they_are() -> None:
    old = torch.rand(1, 17, 3)
    assert resize_positions(old, (4, 4)) is old


def resnet(depth: str = "resnet26", classes: int = 10, extend: Extend | None = None) -> Model:
    return make_model(depth, ModelOptions(width=1 / 16, classes=classes), seed=3, extend=extend)


def test_resnets(tmp_path: Path) -> None:
    """Torchvision's names; of a deeper one the first blocks; a head of other classes stays, and so do early exits."""
    path = tmp_path / "resnet34.safetensors"
    deeper = resnet("resnet34", classes=7)
    save_file({n: v.contiguous() for n, v in deeper.initial.items() if not n.endswith("num_batches_tracked")}, path)
    for fresh in (resnet(), resnet(extend=exits(5))):
        loaded = with_pretrained(fresh, str(path)).initial
        assert loaded.keys() == fresh.initial.keys()
        for name, value in loaded.items():
            own = name.startswith(("fc.", "exits.")) or name.endswith("num_batches_tracked")
            assert torch.equal(value, (fresh if own else deeper).initial[name]), name


def test_a_last_exit_of_the_same_classes_is_the_head(tmp_path: Path) -> None:
    path, plain = tmp_path / "plain.safetensors", make_model("resnet26", ModelOptions(width=1 / 16), seed=9)
    save_file({name: value.contiguous() for name, value in plain.initial.items()}, path)
    loaded = with_pretrained(resnet(extend=exits(5)), str(path)).initial
    assert all(torch.equal(loaded[name], value) for name, value in plain.initial.items())


def test_half_precision_files(tmp_path: Path) -> None:
    model = resnet()
    path = tmp_path / "half.safetensors"
    save_file({name: value.half().contiguous() for name, value in model.initial.items()}, path)
    loaded = with_pretrained(model, str(path)).initial
    assert {name: value.dtype for name, value in loaded.items()} == {n: v.dtype for n, v in model.initial.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer1.0.conv1.weight": None}, "lacks 'layer1.0.conv1.weight'; does it hold a smaller or another model?"),
        (
            {"layer1.0.conv3.weight": torch.ones(1)},
            "holds 'layer1.0.conv3.weight', which the model lacks; is it another model?",
        ),
        ({"bn1.weight": torch.ones(5)}, "'bn1.weight' has shape (5,), the model's (4,); set the model's sizes"),
        ({"bn1.weight": torch.full((4,), torch.nan)}, "holds values that are not finite"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: dict[str, torch.Tensor | None], words: str) -> None:
    model, path = resnet(), tmp_path / "odd.safetensors"
    state = {**model.initial, **change}
    save_file({name: value.contiguous() for name, value in state.items() if value is not None}, path)
    with pytest.raises(ConfigError) as problem:
        with_pretrained(model, str(path))
    assert str(problem.value).startswith(f"model.pretrained: {path}")
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("weights.pth", "got 'weights.pth', expected a .safetensors file: pickled files can run code; convert it"),
        ("pytorch_model.bin", "expected a .safetensors file"),
        ("nowhere/model.safetensors", "nowhere/model.safetensors: no such file"),
        ("vit-small", "expected a .safetensors file or a name on the Hub such as timm/vit_small"),
        ("broken.safetensors", "broken.safetensors: not a safetensors file"),
    ],
)
def test_no_such_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ConfigError) as problem:
        with_pretrained(resnet(), where)
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)


def hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception | None) -> list[tuple[str, str]]:
    """A Hub that gives a file, or fails, or is not installed; and what it was asked for."""
    asked = []

    def hf_hub_download(name: str, file: str) -> str:
        asked.append((name, file))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    module = types.SimpleNamespace(hf_hub_download=hf_hub_download) if answer is not None else None
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", module)
    return asked


NAME = "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = resnet(), make_model("resnet26", ModelOptions(width=1 / 16), seed=9)
    save_file({name: value.contiguous() for name, value in other.initial.items()}, tmp_path / "cached")
    asked = hub(monkeypatch, tmp_path / "cached")
    loaded = with_pretrained(model, NAME).initial
    assert asked == [(NAME, "model.safetensors")]
    assert all(torch.equal(loaded[name], other.initial[name]) for name in loaded)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "is on the Hub, which needs: pip install 'incofl[hub]'"),
        (ConnectionError("no route to host\nand more"), "from the Hub (no route to host)"),
        (OSError(), "from the Hub (OSError)"),
    ],
)
def test_no_hub(monkeypatch: pytest.MonkeyPatch, answer: Exception | None, words: str) -> None:
    """One line that says how to do without."""
    hub(monkeypatch, answer)
    with pytest.raises(ConfigError) as problem:
        with_pretrained(resnet(), NAME)
    message = str(problem.value)
    assert words in message
    assert message.endswith(
        f"; or download model.safetensors from huggingface.co/{NAME} elsewhere and set model.pretrained to that file"
    )
    assert "\n" not in message


def test_a_run_starts_from_them_and_its_model_needs_them_no_more(tmp_path: Path) -> None:
    settings = ["model.name=tiny-vit", "model.patch=2", "rounds=1", "data.limit=60"]
    path = tmp_path / "start.safetensors"
    start = tiny_federation(*settings, "seed=5").model.initial
    save_file(start, path)
    settings.append(f"model.pretrained={path}")
    federation = tiny_federation(*settings)
    assert all(torch.equal(federation.start().shared[name], start[name]) for name in start)
    incofl.run(tiny_config(*settings), tmp_path / "run")
    path.unlink()
    assert incofl.load_model(tmp_path / "run")(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    resumed = incofl.run(tiny_config(*settings, "rounds=2"), tmp_path / "run", resume=True)
    assert (resumed["status"], resumed["rounds"]) == ("done", 2)
