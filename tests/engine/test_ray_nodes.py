"""A Ray cluster of several nodes, one of which dies: real processes of Ray's, on one machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import incofl
from tests.federations import tiny_config
from tests.flower.deployment import rows, wait_for

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without cores of its own, and two nodes of one core each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    cluster.shutdown()


def test_a_lost_node_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    """Its turns are computed again on the other one, and a run that lost a machine has the bits of one that did not."""
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    options = ("method=incoscaffold", "rounds=12", "local.epochs=8")
    ray = (f"engine.address={cluster.address}", "engine.executor=ray", "engine.workers=2")
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(*options, *ray).to_toml())
    log = (tmp_path / "log").open("wb")
    command = [sys.executable, "-m", "incofl", "run", str(config), "--out", str(tmp_path / "a")]
    with log, subprocess.Popen(command, stdout=log, stderr=log) as run:
        wait_for(lambda: rows(tmp_path / "a"), lambda: (tmp_path / "log").read_text(), 120)
        done = len(rows(tmp_path / "a"))
        cluster.remove_node(nodes[1], allow_graceful=False)
        assert run.wait(180) == 0, (tmp_path / "log").read_text()
    assert done < 12  # it died in the middle
    assert not any(row["rejected"] for row in rows(tmp_path / "a"))
    incofl.run(tiny_config(*options, "engine.workers=1"), tmp_path / "b")
    first, second = ((tmp_path / name / "checkpoint" / "state.safetensors").read_bytes() for name in "ab")
    assert first == second
