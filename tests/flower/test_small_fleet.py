"""The shortest real deployment: TLS, authentication, two nodes, one round. ``make test-flower`` runs longer ones."""

from pathlib import Path

import pytest

import incofl
from incofl.analysis.runs import read_groups
from incofl.config import load_config
from incofl.report.page import make_page
from tests.flower.deployment import LONG, Deployment, write_app
from tests.flower.fleets import comparable, final_state

pytestmark = pytest.mark.xdist_group("ray")  # not beside others that start many processes


@pytest.mark.slow
def test_two_nodes_give_the_bits_of_the_engine_and_a_report(tmp_path: Path) -> None:
    write_app(tmp_path / "app", clients=2, more="split.levels = 2\n")
    with Deployment(tmp_path, nodes=2) as fleet:
        for node in range(2):
            fleet.start_node(node, level=node)
        out = fleet.start_run("short", rounds=1, deadline=int(LONG))
        (row,) = fleet.finished(out, 1)
        fleet.ended(out)
    assert row["rejected"] == []
    assert [(node["client"], node["level"]) for node in row["nodes"]] == [(1, 1), (0, 0)]
    assert all(node["peak_memory"] > 50e6 and node["cpu_seconds"] > 0 for node in row["nodes"])
    incofl.run(load_config(out / "config.toml"), tmp_path / "here")
    assert comparable(tmp_path / "here") == comparable(out)
    assert final_state(tmp_path / "here") == final_state(out)
    page = make_page(read_groups([out]))
    assert '"id":"slowest"' in page
    assert all(node["node"] in page for node in row["nodes"])
