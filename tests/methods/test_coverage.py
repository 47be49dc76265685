"""Steps by coverage, and the control that scales what InCo mixes."""

import dataclasses
from pathlib import Path

import pytest
import torch

import incofl
from incofl.client import Upload
from incofl.engine.federation import Federation
from incofl.errors import ConfigError
from incofl.methods.coverage import Coverage
from incofl.methods.deepscale import DeepScale
from incofl.server import Server
from incofl.tensors import Tensors
from incofl.transform import Context
from tests.federations import tiny_config, tiny_federation
from tests.split.test_growth import tensors

DEEP, STEM = "layer2.1.conv1.weight", "conv1.weight"


@pytest.fixture(scope="module")
def federation() -> Federation:
    return tiny_federation("method=heteroavg+coverage", "coverage.c=2")


def upload(federation: Federation, client: int, level: int, value: float, examples: int = 10) -> Upload:
    """An upload whose update is one value everywhere."""
    piece = federation.slice(level, 0)
    update = {
        name: torch.full(piece.shapes[name], value) for name in federation.model.layout.parameters & piece.index.keys()
    }
    return Upload(client, level, piece, update, {}, examples, 1)


def moved(federation: Federation, server: Server, uploads: list[Upload]) -> Tensors:
    """How far a round moves the shared parameters."""
    changes = federation.method.server.aggregate(server, [uploads])
    for transform in federation.method.transforms:
        changes, _ = changes.transformed(transform, server)
    after = server.advance(changes)
    return {name: after.shared[name] - server.shared[name] for name in federation.model.layout.parameters}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_by_the_number_of_holders(federation: Federation, weighting: str) -> None:
    """Three clients hold the stem, one of them the deep block: with c = 2, steps of 3/5 and 1/3."""
    rule = dataclasses.replace(federation.method.server, weighting="samples" if weighting == "samples" else "uniform")
    federation = dataclasses.replace(federation, method=dataclasses.replace(federation.method, server=rule))
    uploads = [upload(federation, client, level, 1.0) for client, level in ((0, 0), (1, 0), (2, 2))]
    step = moved(federation, federation.start(), uploads)
    torch.testing.assert_close(step[STEM], torch.full_like(step[STEM], 3 / 5))
    torch.testing.assert_close(step[DEEP], torch.full_like(step[DEEP], 1 / 3))


def test_by_the_spread_of_uploads() -> None:
    """Updates 1, 2, 3 of the stem: mean 2, variance 1, S = 4 - 1/3, so 2 S / (S + 1/3) = 11/6; alone, by the count."""
    federation = tiny_federation("method=heteroavg+coverage", "coverage.kind=signal", "coverage.c=2")
    assert federation.method.server.squares
    uploads = [
        upload(federation, client, level, value) for client, level, value in ((0, 0, 1.0), (1, 0, 2.0), (2, 2, 3.0))
    ]
    step = moved(federation, federation.start(), uploads)
    torch.testing.assert_close(step[STEM], torch.full_like(step[STEM], 11 / 6))
    torch.testing.assert_close(step[DEEP], torch.full_like(step[DEEP], 3 * 1 / 3))


def test_what_nobody_has_in_common_does_not_move() -> None:
    """Updates 1 and -1: S = 0."""
    federation = tiny_federation("method=heteroavg+coverage", "coverage.kind=signal")
    step = moved(federation, federation.start(), [upload(federation, c, 0, v) for c, v in ((0, 1.0), (1, -1.0))])
    assert not step[STEM].any()


def test_squares_of_normalised_updates_are_refused() -> None:
    federation = tiny_federation("method=heteronova+coverage", "coverage.kind=signal")
    sent = dataclasses.replace(upload(federation, 0, 0, 1.0), normaliser=2.0)
    with pytest.raises(ConfigError, match=r"coverage\.kind: got 'signal', expected 'count'"):
        federation.method.server.aggregate(federation.start(), [[sent]])


@pytest.mark.parametrize("settings", [("+coverage", "coverage.c=0"), ("+deepscale", "deepscale.factor=1")])
def test_without_effect_it_is_the_method_itself(settings: tuple[str, str], tmp_path: Path) -> None:
    added, option = settings
    incofl.run(tiny_config("method=heteroavg"), tmp_path / "plain", progress=False)
    incofl.run(tiny_config(f"method=heteroavg{added}", option), tmp_path / "other", progress=False)
    first, second = tensors(tmp_path / "plain"), tensors(tmp_path / "other")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_inco_mixes_is_scaled(federation: Federation) -> None:
    layout = federation.model.layout
    update = {name: torch.ones(layout.shapes[name]) for name in layout.parameters}
    new, _, _ = DeepScale(factor=0.25)(update, {}, Context(layout))
    assert {name for name, value in new.items() if float(value.flatten()[0]) == 0.25} == set(layout.shallow)
    assert {float(value.flatten()[0]) for value in new.values()} == {0.25, 1.0}


def test_one_more_holder_is_a_longer_step() -> None:
    factors = []
    for holders in (1.0, 2.0, 8.0):
        context = Context(tiny_federation().model.layout, weight={STEM: torch.full((1, 1, 1, 1), holders)})
        new, _, record = Coverage()({STEM: torch.ones(8, 1, 3, 3)}, {}, context)
        factors.append(float(new[STEM].mean()))
        assert record[STEM]["factor"] == pytest.approx(factors[-1])
    assert factors == pytest.approx([1 / 2, 2 / 3, 8 / 9])
