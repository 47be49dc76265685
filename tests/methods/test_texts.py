"""Every method of the table on models of texts."""

from pathlib import Path

import pytest
import torch

import incofl
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.tensors import all_finite
from tests.federations import run_rounds
from tests.texts import text_config, write_imdb, write_shakespeare, write_sst2

MODELS = ["tiny-lstm", "tiny-transformer"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three data sets."""
    folder = tmp_path_factory.mktemp("texts")
    write_shakespeare(folder, roles=8)
    write_sst2(folder)
    write_imdb(folder)
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data", ["sst2", "imdb"])
def test_a_class_per_text(root: Path, model: str, data: str) -> None:
    federation = build(text_config(root, model, f"data.name={data}", "data.clients=4", "data.alpha=100"))
    last = run_rounds(federation, 1)[-1]
    assert all_finite(last.shared)


def test_heterofl_masks_and_keeps_the_rows_of_absent_characters(root: Path) -> None:
    """Of characters that no role of the cohorts says, the head's rows keep their bits; all others move."""
    federation = build(text_config(root, "tiny-lstm", "method=heterofl"))
    first, *_, last = run_rounds(federation, 2)
    clients = {job.client for round in (0, 1) for job in federation.schedule(round, 4)}
    counts = [labels for client in clients if (labels := federation.labels(client)) is not None]
    heard = torch.stack(counts).sum(0) > 0
    assert 5 < int(heard.sum()) < 60
    for name in ("head.weight", "head.bias"):
        changed = (last.shared[name] != first.shared[name]).view(97, -1).any(1)
        assert torch.equal(changed, heard)


def test_nothing_is_measured_where_there_are_no_statistics(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "measure", None)
    config = text_config(root, "tiny-lstm", "method=heterofl", "rounds=1", "engine.workers=1")
    assert config.buffers == "static"
    assert incofl.run(config, tmp_path / "r")["accuracy"] > 0


def state(folder: Path) -> bytes:
    return (folder / "checkpoint" / "state.safetensors").read_bytes()


def test_workers_and_an_interruption_do_not_change_a_bit(root: Path, tmp_path: Path) -> None:
    """Three rounds in this process; with two workers; and two rounds, then the last."""

    def config(workers: int, rounds: int) -> incofl.Config:
        settings = (f"engine.workers={workers}", f"rounds={rounds}", "eval.every=3")
        return text_config(root, "tiny-lstm", *settings)

    incofl.run(config(1, 3), tmp_path / "a")
    incofl.run(config(2, 3), tmp_path / "b")
    incofl.run(config(1, 2), tmp_path / "c")
    incofl.run(config(1, 3), tmp_path / "c", resume=True)
    assert state(tmp_path / "a") == state(tmp_path / "b") == state(tmp_path / "c")


@pytest.mark.parametrize("model", MODELS)
def test_double_precision(root: Path, model: str, double: None) -> None:
    federation = build(text_config(root, model))
    last = run_rounds(federation, 1)[-1]
    assert {value.dtype for value in last.shared.values()} == {torch.float64}


def test_it_learns(root: Path, tmp_path: Path) -> None:
    """Better than the most frequent character, at every size."""
    summary = incofl.run(
        text_config(root, "tiny-lstm", "rounds=6", "cohort=6", "local.epochs=4", "eval.every=6"), tmp_path / "r"
    )
    test = build(text_config(root, "tiny-lstm")).data.test.y
    most_frequent = float(torch.bincount(test.flatten()).max()) / test.numel()
    assert min(summary["accuracy_by_level"]) > most_frequent + 0.1
