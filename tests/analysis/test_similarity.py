"""Clients' models computed again, and how similar they are."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from incofl.analysis.analyze import Options, evenly, jsonable
from incofl.analysis.clients import Member, Replay, choose, common_points, rows, stage_name
from incofl.analysis.runs import RecordedRun, by_seed
from incofl.analysis.similarity import mean_over_pairs, similarity
from incofl.client import Upload
from incofl.config import Config
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.run import run as run_federation
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError, RunError
from tests.federations import FAMILIES, family_config, tiny_config, tiny_federation
from tests.texts import write_shakespeare, write_sst2

FEW = Options(clients=4, examples=40, history=2)


def record(config: Config, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], Upload]:
    """Makes a run in this process, and keeps what its clients send, by round and client."""
    sent: dict[tuple[int, int], Upload] = {}

    class Recording(InProcess):
        def train(self, server, jobs) -> Iterator[list[Upload]]:  # type: ignore[no-untyped-def]
            for uploads in super().train(server, jobs):
                sent.update({(server.round, upload.client): upload for upload in uploads})
                yield list(uploads)

    monkeypatch.setattr(sys.modules["incofl.engine.backend"], "InProcess", Recording)
    monkeypatch.setenv("INCOFL_WORKERS", "1")
    run_federation(config, out)
    return sent


@pytest.mark.parametrize(
    ("method", "extra"),
    [("incoavg", ()), ("heteroscaffold", ()), ("fedrolex", ()), ("scalefl", ("model.name=tiny-resnet",))],
)
def test_a_turn_computed_again_gives_the_same_bits(
    method: str, extra: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of every client of the last round, from what is on disk after the round before it."""
    config = tiny_config(f"method={method}", "data.limit=150", "rounds=2", "record.every=1", *extra)
    record(config, tmp_path / "run", monkeypatch)
    sent = record(
        tiny_config(f"method={method}", "data.limit=150", "rounds=3", *extra), tmp_path / "longer", monkeypatch
    )
    replay = Replay(RecordedRun(tmp_path / "run"))
    server = replay.server(2)
    again = 0
    for (round, client), upload in sent.items():
        if round == 2:
            trained = replay.train(server, Member(client, upload.level))
            assert all(torch.equal(value, upload.update[name]) for name, value in trained.update.items())
            assert all(torch.equal(value, upload.buffers[name]) for name, value in trained.buffers.items())
            again += 1
    assert again == 4


def test_the_model_of_a_client_is_what_it_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = record(tiny_config("data.limit=150", "rounds=2", "record.every=1"), tmp_path, monkeypatch)
    replay = Replay(RecordedRun(tmp_path))
    (_, client), upload = next(entry for entry in sent.items() if entry[0][0] == 1)
    server, member = replay.server(1), Member(client, upload.level)
    model = replay.model(server, member)
    assert not model.training
    received = replay.slice(server, member).take(server.state(upload.level))
    for name, value in model.named_parameters():
        torch.testing.assert_close(value - received[name], upload.update[name])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, upload.buffers[name])


def test_earlier_rounds_of_clients_that_remember_are_refused(tmp_path: Path) -> None:
    """Before the first round they remember nothing, after the last it is on disk, in between it is not."""
    config = tiny_config("method=heteromoon", "data.limit=150", "rounds=2", "record.every=1")
    run_federation(config, tmp_path)
    run = RecordedRun(tmp_path)
    replay = Replay(run)
    assert (run.recorded, replay.rounds) == ([0, 1, 2], [0, 2])
    with pytest.raises(RunError, match="heteromoon remembered after round 1 is not on disk, expected one of"):
        replay.server(1)
    assert [entry.round for entry in similarity(run, FEW).history] == [2]


def test_clients_are_chosen_evenly_over_the_levels() -> None:
    federation = tiny_federation()  # levels of 4, 3 and 3 clients
    assert [member.client for member in choose(federation, 10)] == list(range(10))
    few = choose(federation, 5)
    assert [member.level for member in few] == [0, 0, 1, 1, 2]
    assert all(federation.level_of(member.client) == member.level for member in few)
    assert few == choose(federation, 5)
    assert few != choose(tiny_federation("seed=1"), 5)
    assert {member.level for member in choose(tiny_federation("method=allsmall"), 5)} == {0}


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    out = tmp_path_factory.mktemp("tiny") / "run"
    run_federation(tiny_config("data.limit=200", "rounds=4", "record.every=1"), out)
    return RecordedRun(out)


def test_a_run(tiny_run: RecordedRun) -> None:
    found = similarity(tiny_run, Options(clients=5, examples=60, history=3))
    assert found.points == ("layer1", "layer2")
    assert found.cka.shape == (2, 5, 5)
    assert found.examples == 60
    np.testing.assert_allclose(found.cka, found.cka.transpose(0, 2, 1))
    np.testing.assert_allclose(np.diagonal(found.cka, axis1=1, axis2=2), 1)
    assert ((found.cka >= 0) & (found.cka <= 1 + 1e-12)).all()
    assert [entry.round for entry in found.history] == [1, 3, 4]
    assert found.history[-1].mean_by_depth == found.mean_by_depth
    assert [entry.accuracy for entry in found.history] == [tiny_run.rows[r - 1]["accuracy"] for r in (1, 3, 4)]
    # Five pairs or more of each kind: 2 within a level, 8 between levels, 10 in all.
    for every, within, between in zip(found.mean_by_depth, found.within_level, found.between_levels, strict=True):
        assert every == pytest.approx((2 * (within or 0) + 8 * (between or 0)) / 10, abs=1e-5)
    assert json.loads(json.dumps(jsonable(found), allow_nan=False))["correlation"]["layer2"]["points"] == 3


def test_the_same_again_and_another_round(tiny_run: RecordedRun) -> None:
    found = similarity(tiny_run, FEW)
    assert jsonable(similarity(tiny_run, FEW)) == jsonable(found)
    other = similarity(tiny_run, Options(clients=4, examples=40, history=1, round=0))
    assert (other.round, other.history[0].accuracy) == (0, None)
    assert other.mean_by_depth != found.mean_by_depth


def test_refusals(tiny_run: RecordedRun) -> None:
    with pytest.raises(ConfigError, match="--examples: got 3, expected a whole number from 4 to 2000"):
        similarity(tiny_run, Options(examples=3))
    with pytest.raises(RunError, match="round 9 was not recorded, only 0, 1, 2, 3, 4"):
        similarity(tiny_run, Options(round=9))
    with pytest.raises(RunError, match="1 client"):
        similarity(tiny_run, Options(clients=1))


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
def test_every_family(model: str, tmp_path: Path) -> None:
    """Models of one stage are compared after every block that all sizes have."""
    write_shakespeare(tmp_path)
    run_federation(family_config(model, tmp_path, "rounds=1"), tmp_path / "run")
    run = RecordedRun(tmp_path / "run")
    found = similarity(run, FEW)
    smallest = run.federation.splitter.depths[0]
    blocks = [block for stage, kept in zip(run.layout.stages, smallest, strict=True) for block in stage[:kept]]
    assert list(found.points) == (blocks if len(run.layout.stages) == 1 else ["layer1", "layer2"])
    assert np.isfinite(found.cka).all()


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedrolex", "scalefl", "inclusivefl", "alllarge"])
def test_every_kind_of_splitting(method: str, tmp_path: Path) -> None:
    run_federation(tiny_config(f"method={method}", "data.limit=150", "rounds=1"), tmp_path)
    found = similarity(RecordedRun(tmp_path), FEW)
    assert np.isfinite(found.cka).all()
    # The smallest level of ScaleFL ends within the first stage.
    assert found.points == (("layer1",) if method == "scalefl" else ("layer1", "layer2"))


def test_padding_of_texts_does_not_count(tmp_path: Path) -> None:
    write_sst2(tmp_path)
    config = {"name": "sst2", "root": str(tmp_path), "clients": 4}
    settings = {"rounds": 1, "cohort": 2, "data": config, "model": {"name": "tiny-lstm"}, "local": {"epochs": 1}}
    run_federation(settings, tmp_path / "run")
    found = similarity(RecordedRun(tmp_path / "run"), FEW)
    assert np.isfinite(found.cka).all()
    output = torch.arange(12.0).view(1, 3, 4)
    held = torch.tensor([[True, True, False]])
    assert torch.equal(rows(output, 1, held), torch.tensor([[2.0, 3.0, 4.0, 5.0]]))
    assert rows(output, 1).shape == (1, 12)
    assert rows(output.transpose(0, 1), 1).shape == (1, 12)


def test_points_that_some_client_lacks_are_left_out() -> None:
    federation = build(tiny_config("method=scalefl", "model.name=tiny-resnet"))
    layout = federation.model.layout
    large, small = federation.slice(2, 0), federation.slice(0, 0)
    assert common_points(layout, [large]) == {"layer1": ["layer1.1"], "layer2": ["layer2.1"]}
    assert common_points(layout, [large, small]) == {"layer1": ["layer1.1", "layer1.1"]}


def test_small_parts() -> None:
    assert stage_name(("a.b.0", "a.b.1"), 1) == "a.b"
    assert stage_name(("first", "second"), 2) == "stage 2"
    assert evenly([1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert evenly([1, 2], 3) == [1, 2]
    assert evenly([1, 2], 1) == [2]
    assert evenly([1, 2], 0) == evenly([], 3) == evenly([], 1) == []
    matrices = np.array([[[1, 0.5, 0.1], [0.5, 1, np.nan], [0.1, np.nan, 1]]])
    assert mean_over_pairs(matrices) == (0.3,)
    assert mean_over_pairs(matrices, np.eye(3, dtype=bool)) == (None,)
    assert jsonable({1: (np.float32(0.5), float("nan")), "a": Member(3, 1)}) == {
        "1": [0.5, None],
        "a": {"client": 3, "level": 1},
    }


def test_runs_that_differ_in_the_seed_alone_belong_together(tmp_path: Path) -> None:
    def saved(name: str, *overrides: str) -> RecordedRun:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.save_config(tiny_config(*overrides))
        values: dict[str, object] = {
            "accuracy": None,
            "accuracy_by_level": None,
            "loss": None,
            "clients": [],
            "rejected": [],
        }
        folder.append({"round": 1, **values, "bytes_up": 0, "bytes_down": 0, "seconds": 0.1})
        return RecordedRun(folder.path)

    runs = [
        saved(f"{method}-s{seed}", f"method={method}", f"seed={seed}", f"rounds={seed + 1}")
        for method in ("heteroavg", "incoavg")
        for seed in (0, 1)
    ]
    groups = {group.label: [run.name for run in group.runs] for group in by_seed(runs)}
    assert groups == {"heteroavg": ["heteroavg-s0", "heteroavg-s1"], "incoavg": ["incoavg-s0", "incoavg-s1"]}
    runs += [saved(f"alpha{alpha}-s0", "method=incoavg", f"data.alpha={alpha}") for alpha in (1, 2)]
    assert [group.label for group in by_seed(runs)] == [
        "heteroavg",
        "incoavg, alpha 0.5",
        "incoavg, alpha 1",
        "incoavg, alpha 2",
    ]
