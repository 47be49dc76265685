"""Your own models, data, tasks and methods; the settings of a fleet, and its endpoint."""

import contextlib
import dataclasses
import json
import runpy
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import incofl
from incofl import METHODS, Data, InCo, Metric, ServerAdam, Task
from incofl.config import Config, load_config
from incofl.engine.build import build_model
from incofl.errors import ConfigError, RunError
from incofl.flower import Settings, make_client_app, make_server_app, serve
from incofl.flower.backend import FlowerBackend
from incofl.flower.settings import read_run_config
from tests.federations import tiny_config
from tests.flower.fleets import final_state, fleet, rows
from tests.flower.fleets import settings as impatient
from tests.flower.loop import LoopGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_own_app.py"
Objects = dict[str, Any]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE), run_name="example")


def nodes(app: Any, clients: int = 8) -> LoopGrid:
    grid = LoopGrid(app)
    for client in range(clients):
        grid.add(50 + client, partition_id=client, num_partitions=clients)
    return grid


def context(**run_config: Any) -> Context:
    known = {key.replace("__", ".").replace("_", "-"): value for key, value in run_config.items()}
    return Context(0, 0, {}, RecordDict(), known)


def train(
    config: Mapping[str, Any], out: Path, server: Objects, client: Objects, clients: int = 8, **run_config: Any
) -> list[dict[str, Any]]:
    """The rounds of a run with some objects on the server and on the nodes."""
    app = make_server_app(config, **server, out=str(out), poll=0.01)
    app(nodes(make_client_app(**client), clients), context(**run_config))
    return rows(out)


@pytest.fixture
def ours(example: dict[str, Any]) -> Objects:
    """The objects of the server."""
    return {"model": example["model"], "data": example["server_data"]}


@pytest.fixture
def theirs(example: dict[str, Any]) -> Objects:
    """The objects of a node."""
    return {"model": example["model"], "data": example["node_data"]}


def test_the_example_learns(example: dict[str, Any], ours: Objects, tmp_path: Path) -> None:
    grid = nodes(example["client_app"])
    example["server_app"](grid, context(out=str(tmp_path / "run"), poll=0.01, rounds=3))
    lines = rows(tmp_path / "run")
    assert len(lines) == 3
    assert lines[-1]["accuracy"] > max(0.5, lines[0]["accuracy"])
    assert len(lines[-1]["accuracy_by_level"]) == 4
    assert 'name = "object:own"' in (tmp_path / "run" / "config.toml").read_text()
    models = [incofl.load_model(tmp_path / "run", level, **ours) for level in (0, 3)]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert sizes[0] < sizes[1] / 2
    assert not (tmp_path / "run" / "partition.json").exists()  # the server does not know which examples nodes have


def test_privacy_is_refused_where_nobody_knows_the_fleet(tmp_path: Path) -> None:
    """Its denominators would be what nodes say that they are."""
    config = tiny_config("method=heteroavg+privacy", "privacy.noise=1", 'model.options={norm="group"}')
    with pytest.raises(ConfigError, match="flower: got an open fleet, expected what is known before the first round"):
        incofl.run(config, tmp_path / "run", backend=FlowerBackend(fleet(config), impatient(tmp_path)), progress=False)


def test_what_goes_wrong_is_said_without_the_way_there() -> None:
    """Flower shows a traceback: it ends with our line, and has no frame below that of the server app."""
    with pytest.raises(ConfigError, match="rounds: got 'many'") as problem:
        make_server_app()(LoopGrid(None), context(rounds="many"))
    assert [frame.name for frame in problem.traceback][-1] == "main"


def test_own_optimizers_and_loaders_are_used(
    example: dict[str, Any], ours: Objects, theirs: Objects, tmp_path: Path
) -> None:
    """A rate of 0 leaves everything as it is; batches from a loader are examples like any other."""

    def loader(context: Any) -> Any:
        return DataLoader(TensorDataset(*example["node_data"](context)), batch_size=17)

    states = []
    for name, objects, optimizer in (
        ("still", theirs | {"allowed": ["tests.flower.fleets:no_steps"]}, "tests.flower.fleets:no_steps"),
        ("loader", theirs | {"data": loader}, "adamw"),
        ("plain", theirs, "adamw"),
    ):
        few: dict[str, Any] = {"rounds": 1, "cohort": 1, "data__clients": 2, "eval__every": 2}
        train(example["config"], tmp_path / name, ours, objects, 2, **few, local__optimizer=optimizer)
        states.append(final_state(tmp_path / name))
    assert states[1] == states[2] != states[0]
    still = incofl.load_model(tmp_path / "still", **ours).state_dict()
    initial = build_model(load_config(tmp_path / "still" / "config.toml", **ours)).initial
    assert all(torch.equal(still[name], initial[name]) for name in still)


def test_without_test_examples_nothing_is_evaluated(
    example: dict[str, Any], ours: Objects, theirs: Objects, tmp_path: Path
) -> None:
    """Nodes that return pairs have the server's data, whatever that calls them."""
    data = dataclasses.replace(example["server_data"], test=None, name="hospital")
    (row,) = train(example["config"], tmp_path / "run", ours | {"data": data}, theirs, rounds=1)
    assert row["accuracy"] is None
    assert row["loss"] > 0
    assert "accuracy_on_nodes" not in row


def with_test(example: dict[str, Any], test: Any = None) -> Any:
    """A function that gives a node its examples, and the server's test examples as those that it holds out."""

    def data(context: Any) -> Data:
        return Data(example["node_data"](context), example["server_data"].test if test is None else test)

    return data


def test_nodes_evaluate_what_they_are_sent(
    example: dict[str, Any], ours: Objects, theirs: Objects, tmp_path: Path
) -> None:
    """On the server's own examples, it is what the server found after the round before."""
    first, second = train(
        example["config"], tmp_path / "run", ours, theirs | {"data": with_test(example)}, rounds=2, cohort=8
    )
    assert {node["level"] for node in second["nodes"]} == {0, 1, 2, 3}
    for node in second["nodes"]:
        assert node["tested"] == 297
        assert node["accuracy"] == pytest.approx(first["accuracy_by_level"][node["level"]], abs=1e-12)
    mean = sum(node["accuracy"] for node in second["nodes"]) / 8
    assert second["accuracy_on_nodes"] == pytest.approx(mean, abs=1e-12)
    assert second["accuracy_on_nodes"] != first["accuracy_on_nodes"]


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, nn.functional.one_hot(target, 10).float())


def table(output: Tensor, target: Tensor) -> Tensor:
    """How often each class is taken for each class."""
    return torch.bincount(10 * target + output.argmax(1), minlength=100).view(10, 10)


TABLE = Metric(table, lambda totals: float(totals.diag().sum() / totals.sum()), percent=True)
TASKS = {
    "table": Task(own_loss, {"table": TABLE}, "squares"),  # totals of two dimensions
    "loss": Task(own_loss, name="squares"),  # no metric but the loss
}


@pytest.mark.parametrize("metric", TASKS)
def test_tasks_of_your_own(
    metric: str, example: dict[str, Any], ours: Objects, theirs: Objects, tmp_path: Path
) -> None:
    """Any metric of a task adds up over nodes, and nodes report no labels where a task has no classes."""
    task = TASKS[metric]
    theirs = theirs | {"data": with_test(example), "task": task}
    lines = train(example["config"], tmp_path / "run", ours | {"task": task}, theirs, rounds=2, cohort=8)
    assert lines[0]["rejected"] == lines[1]["rejected"] == []
    for node in lines[1]["nodes"]:
        assert node["accuracy"] == pytest.approx(lines[0]["accuracy_by_level"][node["level"]], rel=1e-5)
    mean = sum(node["accuracy"] for node in lines[1]["nodes"]) / 8
    assert lines[1]["accuracy_on_nodes"] == pytest.approx(mean, rel=1e-9)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metric"] == metric


@pytest.mark.parametrize(
    ("totals", "reason"),
    [
        ([3.0, 2.0], "its accuracy on held-out examples is 1.5, expected a possible value"),
        ([0.0, 0.0], "its accuracy on held-out examples is None, expected a possible value"),
        ([-1.0, 2.0], "its accuracy on held-out examples is -0.5, expected a possible value"),
        ([float("nan"), 2.0], "report.totals: got [nan, 2.0], expected a list"),
        ([1.0, 2.0, 3.0], "'totals' is not a list of 2 numbers"),
        ([], "'totals' is not a list of 2 numbers"),
    ],
)
def test_totals_that_cannot_be(
    totals: list[float], reason: str, example: dict[str, Any], ours: Objects, theirs: Objects, tmp_path: Path
) -> None:
    grid = nodes(make_client_app(**theirs | {"data": with_test(example)}))

    def lie(message: Any) -> Any:
        reply = grid.app(message, grid.nodes[51])
        reply.content["report"]["totals"] = totals
        return reply

    grid.fates[51] = lie
    app = make_server_app(example["config"], **ours, out=str(tmp_path / "run"), poll=0.01)
    app(grid, context(rounds=1, cohort=8))
    (row,) = rows(tmp_path / "run")
    assert row["rejected"] == [{"client": 1, "reason": f"client 1: node 51: {reason}"}]
    assert 0 <= row["accuracy_on_nodes"] <= 1


def test_methods_of_your_own(example: dict[str, Any], ours: Objects, theirs: Objects, tmp_path: Path) -> None:
    """Without a name that could be imported: server and nodes have the same object."""
    method = METHODS["heteroprox"].then(InCo(rule="theorem"))
    values = {**example["config"], "rounds": 1}
    (row,) = train(values, tmp_path / "run", ours | {"method": method}, theirs | {"method": method})
    assert row["inco"]
    assert row["rejected"] == []
    other = METHODS["heteroprox"].then(InCo()).then(ServerAdam())
    with pytest.raises(RunError, match="0 accepted replies"):
        train(values, tmp_path / "b", ours | {"method": method}, theirs | {"method": other}, attempts=1)


def test_the_same_data_everywhere_are_divided_by_the_config(example: dict[str, Any], tmp_path: Path) -> None:
    """A whole Data on server and nodes: the partition of the seed, and the bits of the engine."""
    data = Data(example["digits"](slice(400)), example["digits"](slice(1500, 1600)))
    objects, values = {"model": example["model"], "data": data}, {**example["config"], "rounds": 1}
    incofl.run(values, tmp_path / "here", **objects, progress=False)
    train(values, tmp_path / "there", objects, objects)
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")


def test_nothing_that_a_config_says_of_an_own_model_is_ignored(
    example: dict[str, Any], ours: Objects, theirs: Objects, tmp_path: Path
) -> None:
    values = {**example["config"], "rounds": 1, "split": {"kind": "layer", "levels": [1, 4]}}
    train(values, tmp_path / "run", ours, theirs, data__clients=4, cohort=2, wait=0.1)
    config = load_config(tmp_path / "run" / "config.toml", **ours)
    assert config.split.levels == (1, 4)
    assert config.data.clients == 4
    with pytest.raises(ConfigError, match=r"model\.width: got 0\.5, but example:model has no parameter 'width'"):
        train(values, tmp_path / "other", ours, theirs, model__width=0.5)
    with_norm = {"model": nn.Sequential(example["model"](), nn.BatchNorm1d(10))}
    with pytest.raises(ConfigError, match="buffers: got 'static', expected another: the server has no examples"):
        train(example["config"], tmp_path / "static", ours | with_norm, theirs | with_norm, buffers="static")


@pytest.mark.parametrize("what", ["model", "data", "task", "no model", "shape", "labels"])
def test_a_node_with_other_objects_says_so(
    what: str,
    example: dict[str, Any],
    ours: Objects,
    theirs: Objects,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def another() -> Any:
        return example["model"]()

    def data(context: Any) -> Any:
        x, y = example["node_data"](context)
        if what == "data":
            return Data((x, y), name="cats")
        return (x[:, :, :4], y) if what == "shape" else (x, y + 3)

    same = "give make_server_app and make_client_app the same objects"
    cases: dict[str, tuple[Objects, str]] = {
        "model": ({"model": another}, f"another; {same}"),
        "data": ({"data": data}, f"data: the server has object:own, this node object:cats; {same}"),
        "task": ({"task": "segmentation"}, f"task: the server has classification, this node segmentation; {same}"),
        "no model": ({"model": None}, f"model: the server has object:model, this node nothing; {same}"),
        "shape": ({"data": data}, "model.name: example:model fails on a batch of shape (3, 1, 4, 8)"),
        "labels": ({"data": data}, "train: a target is 12, expected classes below 10"),
    }
    given, reason = cases[what]
    with pytest.raises(RunError, match="0 accepted replies"):
        train(example["config"], tmp_path / "run", ours, theirs | given, rounds=1, attempts=1)
    assert reason in caplog.text


def test_run_config() -> None:
    given = {"config": "demo", "min-replies": 2, "deadline": 30, "rounds": 3, "data.alpha": 0.1, "engine.trace": True}
    settings, config, overrides = read_run_config(given, Settings(out="x", window=5))
    assert settings == Settings(out="x", window=5, min_replies=2, deadline=30.0)
    assert config == "demo"
    assert overrides == ["rounds=3", "data.alpha=0.1", "engine.trace=true"]
    for bad, message in (
        ({"min-replies": "two"}, "min_replies: got 'two', expected a whole number >= 0"),
        ({"resume": "yes"}, "resume: got 'yes', expected true or false"),
        ({"deadline": True}, "deadline: got True, expected a number > 0"),
        ({"deadline": 0}, "deadline: got 0, expected a number > 0"),
        ({"window": 0}, "window: got 0, expected a whole number >= 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_run_config(bad, Settings())


def test_unknown_keys_of_the_run_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'dead-line'"):
        make_server_app(out=str(tmp_path))(LoopGrid(None), context(dead_line=3))
    with pytest.raises(ConfigError, match=r"unknown key 'settings\.dead_line'; did you mean 'settings.deadline'"):
        make_server_app(dead_line=3)
    with pytest.raises(ConfigError, match=r"engine\.compile"):
        make_server_app(out=str(tmp_path))(LoopGrid(None), context(engine__compile=True))


def test_the_endpoint_shows_the_run(tmp_path: Path) -> None:
    import socket

    from incofl.flower.monitor import Monitor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.listen()
        with pytest.raises(ConfigError, match="metrics_port"):
            Monitor(port)
    seen: list[str] = []

    class Reader(Monitor):
        def finished_round(self, row: dict[str, Any]) -> None:
            super().finished_round(row)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                seen.append(page.read().decode())

    from incofl.flower.backend import FlowerBackend
    from tests.federations import tiny_config
    from tests.flower.fleets import fleet, settings

    config: Config = tiny_config("rounds=2", "data.clients=2", "cohort=2", "data.limit=40", "model.name=tiny-mlp")
    config = dataclasses.replace(config, split=dataclasses.replace(config.split, levels=2))
    with contextlib.closing(Reader(port)) as monitor:
        backend = FlowerBackend(fleet(config), settings(tmp_path / "run"))
        incofl.run(config, tmp_path / "run", progress=monitor, backend=backend)
    assert "incofl_round 2.0" in seen[1]
    accuracy = rows(tmp_path / "run")[1]["accuracy_by_level"][1]
    assert f'incofl_accuracy{{level="1"}} {accuracy}' in seen[1]
    assert 'incofl_node_peak_memory{client="0"}' in seen[0]
    assert 'incofl_node_level{client="1"} 1.0' in seen[0]
    assert "incofl_rejected_total 0.0" in seen[1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_a_misspelt_key_of_a_nodes_config_is_named(tmp_path: Path) -> None:
    """A function that loads a node's data may read keys of its own."""
    from tests.federations import tiny_config
    from tests.flower.fleets import settings

    config = tiny_config("rounds=1", "data.clients=2", "cohort=1", "data.limit=40")
    grid = LoopGrid(make_client_app())
    grid.add(1, partition_id=0)
    grid.add(2, partition_id=1, levle=2)
    serve(grid, config, settings(tmp_path / "run", wait=1))
    (refused,) = json.loads((tmp_path / "run" / "nodes.json").read_text())["refused"]
    assert refused["node"] == "2"
    assert refused["reason"] == "config: unknown key 'node-config.levle'; did you mean 'node-config.level'?"


def test_serve_is_what_the_app_calls(tmp_path: Path) -> None:
    from tests.federations import tiny_config
    from tests.flower.fleets import fleet, settings

    config = tiny_config("rounds=1", "data.clients=2", "cohort=1", "data.limit=40", "model.name=tiny-mlp")
    summary = serve(fleet(config), config, settings(tmp_path / "a"))
    assert summary["status"] == "done"
    make_server_app(config, out=str(tmp_path / "b"), poll=0.01)(fleet(config), context())
    assert final_state(tmp_path / "a") == final_state(tmp_path / "b")
