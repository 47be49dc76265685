"""What the engine's options choose."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

import incofl
from incofl.engine.backend import make_executor
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.processes import WorkerProcesses
from incofl.engine.worker import Worker
from incofl.errors import ConfigError
from incofl.path import image_format
from tests.federations import tiny_config


@pytest.mark.parametrize(
    ("setting", "environment", "workers"), [("auto", "3", 3), ("auto", None, 1), ("2", "3", 2), ("auto", "1", 1)]
)
def test_how_many_workers(setting: str, environment: str | None, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config first, then the environment; a tiny job is done in this process."""
    monkeypatch.delenv("INCOFL_WORKERS", raising=False)
    if environment is not None:
        monkeypatch.setenv("INCOFL_WORKERS", environment)
    config = tiny_config(f"engine.workers={setting}")
    executor = make_executor(config, build(config), rounds=1)
    try:
        if workers == 1:
            assert isinstance(executor, InProcess)
        else:
            assert isinstance(executor, WorkerProcesses)
            assert executor._workers == workers
    finally:
        executor.close()


def test_a_long_job_gets_a_worker_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INCOFL_WORKERS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    config = tiny_config()
    executor = make_executor(config, build(config), rounds=10**9)
    try:
        assert isinstance(executor, WorkerProcesses)
        assert executor._workers == 3
    finally:
        executor.close()


@pytest.mark.parametrize("wish", ["0", "many", "-1", "1.5"])
def test_a_wrong_wish_is_refused(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INCOFL_WORKERS", wish)
    config = tiny_config()
    with pytest.raises(ConfigError, match=r"INCOFL_WORKERS: got .* expected a whole number >= 1"):
        make_executor(config, build(config), rounds=1)


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"engine.compile: got true, expected a C\+\+ compiler"):
        build(tiny_config("engine.compile=true"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    """Up to rounding: fused kernels add up in another order."""
    config = tiny_config(
        "rounds=1", "cohort=2", "model.name=tiny-mlp", "split.kind=layer", "split.levels=[6]", "local.drop_last=true",
        "local.lr=1e-4", "data.limit=100", "data.clients=2", "data.partition=iid", "engine.workers=1",
    )  # fmt: skip
    incofl.run(config, tmp_path / "eager")
    compiled = dataclasses.replace(config, engine=dataclasses.replace(config.engine, compile=True))
    incofl.run(compiled, tmp_path / "compiled")
    eager, fused = (incofl.load_model(tmp_path / name).state_dict() for name in ("eager", "compiled"))
    for name, value in eager.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("channels", "stride", "last"), [(15, 2, False), (16, 2, True), (2, 1, True)])
def test_narrow_shortcuts_are_not_computed_channels_last(channels: int, stride: int, last: bool) -> None:
    """Of a strided 1x1 convolution of few channels oneDNN's backward pass destroys the heap."""
    module = torch.nn.Sequential(torch.nn.Conv2d(channels, 16, 1, stride), torch.nn.Conv2d(16, 16, 3))
    assert image_format(module) == (torch.channels_last if last else torch.contiguous_format)


def test_a_model_that_cannot_compute_channels_last_trains_all_the_same(tmp_path: Path) -> None:
    """In this process and in others, with the same bits, and without drawing random numbers."""
    settings = ["model.name=tests.own_models:viewing", "rounds=2", "cohort=2", "data.clients=4", "data.limit=80"]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for workers in (1, 2):
        summary = incofl.run(tiny_config(*settings, f"engine.workers={workers}"), tmp_path / str(workers))
        assert summary["rejected"] == 0
    assert torch.equal(torch.rand(3), expected)
    first, second = ((tmp_path / str(workers) / "checkpoint" / "state.safetensors").read_bytes() for workers in (1, 2))
    assert first == second


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("settings", "last"),
    [
        (["model.name=tiny-resnet", "model.width=2"], True),
        (["model.name=tiny-resnet", "model.width=4", "method=scalefl"], True),  # several outputs
        (["model.name=tests.own_models:viewing"], False),
    ],
)
def test_channels_last_where_the_model_can(
    settings: list[str], last: bool, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if dtype == torch.float64:
        request.getfixturevalue("double")
    worker = Worker(build(tiny_config(*settings)))
    for level in range(3):
        module = worker.module(level, 0)
        x = worker.input(module, torch.zeros(2, 3, 8, 8))
        weights = [value for value in module.state_dict().values() if value.dim() == 4]
        for value in (x, *(weight for weight in weights if weight.shape[1] > 1 and weight.shape[2] > 1)):
            assert value.is_contiguous(memory_format=torch.channels_last) == last
            assert value.is_contiguous() == (not last)
        assert all(parameter.grad is None for parameter in module.parameters())
