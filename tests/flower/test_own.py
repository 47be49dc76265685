"""Models, examples and optimisers of users' own, the settings of a fleet, and its endpoint."""

import dataclasses
import json
import runpy
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch.utils.data import DataLoader, TensorDataset

import incofl
from incofl.config import Config, load_config
from incofl.engine.build import build_model
from incofl.errors import ConfigError, DataError
from incofl.flower import Settings, Task, make_client_app, make_server_app, serve
from incofl.flower.settings import read_run_config
from incofl.flower.task import as_examples
from tests.flower.fleets import final_state, rows
from tests.flower.loop import LoopGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_own_app.py"


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


def test_the_example_learns(example: dict[str, Any], tmp_path: Path) -> None:
    grid = nodes(example["client_app"])
    out = str(tmp_path / "run")
    example["server_app"](grid, context(out=out, poll=0.01, rounds=3))
    lines = rows(tmp_path / "run")
    assert len(lines) == 3
    assert lines[-1]["accuracy"] > max(0.5, lines[0]["accuracy"])
    assert len(lines[-1]["accuracy_by_level"]) == 4
    assert load_config(tmp_path / "run" / "config.toml").data.name == "own"
    sizes = [sum(p.numel() for p in incofl.load_model(tmp_path / "run", level).parameters()) for level in (0, 3)]
    assert sizes[0] < sizes[1] / 2
    assert not (tmp_path / "run" / "partition.json").exists()  # whose examples are whose is not the server's business


def test_what_goes_wrong_is_said_without_the_way_there() -> None:
    """Flower shows a traceback: it ends with our line, and has no frame below that of the server app."""
    with pytest.raises(ConfigError, match="rounds: got 'many'") as problem:
        make_server_app()(LoopGrid(None), context(rounds="many"))
    assert [frame.name for frame in problem.traceback][-1] == "main"


def test_own_optimizers_and_loaders_are_used(example: dict[str, Any], tmp_path: Path) -> None:
    """A rate of 0 leaves everything as it is; batches from a loader are examples like any other."""
    task: Task = example["task"]

    def loader(context: Any) -> Any:
        return DataLoader(TensorDataset(*example["load"](context)), batch_size=17)

    states = []
    for name, other in (
        ("still", dataclasses.replace(task, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))),
        ("loader", dataclasses.replace(task, data=loader)),
        ("plain", task),
    ):
        app = make_server_app(example["config"], other, out=str(tmp_path / name), poll=0.01)
        app(nodes(make_client_app(other), 2), context(rounds=1, cohort=1, data__clients=2, eval__every=2))
        states.append(final_state(tmp_path / name))
    assert states[1] == states[2] != states[0]
    still = incofl.load_model(tmp_path / "still").state_dict()
    initial = build_model(load_config(tmp_path / "still" / "config.toml")).initial
    assert all(torch.equal(still[name], initial[name]) for name in still)


def test_without_test_examples_nothing_is_evaluated(example: dict[str, Any], tmp_path: Path) -> None:
    task = dataclasses.replace(example["task"], test=None)
    app = make_server_app({**example["config"], "rounds": 1}, task, out=str(tmp_path / "run"), poll=0.01)
    app(nodes(make_client_app(task)), context())
    (row,) = rows(tmp_path / "run")
    assert row["accuracy"] is None
    assert row["loss"] > 0


def test_nodes_evaluate_what_they_are_sent(example: dict[str, Any], tmp_path: Path) -> None:
    """On the server's own examples, it is what the server found after the round before."""
    task = dataclasses.replace(example["task"], held_out=lambda context: example["held_out"]())
    app = make_server_app({**example["config"], "rounds": 2, "cohort": 8}, task, out=str(tmp_path / "run"), poll=0.01)
    app(nodes(make_client_app(task)), context())
    first, second = rows(tmp_path / "run")
    assert {node["level"] for node in second["nodes"]} == {0, 1, 2, 3}
    for node in second["nodes"]:
        assert node["tested"] == 297
        assert node["correct"] / 297 == pytest.approx(first["accuracy_by_level"][node["level"]], abs=1e-12)
    correct = sum(node["correct"] for node in second["nodes"])
    assert second["accuracy_on_nodes"] == pytest.approx(correct / (8 * 297), abs=1e-12)
    assert second["accuracy_on_nodes"] != first["accuracy_on_nodes"]


def test_nothing_that_a_config_says_of_an_own_model_is_ignored(example: dict[str, Any], tmp_path: Path) -> None:
    values = {**example["config"], "rounds": 1, "split": {"kind": "layer", "levels": [1, 4]}}
    app = make_server_app(values, example["task"], out=str(tmp_path / "run"), poll=0.01)
    app(nodes(example["client_app"]), context(data__clients=4, cohort=2, wait=0.1))
    config = load_config(tmp_path / "run" / "config.toml")
    assert config.split.levels == (1, 4)
    assert config.data.clients == 4
    with pytest.raises(ConfigError, match=r"model\.width: got 0\.5, but example:model has no parameter 'width'"):
        app(nodes(example["client_app"]), context(model__width=0.5, out=str(tmp_path / "other")))


def test_a_node_with_another_model_says_so(example: dict[str, Any], tmp_path: Path) -> None:
    def another() -> Any:
        return example["model"]()

    node = make_client_app(dataclasses.replace(example["task"], model=another))
    app = make_server_app({**example["config"], "rounds": 1}, example["task"], out=str(tmp_path / "run"), poll=0.01)
    with pytest.raises(incofl.errors.RunError, match="0 accepted replies"):
        app(nodes(node), context(attempts=1))


def test_examples_that_are_none() -> None:
    for given in (7, (torch.zeros(3), torch.zeros(2, dtype=torch.int64)), (torch.zeros(3), torch.zeros(3)), [1, 2]):
        with pytest.raises((ConfigError, DataError), match="expected"):
            as_examples(given, "data")  # type: ignore[arg-type]


def test_run_config() -> None:
    given = {"config": "demo", "min-replies": 2, "deadline": 30, "rounds": 3, "data.alpha": 0.1, "engine.trace": True}
    settings, config, overrides = read_run_config(given, Settings(out="x", window=5))
    assert settings == Settings(out="x", window=5, min_replies=2, deadline=30.0)
    assert config == "demo"
    assert overrides == ["rounds=3", "data.alpha=0.1", "engine.trace=true"]
    for bad, message in (
        ({"min-replies": "two"}, "min-replies: got 'two', expected a int"),
        ({"resume": "yes"}, "resume: got 'yes', expected a bool"),
        ({"deadline": True}, "deadline: got True, expected a float"),
        ({"deadline": 0}, "deadline: got 0.0, expected a number > 0"),
        ({"window": 0}, "window: got 0, expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_run_config(bad, Settings())


def test_unknown_keys_of_the_run_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'dead-line'"):
        make_server_app(out=str(tmp_path))(LoopGrid(None), context(dead_line=3))
    with pytest.raises(ConfigError, match=r"engine\.compile"):
        make_server_app(out=str(tmp_path))(LoopGrid(None), context(engine__compile=True))


def test_the_endpoint_shows_the_run(tmp_path: Path) -> None:
    import socket

    from incofl.engine.run import Silent
    from incofl.flower.monitor import Monitor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.listen()
        with pytest.raises(ConfigError, match="metrics-port"), Monitor(Silent(), port):
            pass
    seen: list[str] = []

    class Reader(Silent):
        def finished_round(self, row: dict[str, Any]) -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                seen.append(page.read().decode())

    from incofl.flower.site import FlowerSite
    from tests.federations import tiny_config
    from tests.flower.fleets import fleet, settings

    config: Config = tiny_config("rounds=2", "data.clients=2", "cohort=2", "data.limit=40", "model.name=tiny-mlp")
    config = dataclasses.replace(config, split=dataclasses.replace(config.split, levels=2))
    with Monitor(Reader(), port) as monitor:
        site = FlowerSite(fleet(config), settings(tmp_path / "run"))
        incofl.run(config, tmp_path / "run", progress=monitor, site=site)
    assert "incofl_round 2.0" in seen[1]
    accuracy = rows(tmp_path / "run")[1]["accuracy_by_level"][1]
    assert f'incofl_accuracy{{level="1"}} {accuracy}' in seen[1]
    assert 'incofl_node_peak_memory{client="0"}' in seen[0]
    assert 'incofl_node_level{client="1"} 1.0' in seen[0]
    assert "incofl_rejected_total 0.0" in seen[1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_a_misspelt_key_of_a_nodes_config_is_named(tmp_path: Path) -> None:
    """Nodes of a task may have keys of their own, as those of the example."""
    from tests.federations import tiny_config
    from tests.flower.fleets import settings

    config = tiny_config("rounds=1", "data.clients=2", "cohort=1", "data.limit=40")
    grid = LoopGrid(make_client_app())
    grid.add(1, partition_id=0)
    grid.add(2, partition_id=1, levle=2)
    serve(grid, config, settings(tmp_path / "run", wait=1))
    (refused,) = json.loads((tmp_path / "run" / "nodes.json").read_text())["refused"]
    assert refused["node"] == "2"
    assert refused["reason"].startswith("node-config: unknown key 'levle', expected some of bandwidth, compute, ")


def test_serve_is_what_the_app_calls(tmp_path: Path) -> None:
    from tests.federations import tiny_config
    from tests.flower.fleets import fleet, settings

    config = tiny_config("rounds=1", "data.clients=2", "cohort=1", "data.limit=40", "model.name=tiny-mlp")
    summary = serve(fleet(config), config, settings(tmp_path / "a"))
    assert summary["status"] == "done"
    make_server_app(config, out=str(tmp_path / "b"), poll=0.01)(fleet(config), context())
    assert final_state(tmp_path / "a") == final_state(tmp_path / "b")
