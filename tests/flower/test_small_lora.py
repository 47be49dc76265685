"""A real fleet that adapts a model: three nodes with adapters of three ranks, and nothing but adapters on the wire."""

from pathlib import Path

import pytest

import incofl
from incofl.config import load_config
from incofl.engine.build import outline
from tests.flower.deployment import LONG, Deployment, write_app
from tests.flower.fleets import comparable, final_state

pytestmark = pytest.mark.xdist_group("ray")  # not beside others that start many processes
HEADERS = 8_000  # bytes of a message that are no values: names, types and shapes, and what the order says


@pytest.mark.slow
def test_three_ranks_give_the_bits_of_the_engine_and_send_adapters_only(tmp_path: Path) -> None:
    write_app(tmp_path / "app", clients=3, more="split.levels = '[2, 4, 8]'\n")
    with Deployment(tmp_path, nodes=3) as fleet:
        for node in range(3):
            fleet.start_node(node, level=node)
        out = fleet.start_run("lora", method="flexlora", rounds=2, deadline=int(LONG))
        lines = fleet.finished(out, 2, 2 * LONG)
        fleet.ended(out)
    config = load_config(out / "config.toml")
    federation = outline(config)
    assert [cost.rank for cost in federation.costs] == [2, 4, 8]
    frozen = sum(4 * federation.model.initial[name].numel() for name in federation.model.layout.frozen)
    for row in lines:
        assert row["rejected"] == []
        assert sorted((node["client"], node["level"]) for node in row["nodes"]) == [(0, 0), (1, 1), (2, 2)]
        assert row["bytes_down"] == sum(cost.bytes_down for cost in federation.costs)
        for node in row["nodes"]:
            planned = federation.costs[node["level"]]
            assert (
                planned.bytes_down <= node["bytes_down"] <= planned.bytes_down + HEADERS < frozen + planned.bytes_down
            )
            assert planned.bytes_up <= node["bytes_up"] <= planned.bytes_up + HEADERS
    incofl.run(config, tmp_path / "here")
    assert comparable(tmp_path / "here") == comparable(out)
    assert final_state(tmp_path / "here") == final_state(out)
