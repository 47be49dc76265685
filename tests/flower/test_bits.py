"""Rounds over messages give the bits of rounds in this process, through restarts and interruptions too."""

import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

import incofl
from incofl.engine.build import build_model
from incofl.engine.run_folder import RunFolder
from incofl.flower import make_client_app, serve
from incofl.methods import ADAPTERS, METHODS
from tests.federations import tiny_config
from tests.flower.fleets import FIRST, comparable, final_state, fleet, rows, settings
from tests.flower.loop import LoopGrid

VIT = ("model.name=tiny-vit", "model.patch=2")
RANKS = ("model.name=tiny-mlp", "split.levels=[2, 4, 8]")


@pytest.mark.parametrize("method", [name for name in METHODS if not name.endswith("+noise")])  # a server's matter
def test_two_rounds_are_those_of_the_engine(method: str, tmp_path: Path) -> None:
    other = RANKS if method in ADAPTERS else VIT if method.startswith("reefl") else ()
    config = tiny_config(f"method={method}", "rounds=2", "engine.workers=1", *other)
    incofl.run(config, tmp_path / "here", progress=False)
    grid = fleet(config)
    serve(grid, config, settings(tmp_path / "there", window=2))
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")
    assert comparable(tmp_path / "here") == comparable(tmp_path / "there")
    assert grid.most == 2  # the window
    orders = [len(set(row["clients"])) for row in rows(tmp_path / "there")]
    assert len(grid.orders) == sum(orders) == (6 if method == "largestonly" else 8)  # three nodes hold the largest
    frozen = build_model(config).layout.frozen
    assert not any(content["model"].keys() & frozen or "frozen" in content for _, content in grid.orders)
    (first, *_) = rows(tmp_path / "there")[0]["nodes"]
    assert first["node"] == str(FIRST + first["client"])
    assert first["bytes_up"] > 0 < first["bytes_down"]
    assert first["seconds"] > 0 < first["cpu_seconds"]
    assert first["peak_memory"] > 10**7


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ["method=heteroavg", "split.start=identity"],
        ["method=heteroavg", "split.start=identity", "split.grow=[1,2]"],
        ["method=incoscaffold+anchor", "split.start=identity", "split.grow=[1,2]"],
        ["method=heteroavg+anchor", "anchor.distil=0.5"],
        ["method=heteroavg+coverage"],
        ["method=heteroavg+coverage", "coverage.kind=signal"],
        ["method=incoavg", "inco.rule=norm-only"],
        ["method=incoavg", "inco.shuffle=true"],
        ["method=heteroavg+deepscale"],
    ],
    ids=" ".join,
)
def test_what_leaves_no_device_worse_off_is_that_of_the_engine(keys: list[str], tmp_path: Path) -> None:
    config = tiny_config(*keys, "rounds=3", "engine.workers=1")
    incofl.run(config, tmp_path / "here", progress=False)
    serve(fleet(config), config, settings(tmp_path / "there"))
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")
    assert comparable(tmp_path / "here") == comparable(tmp_path / "there")


@pytest.mark.parametrize(
    "keys",
    [
        ["method=heteroavg", "split.grow=[0,0]"],
        ["method=heteroavg+anchor", "anchor.weight=0"],
        ["method=heteroavg+coverage", "coverage.c=0"],
        ["method=heteroavg+deepscale", "deepscale.factor=1"],
    ],
    ids=" ".join,
)
def test_parts_that_change_nothing_are_heteroavg(keys: list[str], tmp_path: Path) -> None:
    plain, config = (tiny_config(*words, "rounds=2", "engine.workers=1") for words in (["method=heteroavg"], keys))
    incofl.run(plain, tmp_path / "here", progress=False)
    serve(fleet(config), config, settings(tmp_path / "there"))
    here, there = (load_file(RunFolder(tmp_path / place).checkpoint) for place in ("here", "there"))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds of a method whose clients remember, in this process; every client has several turns."""
    folder = tmp_path_factory.mktemp("scaffold") / "whole"
    incofl.run(SCAFFOLD, folder)
    return folder


SCAFFOLD = tiny_config(
    *("method=incoscaffold", "rounds=4", "engine.workers=1", "cohort=3", "data.clients=4", "data.limit=120"),
    *("split.levels=2", "model.name=tiny-mlp"),
)


@pytest.mark.parametrize("turn", [4, 5, 8])
def test_a_server_that_dies_in_a_round_is_resumed_bit_for_bit(turn: int, undisturbed: Path, tmp_path: Path) -> None:
    """What nodes made of the unfinished round is not what they start from afterwards."""
    grid = fleet(SCAFFOLD, state_dir=str(tmp_path / "nodes"))
    turns = 0

    def die(message: Message) -> Message:
        nonlocal turns
        turns += 1
        reply = grid.app(message, grid.nodes[message.metadata.dst_node_id])
        if turns == turn:
            raise KeyboardInterrupt
        return reply

    grid.fates = dict.fromkeys(grid.nodes, die)
    with pytest.raises(KeyboardInterrupt):
        serve(grid, SCAFFOLD, settings(tmp_path / "run"))
    assert len(rows(tmp_path / "run")) == (turn - 1) // 3
    again = fleet(SCAFFOLD, state_dir=str(tmp_path / "nodes"))  # and nodes that have restarted, too
    serve(again, SCAFFOLD, settings(tmp_path / "run", resume=True))
    assert final_state(undisturbed) == final_state(tmp_path / "run")
    assert comparable(undisturbed) == comparable(tmp_path / "run")


def test_pools_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    """Two rounds, and then a third: channels are drawn from what the first two left."""
    keys = ("method=fedecover", "engine.workers=1")
    incofl.run(tiny_config(*keys, "rounds=3"), tmp_path / "whole", progress=False)
    for rounds in (2, 3):
        config = tiny_config(*keys, f"rounds={rounds}")
        serve(fleet(config), config, settings(tmp_path / "run", resume=rounds == 3))
    assert final_state(tmp_path / "whole") == final_state(tmp_path / "run")
    kept = load_file(RunFolder(tmp_path / "run").checkpoint)
    assert any(name.startswith("extra/drawn/") for name in kept)


@pytest.mark.parametrize("folder", [True, False])
def test_a_node_that_restarts_remembers_what_is_on_its_disk(folder: bool, undisturbed: Path, tmp_path: Path) -> None:
    grid = fleet(SCAFFOLD, **({"state_dir": str(tmp_path / "nodes")} if folder else {}))

    def restart(message: Message) -> Message:
        """After its first turn, under a new id."""
        node = message.metadata.dst_node_id
        reply = grid.app(message, grid.nodes[node])
        grid.restart(node, node + 1000)
        return reply

    grid.fates = {FIRST + client: restart for client in range(4)}
    serve(grid, SCAFFOLD, settings(tmp_path / "run"))
    assert all(node >= FIRST + 1000 for node in grid.nodes)
    forgot = [node for row in rows(tmp_path / "run") for node in row["nodes"] if "forgot" in node]
    if folder:
        assert not forgot
        kept = [len(list(path.iterdir())) for path in (tmp_path / "nodes").glob("*/client-*")]
        assert len(kept) == 4
        assert max(kept) <= 2  # of the last turn, and of the one before
        assert final_state(undisturbed) == final_state(tmp_path / "run")
    else:  # said, not hidden
        assert forgot
        assert final_state(undisturbed) != final_state(tmp_path / "run")


def test_an_abandoned_turn_leaves_no_memory(undisturbed: Path, tmp_path: Path) -> None:
    """The first replies of round 2 are too few, so that it is repeated: the bits are those of an undisturbed run."""
    grid = fleet(SCAFFOLD)
    turns = 0

    def lose(message: Message) -> Message | None:
        nonlocal turns
        turns += 1
        reply = grid.app(message, grid.nodes[message.metadata.dst_node_id])  # computed, and lost on its way
        return None if turns in (4, 5) else reply

    grid.fates = dict.fromkeys(grid.nodes, lose)
    serve(grid, SCAFFOLD, settings(tmp_path / "run", min_replies=2, deadline=1e-9))
    assert final_state(undisturbed) == final_state(tmp_path / "run")
    assert comparable(undisturbed) == comparable(tmp_path / "run")


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    config = tiny_config("rounds=1", "model.name=tiny-mlp", "data.clients=2", "cohort=1", "data.limit=40")
    serve(fleet(config), config, settings(tmp_path / "run"))
    with pytest.raises(incofl.errors.RunError, match="holds this run already"):
        serve(LoopGrid(make_client_app()), config, settings(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
