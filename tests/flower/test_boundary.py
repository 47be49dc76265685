"""What a server can do to a node, and a node to the server: no more than the training needs."""

import dataclasses
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from incofl.engine.federation import Job
from incofl.errors import ConfigError
from incofl.flower import Settings, make_client_app, transport
from incofl.flower.app import Node, _agreed, _facts
from incofl.flower.backend import GridExecutor
from incofl.flower.fleet import Fleet
from incofl.flower.memory import NodeMemory
from incofl.flower.monitor import Monitor
from incofl.flower.protocol import (
    Answer,
    Order,
    Refusal,
    Report,
    decode_order,
    decode_reply,
    encode_order,
    encode_reply,
)
from incofl.upload import Upload
from tests.federations import tiny_config, tiny_federation
from tests.flower.loop import LoopGrid, wired

WORDS = ["/etc", "../x", "a/b", "a\\b", "..", "a b", "x" * 65, "\x00"]


@pytest.mark.parametrize("run", WORDS)
def test_a_run_cannot_be_a_path(run: str) -> None:
    record = RecordDict({"order": ConfigRecord({**vars(Order()), "memory": [0, 0], "drawn": [], "run": run})})
    with pytest.raises(Refusal, match=r"order.run: got .*, expected letters and digits"):
        decode_order(record)


@pytest.mark.parametrize(
    "change",
    [
        {"client": "0/.."},
        {"client": -1},
        {"level": "../.."},
        {"round": 1.5},
        {"memory": ["/etc", "x"]},
        {"memory": [0, -1]},
        {"drawn": ["x"]},
        {"config": 3},
    ],
)
def test_orders_are_typed(change: dict[str, Any]) -> None:
    record = {**vars(Order()), "memory": [0, 0], "drawn": []} | change
    with pytest.raises(Refusal, match=f"order.{next(iter(change))}: got"):
        decode_order(RecordDict({"order": ConfigRecord(record)}))


def test_an_order_of_anything_else_is_refused_in_one_line() -> None:
    for content in ({}, {"order": ArrayRecord()}, {"order": ConfigRecord({}), "model": ConfigRecord()}):
        with pytest.raises(Refusal):
            decode_order(RecordDict(content))
    bad = ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"nonsense")})
    with pytest.raises(Refusal, match="'model' holds what is not an array"):
        decode_order(wired(encode_order(Order(), {"model": bad})))


def test_what_a_node_remembers_stays_in_its_folder_for_its_owner_alone(tmp_path: Path) -> None:
    order = Order(client=3, level=1, round=2, run="abc")
    NodeMemory(RecordDict(), order, str(tmp_path / "state")).keep({"w": torch.ones(2)})
    made = sorted((tmp_path / "state").rglob("*"))
    assert [path.relative_to(tmp_path).as_posix() for path in made] == [
        "state/abc",
        "state/abc/client-3",
        "state/abc/client-3/level-1-round-2.safetensors",
    ]
    assert [path.stat().st_mode & 0o077 for path in made] == [0, 0, 0]


@pytest.mark.parametrize("key", ["model.name", "method", "task.name", "data.name", "local.optimizer"])
def test_a_node_imports_nothing_that_only_the_server_names(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the node's working directory, which does something when it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "innocent.py").write_text("from pathlib import Path\nPath('imported').write_text('')\nthing = 3\n")
    toml = tiny_config().to_dict()
    table, _, name = key.rpartition(".")
    (toml[table] if table else toml)[name] = "innocent:thing"
    import tomli_w

    with pytest.raises(ConfigError, match=r"the server names 'innocent:thing', which this node was not installed with"):
        _agreed(tomli_w.dumps(toml), {}, ())
    assert not (tmp_path / "imported").exists()
    assert "innocent" not in sys.modules


def test_what_the_owner_of_a_node_allows_is_imported() -> None:
    config = tiny_config("local.optimizer=tests.flower.fleets:no_steps")
    with pytest.raises(ConfigError, match=r"make_client_app\(allowed=\['tests.flower.fleets:no_steps'\]\)"):
        _agreed(config.to_toml(), {}, ())
    assert _agreed(config.to_toml(), {}, ["tests.flower.fleets:no_steps"]) == config
    node = Node({"model": None, "data": None, "method": None, "task": None}, ["a:b"])
    assert node._allowed == ["a:b"]
    assert make_client_app(allowed=["a:b"])


@pytest.mark.parametrize(
    "toml", ["x = [", "seed = 3", "[model]\nname = 3", "x = " + "[" * 100000, "method = 'a'\nmodel = 1"]
)
def test_a_config_that_is_none_is_refused_in_one_line(toml: str) -> None:
    with pytest.raises(ConfigError):
        _agreed(toml, {}, ())


@pytest.mark.parametrize("facts", ["", "3", '{"pipeline": 1}', "[" * 100000])
def test_facts_are_those_that_servers_say(facts: str) -> None:
    with pytest.raises(ConfigError, match=r"order.facts"):
        _facts(facts)
    assert _facts('{"classes": 3}') == {"classes": 3}


def own_data_reply(**claims: Any) -> tuple[Any, RecordDict, Job]:
    """A federation whose examples only nodes have, and a reply with some claims."""
    federation = tiny_federation("model.name=tiny-mlp", "method=heteronova")
    job = Job(0, 0, 0)
    slice_ = federation.slice_of(job)
    given = slice_.take(federation.model.initial)
    layout = federation.model.layout
    tensors: dict[str, Any] = {part: {n: given[n] for n in given if n in own} for part, own in
               (("update", layout.parameters), ("buffers", layout.buffers))}  # fmt: skip
    said: dict[str, Any] = {"examples": 40, "steps": 3, "labels": [4] * 10} | claims
    upload = Upload(0, 0, slice_, examples=said["examples"], steps=said["steps"], loss=1.0, **tensors)
    upload = dataclasses.replace(upload, labels=torch.tensor(said["labels"]))
    return federation, wired(encode_reply(upload, 0)), job


def test_a_node_that_claims_any_number_of_examples_counts_like_a_large_one() -> None:
    """Of 2^50 examples and as many steps, what counts is what the largest honest node could have."""
    federation, content, job = own_data_reply(examples=2**50, steps=2**46)
    upload, _ = decode_reply(content, federation, job, most_examples=400)
    assert upload.examples == 400
    assert upload.steps == 25  # one epoch in batches of 16
    assert upload.normaliser == federation.method.client.normaliser(federation.local, 25)
    federation, content, job = own_data_reply()
    honest, _ = decode_reply(content, federation, job, most_examples=400)
    assert (honest.examples, honest.steps) == (40, 3)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"labels": [2**52] * 10}, "it has .* labels, expected at most 40"),
        ({"labels": [5] * 9 + [0]}, "it has 45 labels, expected at most 40"),
        ({"steps": 4}, "it has made 4 steps, expected at most 3"),
    ],
)
def test_numbers_that_contradict_each_other(claims: dict[str, Any], reason: str) -> None:
    federation, content, job = own_data_reply(**claims)
    with pytest.raises(Refusal, match=reason):
        decode_reply(content, federation, job, most_examples=400)


def make_fleet(path: Path, **settings: Any) -> Fleet:
    return Fleet(LoopGrid(None), Settings(**settings), path / "nodes.json", tiny_federation("model.name=tiny-mlp"))


def test_the_examples_that_count_follow_from_the_median(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path)
    assert fleet.most_examples == 0
    for client, examples in enumerate((30, 50, 2**50)):
        fleet.welcome(70 + client, Answer(client=client, examples=examples))
    assert fleet.most_examples == 500


def test_what_nodes_hold_out_cannot_be_outvoted(tmp_path: Path) -> None:
    """Three nodes with 10 examples of which 5 are right, and one that claims 2^50, all wrong: it counts ten times."""
    executor: Any = GridExecutor.__new__(GridExecutor)
    federation = tiny_federation("model.name=tiny-mlp")
    executor.settings, executor.federation = Settings(), federation
    executor._metric = federation.task.all_metrics["accuracy"]
    executor.__dict__["_totals_shape"] = (2,)

    def report(right: float, tested: int, claimed: float) -> Report:
        return Report(0, 0, 0, 10, 1, 1.0, tested=tested, totals=(right, claimed))

    honest = [report(5, 10, 10)] * 3
    assert executor._held_out(honest) == 0.5
    for liar in (report(0, 2**50, 2.0**50), report(0, 10, 2.0**50)):
        assert executor._held_out([*honest, liar]) == pytest.approx(15 / 130)


def test_a_client_number_belongs_to_the_key_that_had_it_first(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, bound=True)
    fleet.welcome(70, Answer(client=0))
    fleet.meet([71])  # 70 is gone
    with pytest.raises(ConfigError, match=r"partition-id: got 0, which belongs to the key of node 70 \(bound\)"):
        fleet.welcome(71, Answer(client=0))
    for id in range(71, 80):
        fleet.welcome(id, Answer())
    with pytest.raises(ConfigError, match="no client number is left"):
        fleet.welcome(80, Answer())
    assert fleet.welcome(70, Answer(client=0)).client == 0  # it comes back
    fleet.save()
    with pytest.raises(ConfigError, match="belongs to the key of node 70"):  # also when the server is new
        make_fleet(tmp_path, bound=True).welcome(81, Answer(client=0))
    assert make_fleet(tmp_path).welcome(81, Answer(client=0)).client == 0


def test_the_endpoint_is_on_this_machine_alone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monitor = Monitor(port)
    try:
        assert monitor._server.server_address[0] == "127.0.0.1"
    finally:
        monitor.close()
    assert Settings().metrics_host == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"metrics_port: got 1 at 256.0.0.1"):
        Monitor(1, "256.0.0.1")


def unpacked(array: Array, repeated: int, allowance: float) -> Array:
    """The array as it arrives in pieces, of which the first is named some times more."""
    objects = {name: value.deflate() for name, value in get_all_nested_objects(array).items()}
    content = objects.pop(array.object_id)
    head, _, body = content.partition(b"\x00")
    told = json.loads(body)
    told["arraychunk_ids"] = [0] * repeated
    body = json.dumps(told).encode()
    head = b" ".join([*head.split(b" ")[:-1], str(len(body)).encode()])
    objects["bomb"] = head + b"\x00" + body
    transport.ALLOWANCE.left = allowance
    try:
        made = inflate_object_from_contents("bomb", objects)
        assert isinstance(made, Array)
        return made
    finally:
        transport.ALLOWANCE.left = float("inf")


def test_a_reply_is_not_unpacked_if_it_would_be_too_large() -> None:
    array = Array(torch.zeros(1000).numpy())
    assert len(unpacked(array, 3, 20000).data) == 3 * len(array.data)
    with pytest.raises(ValueError, match="it would unpack to more than a reply can be"):
        unpacked(array, 10**6, 20000)


def test_early_replies_take_a_bounded_place_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one, no two wait at a time, and the round is the same."""
    import incofl
    from incofl.flower import backend
    from tests.flower.fleets import comparable, final_state, fleet, settings

    config, most = tiny_config("rounds=1", "model.name=tiny-mlp", "data.limit=100"), []
    look = backend.GridExecutor._early_bytes

    def watched(self: Any, under_way: Any) -> int:
        most.append(sum(turn.early for turn in under_way))
        return look(self, under_way)

    monkeypatch.setattr(backend.GridExecutor, "_early_bytes", watched)
    for name, room in (("small", 1), ("large", 2**30)):
        chosen = settings(tmp_path / name, early_bytes=room, deadline=60.0)
        incofl.run(config, tmp_path / name, backend=backend.FlowerBackend(fleet(config), chosen), progress=False)
        assert max(most) <= 1 or name == "large"
        most.clear()
    assert final_state(tmp_path / "small") == final_state(tmp_path / "large")
    assert comparable(tmp_path / "small") == comparable(tmp_path / "large")
