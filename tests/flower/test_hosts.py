"""A fleet on hosts of their own, at one switch: another address than loopback, and cables that are pulled."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.flower.deployment import DEADLINE, Deployment, reasons, rows, wait_for, write_app
from tests.flower.hosts import Hosts

pytestmark = pytest.mark.flower


def test_a_fleet_on_several_hosts_survives_a_pulled_cable(tmp_path: Path) -> None:
    """The node behind it is left out, and comes back with what it remembers."""
    write_app(tmp_path / "app", clients=3)
    names = ("superlink", "node-0", "node-1", "node-2")
    with Hosts(*names) as hosts:

        def on(process: str) -> Sequence[str]:
            return hosts.on(process if process in names else "superlink")

        with Deployment(tmp_path, nodes=3, address=hosts.address("superlink"), on=on) as fleet:
            for node in range(3):
                fleet.start_node(node, level=2 * node)
            fleet.order(1, 2, "slow 5")
            out = fleet.start_run("cable", rounds=1000, method="incoscaffold")
            assert not fleet.finished(out, 1)[0]["rejected"]

            wait_for(lambda: fleet.obeyed(1, 2), "node 1 gets no turn")
            hosts.pull_cable("node-1")
            said = reasons(fleet.finished(out, 2, DEADLINE + 75)[1])
            assert set(said) == {1}
            assert re.search("Unavailable|silent for", said[1]), said[1]

            hosts.plug_in("node-1")

            def returned() -> bool:
                return any(node["client"] == 1 for row in rows(out)[2:] for node in row["nodes"])

            wait_for(returned, lambda: fleet.log("node-1")[-3000:] + fleet.log("run-cable")[-3000:])
            assert not any("forgot" in node for row in rows(out) for node in row["nodes"])
