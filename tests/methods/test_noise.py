"""Noise is as large as it says, the same for the same seed, and touches nothing else."""

import dataclasses
from pathlib import Path

import pytest
import torch

from incofl.client import Upload
from incofl.engine.build import build_method
from incofl.engine.executor import InProcess
from incofl.methods.noise import UploadNoise, add_noise_
from incofl.tensors import clone
from incofl.transform import Context
from tests.federations import run_rounds, tiny_config, tiny_federation
from tests.methods.quadratic import LAYOUT


def test_its_size_follows_the_tensor() -> None:
    update = 0.01 * torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    before = update.clone()
    size = add_noise_(update, 0.5, torch.Generator().manual_seed(1))
    noise = update - before
    assert float(noise.std()) == pytest.approx(0.5 * float(before.std()), rel=0.02)
    assert size == pytest.approx(float(noise.norm()), rel=1e-3)
    assert abs(float(noise.mean())) < 1e-4


def test_a_constant_tensor_has_no_noise() -> None:
    update = torch.full((5,), 0.3)
    assert add_noise_(update, 1.0, torch.Generator()) == 0
    assert torch.equal(update, torch.full((5,), 0.3))


def test_taps_that_nobody_trained_do_not_count_and_stay_zero() -> None:
    """Two 3x3 kernels whose centres moved by 1 and 3: deviation 1, not sqrt(10/18 - 16/324) = 0.711; noise there."""
    update = torch.zeros(2, 1, 3, 3)
    update[:, 0, 1, 1] = torch.tensor([1.0, 3.0])
    expected = torch.zeros_like(update)
    expected[:, 0, 1, 1] = 0.5 * torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(1))[:, 0, 1, 1]
    before = update.clone()
    size = add_noise_(update, 0.5, torch.Generator().manual_seed(1))
    torch.testing.assert_close(update - before, expected, rtol=0, atol=1e-6)
    assert size == pytest.approx(float(expected.norm()), rel=1e-6)


def test_what_did_not_move_at_all_has_no_noise() -> None:
    update = torch.zeros(2, 3)
    assert add_noise_(update, 1.0, torch.Generator()) == 0
    assert torch.equal(update, torch.zeros(2, 3))


@pytest.fixture(scope="module")
def upload() -> Upload:
    federation = tiny_federation()
    (uploads,) = InProcess(federation).train(federation.start(), federation.schedule(0, 1))
    assert isinstance(uploads[0], Upload)
    return uploads[0]


def test_uploads_by_seed_round_and_client(upload: Upload) -> None:
    def noisy(seed: int = 0, round: int = 3, client: int = 7) -> Upload:
        copy = dataclasses.replace(upload, client=client, update=clone(upload.update))
        context = Context(LAYOUT, round, seed)
        return UploadNoise(uploads=1.0)(copy, context)

    name = next(iter(upload.update))
    first = noisy()
    assert not torch.equal(first.update[name], upload.update[name])
    assert torch.equal(first.update[name], noisy().update[name])
    assert first.buffers is upload.buffers
    for other in (noisy(seed=1), noisy(round=4), noisy(client=8)):
        assert not torch.equal(first.update[name], other.update[name])


def test_it_is_off_unless_asked_for() -> None:
    (off,), (on,) = (build_method(tiny_config(*more)).uploads for more in ([], ["noise.uploads=0.5"]))
    assert off == UploadNoise(uploads=0.0)
    assert on == UploadNoise(uploads=0.5)
    upload = Upload(update={"w": torch.ones(2, 2)})
    assert torch.equal(off(upload, Context(LAYOUT)).update["w"], torch.ones(2, 2))


def test_noise_on_uploads_reaches_the_server_in_every_tensor() -> None:
    quiet = run_rounds(tiny_federation("method=heteroavg"), 1)[-1]
    noisy = run_rounds(tiny_federation("method=heteroavg", "noise.uploads=1.0"), 1)[-1]
    moved = {name for name in quiet.shared if not torch.equal(quiet.shared[name], noisy.shared[name])}
    assert moved == set(quiet.shared) - quiet.layout.buffers


def test_noise_on_deep_layers_alone() -> None:
    quiet = run_rounds(tiny_federation("method=heteroavg"), 1)[-1]
    noisy = run_rounds(tiny_federation("method=heteroavg+noise"), 1)[-1]
    moved = {name for name in quiet.shared if not torch.equal(quiet.shared[name], noisy.shared[name])}
    assert moved == set(quiet.layout.shallow)


def test_no_noise_on_deep_layers_is_the_plain_method() -> None:
    quiet = run_rounds(tiny_federation("method=heteroavg"), 2)[-1]
    noisy = run_rounds(tiny_federation("method=heteroavg+noise", "noise.deep=0.0"), 2)[-1]
    assert all(torch.equal(quiet.shared[name], noisy.shared[name]) for name in quiet.shared)


def test_its_record(tmp_path: Path) -> None:
    import json

    from incofl.engine.run import run

    run(tiny_config("method=heteroavg+noise", "rounds=1"), tmp_path)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["noise"]
    for entry in row["noise"].values():
        # As many standard deviations as numbers: the norms are alike.
        assert 0.3 < entry["norm_change"] / entry["norm_deep"] < 3
