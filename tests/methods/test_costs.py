"""What methods send and keep besides the model: as declared, as planned, as recorded."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

import incofl
from incofl.costs import Cost
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.round import RoundStats, run_round
from incofl.method import ServerRule
from incofl.server import Server
from incofl.tensors import Tensors
from tests.federations import tiny_config, tiny_federation


def planned(name: str, *settings: str) -> list[Cost]:
    return tiny_federation(f"method={name}", *settings).costs


TURNS = [("heteroavg", 1), ("heteroscaffold", 1), ("heteroscaffold", 2), ("scaffold", 1), ("moon", 1)]
TURNS += [("fedecover", 1), ("fedecover", 2)]


@pytest.mark.parametrize(("name", "workers"), TURNS)
def test_recorded_bytes_are_the_planned_ones(name: str, workers: int, tmp_path: Path) -> None:
    config = tiny_config(f"method={name}", "rounds=2", f"engine.workers={workers}")
    incofl.run(config, tmp_path)
    federation = build(config)
    for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        costs = [federation.costs[federation.level_of(client)] for client in row["clients"]]
        assert row["bytes_down"] == sum(cost.bytes_down for cost in costs)
        assert row["bytes_up"] == sum(cost.bytes_up for cost in costs)


@pytest.mark.parametrize("split", ["stage", "hetero"])
@pytest.mark.parametrize("name", ["heteroscaffold", "scaffold"])
def test_scaffold_sends_a_variate_both_ways_and_holds_two(name: str, split: str) -> None:
    """A variate is four bytes per parameter: c comes, the change of c_i goes, correction and c_i are in memory."""
    for ours, plain in zip(*(planned(m, f"split.kind={split}") for m in (name, "heteroavg")), strict=True):
        variate = 4 * plain.parameters
        assert ours == dataclasses.replace(
            plain,
            bytes_down=plain.bytes_down + variate,
            bytes_up=plain.bytes_up + variate,
            memory=plain.memory + 2 * variate,
        )


def test_moon_sends_nothing_more_and_holds_two_frozen_models() -> None:
    """A model, statistics included, is what a client of heteroavg receives; each of the two has its forward passes."""
    for ours, plain in zip(planned("heteromoon"), planned("heteroavg"), strict=True):
        assert ours == dataclasses.replace(plain, memory=plain.memory + 2 * plain.bytes_down, macs=ours.macs)
        assert plain.macs < ours.macs < 2 * plain.macs


@pytest.mark.parametrize("name", ["fedavg", "heteroprox", "heteronova", "inclusivefl", "incoavg"])
def test_others_send_and_hold_the_model_alone(name: str) -> None:
    assert planned(name) == planned("heteroavg")


@pytest.mark.parametrize("name", ["fedrolex", "fedrand", "fedecover"])
def test_a_window_costs_what_a_prefix_costs(name: str) -> None:
    """Wherever its channels lie, a level has as many of them."""
    assert planned(name) == planned("heterofl")


def test_what_a_server_sends_need_not_come_back() -> None:
    @dataclasses.dataclass(frozen=True)
    class Talkative(ServerRule):
        def extra_for_client(self, server: Server, level: int) -> Tensors:
            return {"conv1.weight": server.shared["conv1.weight"]}

    federation = tiny_federation("method=heteroavg", "split.kind=hetero")
    federation = dataclasses.replace(federation, method=dataclasses.replace(federation.method, server=Talkative()))
    server, jobs = federation.start(), federation.schedule(0, 4)
    stats = RoundStats(extra_of=lambda level: federation.method.server.extra_for_client(server, level))
    run_round(server, federation.method, jobs, InProcess(federation), stats)
    costs = [federation.costs[job.level] for job in jobs]
    assert stats.bytes_down == sum(cost.bytes_down for cost in costs)
    more = sum(4 * math.prod(federation.slice(job.level, 0).shapes["conv1.weight"]) for job in jobs)
    assert stats.bytes_down - stats.bytes_up == more > 0


def test_what_a_step_computes_in_addition_is_counted() -> None:
    """All exits of a level, which evaluation does not compute, and the forward passes of MOON's two other models."""
    plain = planned("heteroavg")
    exits, one = planned("scalefl", "split.levels=[1.0,1.0,1.0]"), planned("scalefl", "split.levels=[1.0]")
    assert exits[-1].macs > one[0].macs == plain[-1].macs
    assert [cost.macs for cost in planned("heteromoon")] == [round(5 / 3 * cost.macs) for cost in plain]
    assert [cost.macs for cost in planned("heteromoon", "moon.mu=0")] == [cost.macs for cost in plain]
