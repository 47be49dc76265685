"""Forward passes and losses in bf16. These processors need no units for it here: without them it is only slow."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from incofl import run
from incofl.client import ClientInput, ClientRule, LocalSettings, train
from incofl.config import read_toml
from incofl.engine.build import build, has_bf16
from incofl.errors import ConfigError
from incofl.evaluate import evaluate
from incofl.flower import serve
from incofl.server import Server
from incofl.task import CLASSIFICATION, Metric
from tests.engine.test_vectorised import SIDE, difference, served
from tests.federations import run_rounds, tiny_config
from tests.flower.fleets import FIRST, final_state, fleet, settings
from tests.shell import Shell

BF16 = "engine.precision=bf16"


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that says it has units for bf16."""
    monkeypatch.setattr("incofl.engine.build.has_bf16", lambda: True)


def test_units_are_flags_of_the_processor(tmp_path: Path) -> None:
    known = tmp_path / "cpuinfo"
    for line, expected in {
        "flags : fpu avx512f avx512_bf16 clwb": True,
        "flags : fpu amx_tile amx_bf16": True,
        "Features : fp asimd bf16 i8mm": True,
        "flags : fpu avx512f avx512_fp16 ebf16x": False,
    }.items():
        known.write_text(f"processor : 0\n{line}\n")
        assert has_bf16(known) == expected
    assert not has_bf16(tmp_path / "missing")


def test_it_is_refused_without_units(incofl: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("incofl.engine.build.has_bf16", lambda: False)
    code, _, err = incofl("run", "--set", BF16, "--out", tmp_path / "run")
    line = "engine.precision: got 'bf16', expected float32: this processor has no units for it"
    assert (code, err) == (2, f"incofl: {line} (avx512_bf16, amx_bf16, bf16)\n")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"engine\.precision"):
        tiny_config("engine.precision=half")


def test_a_turn_is_that_of_autocast() -> None:
    """Two steps of SGD by hand: forward and loss in bf16, gradients and weights in float32; bit for bit, as all tensors
    fill whole registers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 16))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [(torch.randn(8, 12), torch.randint(3, (8,))) for _ in range(2)]

    def bf16() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    local = LocalSettings(optimizer="sgd", lr=0.1)
    upload = train(model, ClientInput(state), batches, ClientRule(), local, computing=bf16)
    plain = train(model, ClientInput(state), batches, ClientRule(), local)
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for x, y in batches:
        with bf16():
            loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert upload.update[name].dtype == torch.float32
        assert torch.equal(upload.update[name], parameter.detach() - state[name])
        assert not torch.equal(upload.update[name], plain.update[name])
        torch.testing.assert_close(upload.update[name], plain.update[name], rtol=0.1, atol=2e-3)


def test_metrics_get_float32() -> None:
    seen = []

    def note(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(output.dtype)
        return torch.tensor([output.numpy().sum(), 1.0])  # numpy knows no bf16

    model = nn.Linear(4, 2)
    task = dataclasses.replace(CLASSIFICATION, metrics={"sum": Metric(note)})
    batch = torch.randn(3, 4), torch.tensor([0, 1, 0])
    evaluate(model, model.state_dict(), [batch], task, lambda: torch.autocast("cpu", torch.bfloat16))
    assert seen == [torch.float32]


def moved(server: Server, start: Server) -> torch.Tensor:
    """How far the trained parameters are from the start, as one vector."""
    return torch.cat([(server.shared[n] - start.shared[n]).flatten() for n in sorted(start.layout.parameters)])


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize(
    "method", ["heteroavg", "incoscaffold", "heteromoon", "heterofl", "scalefl", "depthfl", "fjord", "fedfloor"]
)
def test_methods_train_in_bf16(method: str) -> None:
    """In about the direction of float32, with weights and statistics of the same types; SGD, for the sake of that."""
    settings = "local.optimizer=sgd", "local.lr=0.02", "local.momentum=0.0"
    lower, full = (build(tiny_config(f"method={method}", *settings, *more)) for more in ([BF16], []))
    ours, theirs = (run_rounds(federation, 2)[-1] for federation in (lower, full))
    assert {n: x.dtype for n, x in ours.shared.items()} == {n: x.dtype for n, x in theirs.shared.items()}
    assert all(x.isfinite().all() for x in ours.shared.values())
    a, b = moved(ours, full.start()), moved(theirs, full.start())
    assert not torch.equal(a, b)
    assert functional.cosine_similarity(a, b, 0) > 0.95


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("model", ["tiny-mlp", "tiny-resnet"])
def test_side_by_side_is_as_close_as_bf16_is(model: str) -> None:
    """Unequal batches, so that batch norm leaves out padding; in sums of float32."""
    keys = f"model.name={model}", "method=heteroavg", "local.optimizer=sgd", "local.lr=0.02", *SIDE
    lower, full = (build(tiny_config(*keys, *more)) for more in ([BF16], []))
    side, said = served(lower, True, rounds=1)
    assert not said
    turns, exact = served(lower, False, rounds=1)[0], served(full, True, rounds=1)[0]
    assert 1e-6 < difference(side, exact) < 0.02
    a, b = moved(side, lower.start()), moved(turns, lower.start())
    assert functional.cosine_similarity(a, b, 0) > 0.95


@pytest.mark.slow
@pytest.mark.usefixtures("units")
def test_the_same_bits_with_workers_and_over_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without units says so and computes in float32, which changes the bits."""
    config = tiny_config(BF16, "rounds=2", "engine.workers=1")
    run(config, tmp_path / "here", progress=False)
    assert read_toml(tmp_path / "here" / "config.toml")["engine"]["precision"] == "bf16"
    two = dataclasses.replace(config, engine=dataclasses.replace(config.engine, workers=2))
    run(two, tmp_path / "workers", progress=False)
    assert final_state(tmp_path / "here") == final_state(tmp_path / "workers")
    serve(fleet(config), config, settings(tmp_path / "there"))
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")
    grid = fleet(config)
    for client in range(config.num_clients):
        grid.add(FIRST + client, partition_id=client, precision="float32")
    serve(grid, config, settings(tmp_path / "nodes"))
    assert final_state(tmp_path / "here") != final_state(tmp_path / "nodes")
