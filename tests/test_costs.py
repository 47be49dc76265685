"""Exact counts of the paper's models, and the fit of models to devices."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from incofl.client import LocalSettings
from incofl.costs import (
    Cost,
    DeviceClass,
    activation_bytes,
    assign,
    costs,
    count_macs,
    count_on,
    from_shapes,
    human,
    load_devices,
    parse_quantity,
)
from incofl.errors import ConfigError
from incofl.models import ModelOptions, make_model
from incofl.split import make_splitter

STAGE_PARAMETERS = [4_910_922, 10_812_234, 11_181_642, 17_082_954, 17_452_362]
STAGE_MACS = [18_142_208, 27_579_392, 37_016_576, 46_453_760, 55_890_944]
WIDTH_PARAMETERS = [69_822, 275_762, 1_096_026, 4_370_090, 17_452_362]
WIDTH_MACS = [359_744, 1_137_280, 3_945_728, 14_576_128, 55_890_944]


@pytest.mark.parametrize(
    ("kind", "parameters", "macs"),
    [("stage", STAGE_PARAMETERS, STAGE_MACS), ("hetero", WIDTH_PARAMETERS, WIDTH_MACS)],
)
def test_exact_counts(kind: str, parameters: list[int], macs: list[int]) -> None:
    model = make_model("resnet26")
    found = costs(model, make_splitter(model.layout, kind, 5), LocalSettings())  # type: ignore[arg-type]
    assert [cost.parameters for cost in found] == parameters
    assert [cost.macs for cost in found] == macs


def test_means_of_the_paper() -> None:
    assert round(sum(STAGE_PARAMETERS) / 5) == 12_288_023
    assert round(sum(WIDTH_PARAMETERS) / 5) == 4_652_812


def test_one_channel() -> None:
    model = make_model("resnet26", ModelOptions(shape=(1, 32, 32)))
    (cost,) = costs(model, make_splitter(model.layout, "stage", 1), LocalSettings())
    assert cost.parameters == 17_452_362 - 2 * 64 * 49
    assert cost.macs == 55_890_944 - 2 * 64 * 49 * 16 * 16


def test_depth_scaled_too() -> None:
    model = make_model("resnet26")
    found = costs(model, make_splitter(model.layout, "hetero", 5, "scaled"), LocalSettings())
    assert [round(cost.parameters / 1e6, 2) for cost in found] == [0.02, 0.08, 0.31, 2.80, 17.45]


def test_bytes_and_memory_by_hand() -> None:
    """A tiny MLP on 8x8: 4 bytes an entry, 8 for each batch-norm counter; Adam trains with five copies."""
    model = make_model("tiny-mlp", ModelOptions(shape=(1, 8, 8)))
    splitter = make_splitter(model.layout, "layer", [1])
    adam, sgd = LocalSettings(batch_size=2), LocalSettings(batch_size=2, optimizer="sgd", momentum=0.0)
    (cost,) = costs(model, splitter, adam)
    parameters = (64 * 32 + 32) + (2 * 32 + 2 * (32 * 32 + 32)) + (32 * 10 + 10)
    assert cost.parameters == parameters
    assert cost.bytes_down == cost.bytes_up == 4 * (parameters + 2 * 32) + 8
    (plain,) = costs(model, splitter, sgd)
    assert cost.memory - plain.memory == 2 * 4 * parameters
    # Weights, what was received, gradients; once more that of the last bias, whose 10 numbers fill no register.
    activations = from_shapes(activation_bytes, model, splitter.slice(model.layout, 0, 0, client=0), 2)
    assert plain.memory == 4 * (3 * parameters + 10) + activations


def test_activation_estimate_equals_what_autograd_keeps() -> None:
    """Measured on real tensors: every storage that a backward pass needs, parameters left out."""
    model = make_model("tiny-resnet", ModelOptions(shape=(1, 8, 8)))
    from incofl.models.resnet import ResNet

    real = ResNet((2, 2), (1, 8, 8), width=1 / 8, stem="small")
    own = {parameter.untyped_storage().data_ptr() for parameter in real.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        real.train()(torch.zeros(16, 1, 8, 8))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert activation_bytes(model.template, model.example(16)) == pytest.approx(measured, rel=0.02)


def test_an_estimate_keeps_nothing() -> None:
    """Neither activations nor the graph that holds them; each estimate kept both when hooks returned tensors."""

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    module, before = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid()), alive()
    assert activation_bytes(module, torch.zeros(2, 4)) > 0
    assert alive() == before


TEXTS = ModelOptions(shape=(12,), classes=20, vocabulary=20, sequence=True)


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-mlp", "tiny-vit", "tiny-lstm", "tiny-transformer"])
def test_counts_do_not_depend_on_the_device(name: str) -> None:
    """On zeros and on the meta device, and as torch's own counter says, which looks at a real forward pass."""
    model = make_model(name, TEXTS if name in ("tiny-lstm", "tiny-transformer") else ModelOptions(shape=(1, 8, 8)))
    slice_ = make_splitter(model.layout, "hetero", [1.0]).slice(model.layout, 0)
    macs = count_on("cpu", count_macs, model, slice_, 1)
    activations = count_on("cpu", activation_bytes, model, slice_, 4)
    assert macs == count_on("meta", count_macs, model, slice_, 1)
    assert activations == count_on("meta", activation_bytes, model, slice_, 4)
    if name != "tiny-lstm":  # whose fused kernel it does not count
        module, example = model.template.to_empty(device="cpu").eval(), model.example(1)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            module(torch.zeros(example.shape, dtype=example.dtype))  # type: ignore[union-attr]
        assert macs == counter.get_total_flops() // 2


@pytest.mark.slow
def test_a_small_run_starts_without_a_compiler(tmp_path: Path) -> None:
    """Its import, and that of sympy, would take longer than everything else but torch itself."""
    script = f"""
import sys, incofl
with incofl.Run("demo", {str(tmp_path / "run")!r}, progress=False) as run:
    jobs = run.federation.schedule(0, 1)
    next(iter(incofl.engine.executor.InProcess(run.federation).train(run.server, jobs)))
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def cost(level: int, size: int) -> Cost:
    return Cost(level, (1,), 1.0, size, macs=size * 10, bytes_down=size * 4, bytes_up=size * 4, memory=size * 20)


LEVELS = [cost(0, 100), cost(1, 200), cost(2, 400)]


def test_the_largest_level_that_fits_every_limit() -> None:
    """Level 1 needs memory 4000, compute 2000, bandwidth 1600: at the limit it fits, one below it does not."""
    devices = [
        DeviceClass("free", 1),
        DeviceClass("memory", 1, memory=4000),
        DeviceClass("tight", 1, memory=3999),
        DeviceClass("compute", 1, memory=10**9, compute=2000),
        DeviceClass("bandwidth", 1, bandwidth=1599),
    ]
    assert assign(devices, LEVELS) == [2, 1, 0, 1, 0]


def test_nothing_fits() -> None:
    expected = (
        r"device class 'watch': no level fits; the smallest \(level 0\) needs memory 2 kB, has 1.5 kB; "
        r"bandwidth 800 B, has 10 B"
    )
    with pytest.raises(ConfigError, match=expected):
        assign([DeviceClass("watch", 3, memory=1500, bandwidth=10)], LEVELS)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("200 MB", 200_000_000),
        ("64kB", 64_000),
        ("1.5 mb", 1_500_000),
        ("7 B", 7),
    ],
)
def test_quantities(value: object, expected: int) -> None:
    assert parse_quantity(value, "x", ("B",)) == expected


def test_a_unit_that_begins_like_a_prefix() -> None:
    found = [parse_quantity(text, "x", ("MAC", "MACs")) for text in ("20 MAC", "20 MMAC", "2 GMACs")]
    assert found == [
        20,
        20_000_000,
        2 * 10**9,
    ]


@pytest.mark.parametrize(
    ("value", "example"),
    [
        (10, "10 MB"),
        (1.5, "1.5 MB"),
        ("7", "7 MB"),
        (5_000_000, "5 MB"),
        ("2 g", "2 GB"),
        *((value, "10 MB") for value in ("many", "-5 MB", 0, True, None, "5 XB", "nan", "5 MMAC", "1e9 B", "0 MB")),
    ],
)
def test_a_quantity_without_its_unit_is_refused_with_what_to_write(value: object, example: str) -> None:
    with pytest.raises(ConfigError, match=f'x: got .*, expected a number > 0 with its unit: write "{example}"'):
        parse_quantity(value, "x", ("B",))


def test_human() -> None:
    assert [human(v) for v in (999, 4_910_922, 17_452_362, 69_822)] == ["999", "4.91 M", "17.5 M", "69.8 k"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected \[\[device\]\] tables"),
        ("[[gadget]]\nname='x'", r"expected \[\[device\]\] tables"),
        ("[device]\nname='x'", r"got a table \[device\], expected an array of tables: write \[\[device\]\]"),
        ("device = 3", r"expected \[\[device\]\] tables"),
        ("[[device]]\nname='x'\ncount=1\nmemry='1 MB'", "device 1: unknown key 'memry'; did you mean 'memory'"),
        ("[[device]]\ncount=1", "device 1: name: got None"),
        ("[[device]]\nname='x'\ncount=0", "count: got 0, expected a whole number >= 1"),
        ("[[device]]\nname='x'\ncount=1\nmemory='lots'", r"device 1 \(x\): memory: got 'lots'"),
        ("[[device]]\nname='x'\ncount=1\nmemory=10", r'device 1 \(x\): memory: got 10, .* write "10 MB"'),
        ("[[device]]\nname='x'\ncount=1\ncompute=3", r'device 1 \(x\): compute: got 3, .* write "3 MMAC"'),
        ("[[device]]\nname='x'\ncount=1\nspeed='5 GFLOPS'", r'device 1 \(x\): speed: got .* write "10 MMAC/s"'),
        ("[[device]]\nname='x'\ncount=1\n" * 2, "two classes are called 'x', expected a name of its own for each"),
        ("[[device", "not a TOML file"),
    ],
)
def test_bad_device_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_devices(path)
