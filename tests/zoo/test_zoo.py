"""Every architecture of the zoo: what is found in it, that narrow slices are exact, and that it trains."""

import copy
import math
import runpy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import incofl
from incofl.layout import Layout
from incofl.split import Slice, Splitter, submodel
from incofl.tensors import call, map_inputs, num_examples
from tests.zoo.models import FOUND, ZOO, Found

pytestmark = pytest.mark.filterwarnings("ignore")  # of code that is not ours
FAST = ("bert", "llama", "hf-resnet", "convnext", "gpt2-lm")  # in ``make test``; the others are slow
NORMS = ("Norm", "Norm2d", "GRN", "NormActivation")  # how the names of classes end that compute over channels
CHANNELS_FIRST = ("GroupNorm", "BitGroupNormActivation", "LayerNorm2d", "PoolFormerGroupNorm", "SqueezeBertLayerNorm")
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ZOO]


@cache
def found(name: str) -> tuple[nn.Module, Layout]:
    """The module of an architecture, with random weights, and its layout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ZOO[name].make()
        return module, Layout.infer(module, ZOO[name].example)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found(name: str) -> None:
    _, layout = found(name)
    assert Found(layout.depth, len(layout.narrow_axes), len(layout.shallow)) == FOUND[name]


@pytest.mark.parametrize("name", [param for param in NAMES if FOUND[str(param.values[0])].axes])
def test_a_slice_is_the_full_network_with_the_rest_zeroed(name: str) -> None:
    """In float64 and for three widths; norms are computed over the channels that are kept."""
    module, layout = found(name)
    module = shaken(module)
    for share in (0.25, 0.5, 0.75):
        slice_ = Splitter((share,), (layout.depth,)).slice(layout, 0)
        small = submodel(module, layout, slice_)
        small.load_state_dict(slice_.take(module.state_dict()), strict=not layout.tied)
        full = zeroed(module, small, slice_)
        example = map_inputs(
            lambda x: torch.rand_like(x, dtype=torch.float64) if x.is_floating_point() else x, ZOO[name].example
        )
        with torch.no_grad():
            expected, output = call(full, example), call(small.eval(), example)
        assert output.isfinite().all()
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def shaken(module: nn.Module) -> nn.Module:
    """A copy in float64 in which every entry has an effect."""
    module, generator = copy.deepcopy(module).double().eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for entry in module.state_dict(keep_vars=True).values():
            if entry.is_floating_point():
                entry.copy_(0.1 + 0.5 * torch.rand(entry.shape, generator=generator) - 0.3 * (entry.dim() > 1))
    return module


def zeroed(module: nn.Module, small: nn.Module, slice_: Slice) -> nn.Module:
    """A copy with zeros outside of a slice, whose norms are those of the small model."""
    full = copy.deepcopy(module)
    with torch.no_grad():
        for name, value in full.state_dict(keep_vars=True).items():
            if name in slice_.index and value.is_floating_point():
                only = {name: torch.zeros_like(value)}
                slice_.write(slice_.take({name: value}), only)
                value.copy_(only[name])
    for path, norm in full.named_modules():
        kept = slice_.index.get(f"{path}.weight", slice_.index.get(f"{path}.gamma", ()))
        if kept and type(norm).__name__.endswith(NORMS) and not isinstance(norm, nn.modules.batchnorm._NormBase):
            first = type(norm).__name__ in CHANNELS_FIRST or getattr(norm, "data_format", "") == "channels_first"
            narrow = partial(over_kept, small.get_submodule(path), kept[-1], 1 if first else -1)
            norm.forward = narrow
        if isinstance(norm, nn.Conv2d) and "Standardized" in type(norm).__name__:  # over the inputs that are kept
            narrow = partial(over_kept_weights, small.get_submodule(path), norm.out_channels, kept[:2])
            vars(norm)["forward"] = narrow
    return full


def over_kept(norm: nn.Module, kept: Any, dim: int, x: Tensor, *others: Any) -> Tensor:
    at = torch.arange(x.shape[dim])[kept]
    out = norm(x.index_select(dim, at), *others)
    return torch.zeros_like(x).index_copy(dim, at, out.to(x.dtype))


def over_kept_weights(conv: nn.Module, size: int, kept: tuple[Any, ...], x: Tensor) -> Tensor:
    out: Tensor = conv(x[:, kept[1]])
    return out.new_zeros(len(out), size, *out.shape[2:]).index_copy(1, torch.arange(size)[kept[0]], out)


CASES = [
    pytest.param(*param.values, method, marks=param.marks, id=f"{param.values[0]}-{method}")
    for param in NAMES
    for method in ("incoavg", "heterofl")
    if (FOUND[str(param.values[0])].blocks if method == "incoavg" else FOUND[str(param.values[0])].axes)
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_it_trains(name: str, method: str, tmp_path: Path) -> None:
    module, layout = found(name)
    example = ZOO[name].example
    generator = torch.Generator().manual_seed(0)
    images = partial(torch.rand, generator=generator)
    inputs = map_inputs(lambda x: images(12, *x.shape[1:]) if x.is_floating_point() else torch.cat([x] * 4), example)
    with torch.no_grad():
        output = call(copy.deepcopy(module).eval(), example)
    targets = torch.randint(10, (num_examples(inputs), *output.shape[1:-1]), generator=generator)
    data = incofl.Data((inputs, targets), classes=10)
    config = {
        "rounds": 2,
        "cohort": 2,
        "data": {"clients": 2, "partition": "iid"},
        "split": {"levels": 2},
        "local": {"epochs": 1, "batch_size": 6, "lr": 0.01},
        "engine": {"workers": 1},
        "heterofl": {"mask": output.dim() == 2, "label_rows": output.dim() == 2},
    }
    task = incofl.Task(loss) if output.dim() > 2 else None
    result = incofl.run(config, tmp_path / "run", model=(module, layout), data=data, method=method, task=task)
    losses = [row["loss"] for row in result.history]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    before, after = module.state_dict(), result.model().state_dict()
    assert any(not torch.equal(before[entry], value) for entry, value in after.items())


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_the_table_in_the_documents_is_up_to_date() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert runpy.run_path(str(docs / "zoo.py"))["page"]() == (docs / "zoo.md").read_text()
