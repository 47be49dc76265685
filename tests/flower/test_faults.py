"""Nodes that are late, silent, dead, wrong or too small: none ends a run, all are named."""

import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Error, Message, MessageType
from google.protobuf.message import DecodeError

from incofl.client import Upload
from incofl.config import make_config
from incofl.engine.build import build
from incofl.engine.federation import Federation
from incofl.errors import ConfigError, RunError
from incofl.flower import make_client_app, serve
from incofl.flower.backend import GridExecutor, on_disk
from incofl.flower.protocol import encode_problem
from tests.federations import tiny_config
from tests.flower.fleets import FIRST, final_state, fleet, rows, settings
from tests.flower.loop import LATER, LoopGrid

CONFIG = tiny_config(
    *("method=heteroavg", "rounds=2", "cohort=4", "data.clients=4", "data.limit=120", "split.levels=2"),
    *("model.name=tiny-mlp", "split.counts=[0,4]"),
)
VICTIM = FIRST + 1


def spoilt(grid: LoopGrid, spoil: Callable[[Any], None]) -> Callable[[Message], Message]:
    def fate(message: Message) -> Message:
        reply = grid.app(message, grid.nodes[message.metadata.dst_node_id])
        spoil(reply.content)
        return reply

    return fate


def garbage(content: Any) -> None:
    content["update"]["head.weight"] = Array("float32", (10,), "numpy.ndarray", bytes(10**7))


def nan(content: Any) -> None:
    values = content["update"]["head.bias"].numpy().copy()
    values[0] = float("nan")
    content["update"]["head.bias"] = Array(values)


def huge(content: Any) -> None:
    content["update"]["head.bias"] = Array(content["update"]["head.bias"].numpy() * 0 - np.float32(1e20))


def replayed(content: Any) -> None:
    content["report"]["round"] = 7


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (garbage, "client 1: node 1001: update 'head.weight' has 10000000 bytes of 'numpy.ndarray', its slice expects"),
        (nan, "client 1: its update is not finite"),
        (huge, "client 1: its update of 'head.bias' has values up to 1.0e+20, expected a norm of at most 1e+15"),
        (replayed, "client 1: node 1001: it replies for round 7, expected 0"),
        (lambda content: content.pop("extra"), "client 1: node 1001: the reply lacks 'extra'"),
    ],
)
def test_a_wrong_reply_is_left_out_and_named(spoil: Callable[[Any], None], reason: str, tmp_path: Path) -> None:
    """The round is that of the others."""
    grid = fleet(CONFIG)
    grid.fates[VICTIM] = spoilt(grid, spoil)
    config = dataclasses.replace(CONFIG, rounds=1)
    serve(grid, config, settings(tmp_path / "run"))
    (row,) = rows(tmp_path / "run")
    (refusal,) = row["rejected"]
    assert refusal["client"] == 1
    assert reason in refusal["reason"]
    assert row["clients"] == [0, 1, 2, 3]
    without = fleet(CONFIG)
    without.fates[VICTIM] = lambda message: Message(Error(5, "gone"), reply_to=message)
    serve(without, config, settings(tmp_path / "without"))
    assert final_state(tmp_path / "run") == final_state(tmp_path / "without")


def test_errors_of_flower_are_named_by_node(tmp_path: Path) -> None:
    """The reply comes from the SuperLink: whose it is follows from the message that it replies to."""
    grid = fleet(CONFIG)
    grid.fates[VICTIM] = lambda message: Message(Error(5, "Traceback:\n  Node Unavailable\n"), reply_to=message)
    serve(grid, CONFIG, settings(tmp_path / "run"))
    for row in rows(tmp_path / "run"):
        assert row["rejected"] == [{"client": 1, "reason": "client 1: node 1001: Node Unavailable"}]
    assert json.loads((tmp_path / "run" / "nodes.json").read_text())["nodes"][1]["level"] == 1  # no fault of its size


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ValueError("Unexpected set of `children`"), "Unexpected set of `children`"),
        (DecodeError("Error parsing message"), "Error parsing message"),
        (RecursionError("maximum recursion depth exceeded"), "maximum recursion depth exceeded"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_reply_that_flower_cannot_read(problem: Exception, reason: str, tmp_path: Path) -> None:
    def unreadable(message: Message) -> Message:
        raise problem

    grid = fleet(CONFIG)
    grid.fates[VICTIM] = unreadable
    serve(grid, dataclasses.replace(CONFIG, rounds=1), settings(tmp_path / "run"))
    (row,) = rows(tmp_path / "run")
    assert row["rejected"] == [{"client": 1, "reason": f"client 1: node 1001: its reply cannot be read: {reason}"}]
    assert len(row["nodes"]) == 3


def test_who_has_replied_may_leave(tmp_path: Path) -> None:
    """Replies are taken in as they come, while a slow node is waited for: Flower would not hand them out afterwards."""
    grid = fleet(CONFIG)
    slow, *others = [FIRST + job.client for job in build(CONFIG).schedule(0, 4)]
    looks = 0

    def late(message: Message) -> Any:
        nonlocal looks
        looks += 1
        if looks < 3:
            return LATER
        for other in others:
            grid.nodes.pop(other, None)
        return grid.app(message, grid.nodes[slow])

    grid.fates[slow] = late
    config = dataclasses.replace(CONFIG, rounds=1)
    serve(grid, config, settings(tmp_path / "run", deadline=60))
    (row,) = rows(tmp_path / "run")
    assert row["rejected"] == []
    serve(fleet(CONFIG), config, settings(tmp_path / "whole"))
    assert final_state(tmp_path / "run") == final_state(tmp_path / "whole")
    assert not list((tmp_path / "run").glob("early*"))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is a minute."""
    monkeypatch.setattr("incofl.flower.transport.TRANSFER", 1.0)
    monkeypatch.setattr("incofl.flower.transport.STALL", 0.3)


@pytest.mark.usefixtures("hasty")
def test_a_reply_that_is_announced_and_never_arrives_costs_no_more_than_its_time(tmp_path: Path) -> None:
    """And nothing more is asked of its node until it has arrived or failed."""
    over = threading.Event()

    def never(message: Message) -> Message:
        over.wait(100)
        raise ValueError("nobody is there to hear this")

    grid = fleet(CONFIG)
    grid.fates[VICTIM] = never
    start = time.monotonic()
    serve(grid, CONFIG, settings(tmp_path / "run", deadline=0.2))
    assert time.monotonic() - start < 50
    over.set()
    first, second = ([refusal["reason"] for refusal in row["rejected"]] for row in rows(tmp_path / "run"))
    assert re.fullmatch(r"client 1: node 1001: its reply has not arrived whole after \d+ s", first[0])
    assert second == ["client 1: node 1001: its reply to an earlier order is still on its way"]
    assert all(len(row["nodes"]) == 3 for row in rows(tmp_path / "run"))


@pytest.mark.usefixtures("hasty")
def test_an_answer_that_never_arrives_leaves_its_node_out(tmp_path: Path) -> None:
    over = threading.Event()
    honest = make_client_app()

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.QUERY and context.node_config["partition-id"] == 1:
            over.wait(100)
        return honest(message, context)

    grid = fleet(CONFIG)
    grid.app = app
    serve(grid, dataclasses.replace(CONFIG, rounds=1), settings(tmp_path / "run", min_nodes=3, wait=8))
    over.set()
    assert [row["clients"] for row in rows(tmp_path / "run")] == [[0, 2, 3]]
    (refused,) = json.loads((tmp_path / "run" / "nodes.json").read_text())["refused"]
    assert refused["node"] == "1001"
    assert re.fullmatch(r"its reply has not arrived whole after \d+ s", refused["reason"])


def test_a_look_that_was_slow_does_not_make_a_reply_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that began before the reply came and ended after the deadline says nothing of what came in between."""
    monkeypatch.setattr("incofl.flower.transport.STALL", 0.1)
    grid = fleet(CONFIG)
    looks = 0

    def slow(message: Message) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            time.sleep(1.5)
            return LATER
        return grid.app(message, grid.nodes[VICTIM])

    grid.fates[VICTIM] = slow
    serve(grid, dataclasses.replace(CONFIG, rounds=1), settings(tmp_path / "run", deadline=1.0))
    (row,) = rows(tmp_path / "run")
    assert row["rejected"] == []
    assert looks == 2


def test_who_was_left_out_is_asked_again_in_the_next_round(tmp_path: Path) -> None:
    """A node that was mended and restarted between two looks, under its old id."""
    config = dataclasses.replace(CONFIG, rounds=4)
    grid = fleet(CONFIG)
    grid.nodes[VICTIM].node_config["level"] = 9

    def mend(message: Message) -> Message:
        grid.nodes[VICTIM].node_config["level"] = 0
        return grid.app(message, grid.nodes[FIRST])

    grid.fates[FIRST] = mend
    serve(grid, config, settings(tmp_path / "run", min_nodes=3, wait=1))
    lines = rows(tmp_path / "run")
    assert lines[0]["clients"] == [0, 2, 3]
    assert lines[-1]["clients"] == [0, 1, 2, 3]


def test_what_waits_on_disk_is_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values, in the same order and layout: where a method goes through the names, sums depend on it."""
    came: list[Upload] = []
    went: list[Upload] = []

    def on_disk_noted(upload: Upload, folder: Path) -> Upload:
        came.append(upload)
        found = on_disk(upload, folder)
        assert not list(folder.glob("early*"))  # its name is gone, and with the last tensor the file
        mapped = Path("/proc/self/maps")
        assert not mapped.exists() or "early.safetensors (deleted)" in mapped.read_text()
        return found

    def noted(self: GridExecutor, *arguments: Any) -> Any:
        made = result(self, *arguments)
        assert isinstance(made, Upload)
        went.append(made)
        return made

    result = GridExecutor._result
    monkeypatch.setattr("incofl.flower.backend.on_disk", on_disk_noted)
    monkeypatch.setattr(GridExecutor, "_result", noted)
    config = tiny_config("method=incoscaffold", "rounds=1", "cohort=4", "data.clients=4", "data.limit=120")
    serve(fleet(config), config, settings(tmp_path / "run"))
    assert len(came) == 3  # all but the first
    for upload in came:
        (back,) = (other for other in went if other.client == upload.client)
        for part in ("update", "buffers", "extra"):
            ours, theirs = getattr(back, part), getattr(upload, part)
            assert list(ours) == list(theirs)
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
            assert all(ours[name].stride() == theirs[name].stride() for name in ours)
        assert list(upload.update) != sorted(upload.update)  # or it would show nothing


def test_a_superlink_that_does_not_answer_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr("incofl.flower.transport.TRANSFER", 0.2)
    grid = fleet(CONFIG)
    monkeypatch.setattr(grid, "get_node_ids", lambda: over.wait(100))
    with pytest.raises(RunError, match=r"the SuperLink has not answered for 0.5 s; finished rounds are saved"):
        serve(grid, CONFIG, settings(tmp_path / "run", wait=0.5))
    over.set()


def test_a_client_app_that_dies_gets_less(tmp_path: Path) -> None:
    grid = fleet(CONFIG)
    grid.fates[VICTIM] = lambda message: Message(Error(8, "ClientApp process crashed"), reply_to=message)
    serve(grid, CONFIG, settings(tmp_path / "run"))
    reasons = [refusal["reason"] for row in rows(tmp_path / "run") for refusal in row["rejected"]]
    died = "client 1: node 1001: ClientApp process crashed"
    assert reasons == [died, f"{died}; it gets level 0 from now on"]


def test_a_silent_node_costs_a_deadline_and_gets_less(tmp_path: Path) -> None:
    grid = fleet(CONFIG)
    grid.fates[VICTIM] = lambda message: None
    config = dataclasses.replace(CONFIG, rounds=3)
    start = time.monotonic()
    serve(grid, config, settings(tmp_path / "run", deadline=0.2))
    assert time.monotonic() - start < 20
    reasons = [refusal["reason"] for row in rows(tmp_path / "run") for refusal in row["rejected"]]
    late = "client 1: node 1001: silent for 0.2 s, its deadline"
    assert reasons == [late, f"{late}; it gets level 0 from now on", late]
    levels = [content["order"]["level"] for node, content in grid.orders if node == VICTIM]
    assert levels == [1, 1, 0]
    known = json.loads((tmp_path / "run" / "nodes.json").read_text())
    assert [node["level"] for node in known["nodes"]] == [1, 0, 1, 1]


def test_a_node_without_memory_gets_less_at_once(tmp_path: Path) -> None:
    grid = fleet(CONFIG)

    def small(message: Message) -> Message:
        if message.content["order"]["level"] == 1:
            return Message(encode_problem("DefaultCPUAllocator: can't allocate memory", "memory"), reply_to=message)
        return grid.app(message, grid.nodes[VICTIM])

    grid.fates[VICTIM] = small
    serve(grid, CONFIG, settings(tmp_path / "run"))
    first, second = rows(tmp_path / "run")
    assert "out of memory (DefaultCPUAllocator" in first["rejected"][0]["reason"]
    assert first["rejected"][0]["reason"].endswith("; it gets level 0 from now on")
    assert second["rejected"] == []
    assert {node["client"]: node["level"] for node in second["nodes"]} == {0: 1, 1: 0, 2: 1, 3: 1}


def test_memory_that_torch_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from incofl.engine.worker import Worker

    def turn(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 TB")

    monkeypatch.setattr(Worker, "turn", turn)
    with pytest.raises(RunError, match="round 1: 0 accepted replies, expected at least 1"):
        serve(fleet(CONFIG), CONFIG, settings(tmp_path / "run", attempts=1))
    assert [node["level"] for node in json.loads((tmp_path / "run" / "nodes.json").read_text())["nodes"]] == [0] * 4


def test_too_few_replies_repeat_the_round_and_end_the_run(tmp_path: Path) -> None:
    grid = fleet(CONFIG)
    serve(grid, dataclasses.replace(CONFIG, rounds=1), settings(tmp_path / "run"))
    before, orders = final_state(tmp_path / "run"), len(grid.orders)
    grid.fates = {FIRST + client: lambda message: None for client in (0, 1, 2)}
    with pytest.raises(RunError, match=r"round 2: 1 accepted replies, expected at least 2 \(min-replies\), 3 times"):
        serve(grid, CONFIG, settings(tmp_path / "run", min_replies=2, resume=True, patience=9))
    assert len(grid.orders) == orders + 3 * 4
    assert final_state(tmp_path / "run") == before  # the finished round is not lost
    assert len(rows(tmp_path / "run")) == 1
    grid.fates = {}
    serve(grid, CONFIG, settings(tmp_path / "run", resume=True))
    serve(fleet(CONFIG), CONFIG, settings(tmp_path / "whole"))
    assert final_state(tmp_path / "run") == final_state(tmp_path / "whole")


def test_waiting_for_nodes_is_bounded(tmp_path: Path) -> None:
    grid = LoopGrid(make_client_app())
    start = time.monotonic()
    with pytest.raises(RunError, match=r"round 1: 0 of 0 connected nodes are ready after 0.3 s, expected at least 4"):
        serve(grid, CONFIG, settings(tmp_path / "run", wait=0.3))
    assert time.monotonic() - start < 30
    for client in range(2):  # fewer than a cohort, if that is enough
        grid.add(client, partition_id=client)
    grid.add(9, partition_id=9)
    serve(grid, CONFIG, settings(tmp_path / "run", wait=0.3, min_nodes=2, resume=True))
    assert [row["clients"] for row in rows(tmp_path / "run")] == [[0, 1]] * 2
    known = json.loads((tmp_path / "run" / "nodes.json").read_text())
    assert known["refused"] == [{"node": "9", "reason": "partition-id: got 9, expected 0 to 3 (data.clients)"}]


@pytest.mark.parametrize(
    ("impatient", "message"),
    [
        ({"min_nodes": 5}, r"min_nodes: got 5, expected at most 4, the size of the fleet \(data.clients\)"),
        ({"min_replies": 4}, "min_replies: got 4, expected at most 3, the size of a cohort"),
    ],
)
def test_nobody_waits_for_more_than_there_can_be(impatient: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(fleet(CONFIG), dataclasses.replace(CONFIG, cohort=3), settings(tmp_path / "run", wait=60, **impatient))
    assert not (tmp_path / "run").exists()


def change_in_round(grid: LoopGrid, round: int, **said: Any) -> Callable[[Message], Message]:
    """A node that is restarted with another config before its turn in a round."""

    def fate(message: Message) -> Message:
        if message.content["order"]["round"] == round:
            grid.nodes[VICTIM].node_config.update(said)
        return grid.app(message, grid.nodes[VICTIM])

    return fate


def test_a_node_that_changes_says_so_instead_of_training(tmp_path: Path) -> None:
    """It gets what fits from then on, without being asked again; the others do not notice."""
    config = dataclasses.replace(CONFIG, rounds=4)
    grid = LoopGrid(make_client_app())
    for client in range(4):
        grid.add(FIRST + client, partition_id=client, level=0)
    grid.fates[VICTIM] = change_in_round(grid, 1, level=1)
    serve(grid, config, settings(tmp_path / "run"))
    lines = rows(tmp_path / "run")
    reason = "node 1001: it says other limits than before; it is client 1 and gets level 1 from now on"
    assert [row["rejected"] for row in lines] == [[], [{"client": 1, "reason": f"client 1: {reason}"}], [], []]
    assert [{node["client"]: node["level"] for node in row["nodes"]}.get(1) for row in lines] == [0, None, 1, 1]
    assert grid.questions.count(VICTIM) == 1


def test_a_node_that_changes_into_what_nobody_can_serve_is_left_out(tmp_path: Path) -> None:
    grid = fleet(CONFIG)
    grid.fates[VICTIM] = change_in_round(grid, 0, memory="1 kB")
    serve(grid, CONFIG, settings(tmp_path / "run", min_nodes=3))
    first, second = rows(tmp_path / "run")
    reason = first["rejected"][0]["reason"]
    assert re.search("it says other limits than before; it is left out: .*no level fits", reason), reason
    assert second["clients"] == [0, 2, 3]


def test_levels_follow_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation: Federation = build(CONFIG)
    small, large = federation.costs
    grid = LoopGrid(make_client_app())
    said: list[dict[str, str]] = [{"memory": f"{small.memory} B"}, {"memory": f"{large.memory} B"}]
    said += [{"compute": f"{small.macs} MAC"}, {"memory": "1 B"}]
    for client, limits in enumerate(said):
        grid.add(FIRST + client, partition_id=client, **limits)
    serve(grid, dataclasses.replace(CONFIG, rounds=1), settings(tmp_path / "run", min_nodes=3, wait=0.5))
    (row,) = rows(tmp_path / "run")
    assert {node["client"]: node["level"] for node in row["nodes"]} == {0: 0, 1: 1, 2: 0}
    known = json.loads((tmp_path / "run" / "nodes.json").read_text())
    assert "no level fits" in known["refused"][0]["reason"]


def mixed_fleet(*sizes: int) -> LoopGrid:
    """Nodes whose memory is what a level needs."""
    grid = LoopGrid(make_client_app())
    for client, level in enumerate(sizes):
        grid.add(FIRST + client, partition_id=client, memory=f"{build(CONFIG).costs[level].memory} B")
    return grid


@pytest.mark.parametrize("method", ["alllarge", "largestonly"])
def test_a_method_of_the_largest_level_trains_only_nodes_that_can_hold_it(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid, least = mixed_fleet(0, 1, 0, 1), 2 if method == "alllarge" else 4
    config = make_config(CONFIG.to_dict(), [f"method={method}", "rounds=1"])
    with caplog.at_level("INFO", "flwr"):
        serve(grid, config, settings(tmp_path / "run", wait=0.5, min_nodes=least))
    (row,) = rows(tmp_path / "run")
    assert {node["client"]: node["level"] for node in row["nodes"]} == {1: 1, 3: 1}
    assert row["clients"] == [1, 3]
    assert {node for node, _ in grid.orders} == {FIRST + 1, FIRST + 3}
    told = [line for line in caplog.messages if line.startswith("incofl: node 1000 ")]
    if method == "alllarge":
        assert len(told) == 1
        assert "is left out: alllarge trains level 1 on it, which needs memory" in told[0]
        known = json.loads((tmp_path / "run" / "nodes.json").read_text())
        assert [entry["node"] for entry in known["refused"]] == ["1000", "1002"]
    else:
        assert told == ["incofl: node 1000 is client 0 and takes no part: it cannot hold the largest level"]


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("alllarge", "0 of 4 connected nodes .*; node 1000 is left out: alllarge trains level 1 on it, which needs"),
        ("largestonly", "largestonly needs the largest level, and none of 4 nodes can hold it"),
    ],
)
def test_a_fleet_too_small_for_the_method_is_refused_in_one_line(method: str, line: str, tmp_path: Path) -> None:
    grid = mixed_fleet(0, 0, 0, 0)
    config = make_config(CONFIG.to_dict(), [f"method={method}"])
    with pytest.raises(RunError, match=f"^round 1: {line}.*$") as refused:
        serve(grid, config, settings(tmp_path / "run", wait=0.5))
    assert "\n" not in str(refused.value)
    assert not grid.orders


def test_the_only_node_that_can_hold_the_largest_level_is_waited_for(tmp_path: Path) -> None:
    """For no longer than ``wait``, and however many others are there."""
    grid = mixed_fleet(0, 0, 0, 1)
    config = make_config(CONFIG.to_dict(), ["method=largestonly"])

    def leave(message: Message) -> Message:
        return grid.app(message, grid.nodes.pop(FIRST + 3))

    grid.fates[FIRST + 3] = leave
    with pytest.raises(RunError, match="round 2: largestonly needs the largest level, and none of 3 nodes can hold it"):
        serve(grid, config, settings(tmp_path / "run", wait=0.5, min_nodes=3))
    assert len(rows(tmp_path / "run")) == 1
