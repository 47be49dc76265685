"""Real processes on loopback, with TLS and authentication: five sizes learn, and no fault hangs or loses a round.

One fleet for all tests, in their order: every start costs seconds, on a busy machine minutes.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import incofl
from incofl.config import load_config
from tests.flower.deployment import DEADLINE, LONG, Deployment, reasons, rows, wait_for, write_app
from tests.flower.fleets import comparable, final_state

pytestmark = pytest.mark.flower
GARBAGE = int(os.environ.get("INCOFL_TEST_GARBAGE", str(2**30)))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Five nodes of five sizes."""
    folder = tmp_path_factory.mktemp("fleet")
    write_app(folder / "app", clients=5)
    with Deployment(folder, nodes=5) as deployment:
        for node in range(5):
            deployment.start_node(node, level=node)
        yield deployment


def test_five_sizes_learn_and_give_the_bits_of_the_engine(fleet: Deployment, tmp_path: Path) -> None:
    out = fleet.start_run("learn", rounds=3, deadline=int(LONG))
    lines = fleet.finished(out, 3, 3 * LONG)
    fleet.ended(out)
    assert not any(row["rejected"] for row in lines), lines
    assert {(node["client"], node["level"]) for row in lines for node in row["nodes"]} == {(i, i) for i in range(5)}
    assert lines[-1]["accuracy"] > max(0.6, lines[0]["accuracy"])
    incofl.run(load_config(out / "config.toml"), tmp_path / "here")
    assert comparable(tmp_path / "here") == comparable(out)
    assert final_state(tmp_path / "here") == final_state(out)


def test_hostile_replies_are_refused_and_named(fleet: Deployment) -> None:
    for node, deed in enumerate(("nan", "shape", "one", "extra")):
        fleet.order(node, 2, deed)
    fleet.order(0, 3, "replay")
    fleet.order(1, 3, f"garbage {GARBAGE}")
    out = fleet.start_run("hostile", rounds=3)
    lines = fleet.finished(out, 3, 2 * LONG)
    fleet.ended(out)
    assert lines[0]["rejected"] == []
    said = reasons(lines[1])
    assert set(said) == {0, 1, 2, 3}
    for node, words in enumerate(("not finite", r"shape \(20,\)", r"shape \(1,\)", "holds 'head.other'")):
        assert re.search(words, said[node]), said[node]
    said = reasons(lines[2])
    assert set(said) == {0, 1}
    assert "replies for round 0, expected 2" in said[0]
    assert re.search(rf"has {GARBAGE} bytes|silent for|not arrived whole", said[1]), said[1]
    assert lines[2]["seconds"] < DEADLINE + 75
    assert lines[2]["accuracy"] > 0.3


def test_an_unregistered_node_is_refused(fleet: Deployment) -> None:
    """It has a key, but nobody has told the SuperLink."""
    fleet.start_node(5, level=0)
    wait_for(lambda: not fleet.alive("node-5"), lambda: fleet.log("node-5"))
    assert "Failed to activate SuperNode" in fleet.log("node-5")
    assert "SuperNode ID" not in fleet.log("node-5")
    fleet.kill("node-5")


def test_nodes_that_die_hang_and_come_back_and_a_server_that_dies(fleet: Deployment) -> None:
    """A method whose clients remember; one run through all of it."""
    fleet.order(0, 2, f"slow {DEADLINE}")
    fleet.order(1, 2, "stop")
    fleet.order(2, 2, "slow 1")
    fleet.order(3, 2, "slow 600")
    config: dict[str, Any] = {"rounds": 1000, "method": "incoscaffold", "wait": DEADLINE}
    out = fleet.start_run("faults", **config)
    assert not fleet.finished(out, 1)[0]["rejected"]

    # One late, one whose training hangs while the node is well, one stopped as a whole, one killed while it trains.
    wait_for(lambda: fleet.obeyed(2, 2), "node 2 gets no turn")
    fleet.kill("node-2", signal.SIGSTOP)
    wait_for(lambda: fleet.obeyed(3, 2), "node 3 gets no turn")
    fleet.kill("node-3")
    second = fleet.finished(out, 2, DEADLINE + 75)[1]
    assert second["seconds"] < DEADLINE + 15
    said = reasons(second)
    assert set(said) == {0, 1, 2, 3}
    assert f"silent for {DEADLINE} s, its deadline" in said[0]
    for node in (1, 2, 3):  # the deadline, or Flower's own patience of two heartbeats, whichever is sooner
        assert re.search("Unavailable|stopped responding|silent for", said[node]), said[node]

    # They come back: with what they remember, and one of them smaller, so that two have the same size.
    fleet.kill("node-1", signal.SIGCONT)
    fleet.kill("node-2", signal.SIGCONT)
    fleet.restart_node(3, level=2)

    def returned() -> list[dict[str, Any]]:
        found = [node for row in rows(out)[2:] for node in row["nodes"]]
        wanted = {(0, 0), (1, 1), (2, 2), (3, 2), (4, 4)}
        return found if wanted <= {(node["client"], node["level"]) for node in found} else []

    back = wait_for(returned, lambda: fleet.log("run-faults")[-3000:])
    assert not any("forgot" in node for node in back)

    # Both of one size gone, and the only one that holds the deepest blocks.
    for node in (2, 3, 4):
        fleet.kill(f"node-{node}")
    done = len(rows(out))
    start = time.monotonic()
    lines = fleet.finished(out, done + 2, 2 * (DEADLINE + 60))
    print(f"two rounds after three of five nodes died: {time.monotonic() - start:.0f} s")
    assert {node["client"] for node in lines[-1]["nodes"]} == {0, 1}
    assert len(lines[-1]["accuracy_by_level"]) == 5

    # The server app is killed, and the run continued.
    os.kill(fleet.server_app(), signal.SIGKILL)
    fleet.ended(out)
    before = rows(out)
    fleet.start_run("faults", **config)
    lines = fleet.finished(out, len(before) + 1)
    assert lines[: len(before)] == before
    assert [row["round"] for row in lines] == list(range(1, len(lines) + 1))

    # The SuperLink is killed with it, and the run continued.
    fleet.kill("superlink")
    fleet.kill("run-faults")
    before = rows(out)
    fleet.start_superlink()
    fleet.register()
    for node in (0, 1):  # they have ended: the new SuperLink did not know them
        fleet.kill(f"node-{node}")
        fleet.restart_node(node, level=node)
    fleet.start_run("faults", **config | {"rounds": len(before) + 1})
    lines = fleet.finished(out, len(before) + 1)
    fleet.ended(out)
    assert lines[: len(before)] == before
    assert {node["client"] for node in lines[-1]["nodes"]} <= {0, 1}
    assert not any("forgot" in node for node in lines[-1]["nodes"])
    assert incofl.load_model(out, 4) is not None
