"""Which node is which client, and what it can afford."""

import dataclasses
import json
from pathlib import Path

import pytest

from incofl.costs import Cost
from incofl.engine.federation import ClientLevels
from incofl.errors import ConfigError, RunError
from incofl.flower import Settings
from incofl.flower.fleet import Fleet
from incofl.flower.protocol import Answer
from tests.federations import tiny_federation
from tests.flower.loop import LoopGrid

# Of three levels, which need 100, 200 and 300 bytes.
COSTS = [Cost(level, (level + 1,), 1.0, 10 * (level + 1), 10, 5, 5, 100 * (level + 1)) for level in range(3)]


def make(path: Path, method: str = "heteroavg") -> Fleet:
    federation = dataclasses.replace(tiny_federation(f"method={method}"), levels=ClientLevels.grouped((2, 2, 2)))
    federation.__dict__["costs"] = COSTS  # a cached property
    return Fleet(LoopGrid(None), Settings(), path / "nodes.json", federation)


def test_the_largest_model_that_fits(tmp_path: Path) -> None:
    fleet = make(tmp_path)
    assert fleet.welcome(70, Answer(client=0, memory=250)).level == 1
    assert fleet.welcome(71, Answer(client=1, memory=300, bandwidth=10)).level == 2
    assert fleet.welcome(72, Answer(client=2, level=0)).level == 0
    assert fleet.welcome(73, Answer(client=5)).level == 2  # as the config has it
    assert [fleet.levels[client] for client in range(6)] == [1, 2, 0, 1, 2, 2]
    assert fleet.levels.counts == (1, 2, 3)
    for answer, reason in (
        (Answer(client=3, memory=99), "no level fits; the smallest .* needs memory 100 B, has 99 B"),
        (Answer(client=3, level=3), "level: got 3, expected 0 to 2"),
        (Answer(client=6), "partition-id: got 6, expected 0 to 5"),
    ):
        with pytest.raises(ConfigError, match=reason):
            fleet.welcome(74, answer)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("heteroavg", "gets level 1"),
        ("allsmall", "gets level 0"),
        ("alllarge", "trains level 2 on it, which needs memory 300 B, has 250 B"),
        ("largestonly", "takes no part"),
    ],
)
def test_the_level_that_is_told_is_the_one_that_is_trained(
    method: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a node that can hold level 1; it is left out where the method would exceed its limits."""
    fleet = make(tmp_path, method)
    with caplog.at_level("INFO", "flwr"):
        assert said in fleet.hear(70, Answer(client=0, memory=250))
        fleet.hear(71, Answer(client=1, memory=300))
    first, second = caplog.messages
    assert first.startswith("incofl: node 70 is ")
    assert said in first
    assert f"node 71 is client 1 and gets level {0 if method == 'allsmall' else 2}" in second
    assert list(fleet.refused) == ([70] if method == "alllarge" else [])
    assert fleet.present == ([1] if method == "alllarge" else [0, 1])


def test_limits_that_a_wanted_level_exceeds(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="heteroavg trains level 2 on it, which needs memory 300 B, has 299 B; choose"
    ):
        make(tmp_path).welcome(70, Answer(client=0, level=2, memory=299))


def test_numbers_of_nodes_that_name_none(tmp_path: Path) -> None:
    fleet = make(tmp_path)
    assert fleet.welcome(70, Answer(client=1)).client == 1
    assert [fleet.welcome(id, Answer()).client for id in (71, 72, 71, 73, 74, 75)] == [0, 2, 0, 3, 4, 5]
    with pytest.raises(ConfigError, match="no client number is left"):
        fleet.welcome(76, Answer())
    fleet.meet([70, 72, 73, 74, 75])  # 71 is gone
    assert fleet.welcome(76, Answer()).client == 0


def test_who_is_asked(tmp_path: Path) -> None:
    """New nodes, those that were away, and nobody twice."""
    fleet = make(tmp_path)
    assert fleet.meet([70, 71, 72]) == [70, 71, 72]
    fleet.welcome(70, Answer(client=0))
    fleet.refuse(71, "no")
    assert fleet.meet([70, 71, 72]) == [72]
    assert fleet.present == [0]
    assert fleet.meet([72]) == [72]
    assert fleet.present == []
    assert fleet.meet([70, 71, 72]) == [70, 72]  # 71 is left out until that is forgotten
    fleet.refused.clear()
    assert fleet.meet([70, 71, 72]) == [70, 71, 72]
    fleet.welcome(70, Answer(client=0))
    with pytest.raises(ConfigError, match="partition-id: got 0, which node 70 is, expected one of its own"):
        fleet.welcome(72, Answer(client=0))  # nobody can take another one's place
    fleet.refuse(72, "taken")
    assert fleet.meet([70, 71, 72]) == [71]
    assert fleet.nodes[0].node == 70
    fleet.refused.clear()
    assert fleet.meet([71, 72]) == [71, 72]  # the place is free
    assert fleet.welcome(72, Answer(client=0)).node == 72


def test_a_node_that_cannot_keep_up_gets_less(tmp_path: Path) -> None:
    fleet = make(tmp_path)
    node = fleet.welcome(70, Answer(client=0, level=2))
    assert not fleet.missed(0)
    node.missed = 0  # it has replied in time
    assert not fleet.missed(0)
    assert fleet.missed(0)
    assert node.level == 1
    assert fleet.missed(0, at_once=True)
    assert node.level == 0
    assert not fleet.missed(0, at_once=True)  # there is nothing smaller
    fleet.meet([80])
    assert fleet.welcome(80, Answer(client=0, level=2)).level == 0  # it comes back as it was
    assert fleet.welcome(80, Answer(client=0, memory=200)).level == 1  # and with more than before


def test_the_fleet_is_remembered(tmp_path: Path) -> None:
    fleet = make(tmp_path)
    big = 2**64 - 1
    fleet.welcome(big, Answer(client=3, memory=300, examples=7))
    fleet.missed(3, at_once=True)
    fleet.save()
    again = make(tmp_path)
    assert again.run == fleet.run
    assert again.nodes == fleet.nodes
    assert again.present == []  # until it has answered
    assert again.meet([big]) == [big]
    assert again.welcome(big, Answer(client=3, memory=300, examples=7)).level == 1
    known = json.loads((tmp_path / "nodes.json").read_text())
    assert (tmp_path / "nodes.json").stat().st_mode & 0o077 == 0
    for other in ({"level": 99}, {"client": "zz"}, {"client": -1}, {"missed": 0.5}, {"odd": 1}):
        (tmp_path / "nodes.json").write_text(json.dumps(known | {"nodes": [known["nodes"][0] | other]}))
        with pytest.raises(RunError, match=r"nodes.json: damaged \(.*; delete it, and nodes will be asked again"):
            make(tmp_path)
    for content in ("{}", "[" * 100000):
        (tmp_path / "nodes.json").write_text(content)
        with pytest.raises(RunError, match=r"nodes.json: damaged \(.*; delete it, and nodes will be asked again"):
            make(tmp_path)
