"""Frozen parameters never travel in a round; a node that does not have the server's gets them once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import incofl
from incofl.config import Config
from incofl.data.cache import digest
from incofl.engine.build import build, build_model
from incofl.flower import make_client_app, serve
from incofl.flower.protocol import arrays
from tests.federations import TINY
from tests.flower.fleets import FIRST, comparable, final_state, rows, settings
from tests.flower.loop import LoopGrid


class Layer(nn.Module):
    """A linear layer whose input is added to its output, and whose norm is frozen with its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(self.norm(x)).relu()
        return out


def make(shift: float) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        stem = nn.Linear(64, 16).requires_grad_(False)
        with torch.no_grad():
            stem.weight += shift
        return nn.Sequential(nn.Flatten(), stem, *[Layer() for _ in range(3)], nn.Linear(16, 10))

    return model


def frozen_config(**values: Any) -> Config:
    shared: dict[str, Any] = {"rounds": 2, "split": {"kind": "layer", "levels": 2}, "cohort": 4, "method": "incoavg"}
    few = {"data": {"clients": 4, "limit": 120}}
    return incofl.make_config({**TINY, "model": {}, **shared, **few, **values}, model=make(0.0))


def nodes(shift: float, **node_config: Any) -> LoopGrid:
    grid = LoopGrid(make_client_app(model=make(shift)))
    for client in range(4):
        grid.add(FIRST + client, partition_id=client, **node_config)
    return grid


def frozen_sent(grid: LoopGrid) -> list[int]:
    """The nodes that were sent frozen parameters."""
    return [node for node, content in grid.orders if "frozen" in content]


def size(record: Any) -> int:
    return sum(len(array.data) for array in record.values())


ROLLING = {"method": "fedrolex", "split": {"levels": [0.25, 0.5]}, "buffers": "average"}


@pytest.mark.parametrize("values", [{}, {"method": "incoscaffold"}, ROLLING])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_bits_of_the_engine_without_what_is_frozen(shift: float, values: dict[str, Any], tmp_path: Path) -> None:
    """Whether nodes have the same frozen values themselves, or must be sent those of the server."""
    config = frozen_config(**values)
    incofl.run(config, tmp_path / "here", progress=False)
    grid = nodes(shift)
    serve(grid, config, settings(tmp_path / "there"))
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")
    assert comparable(tmp_path / "here") == comparable(tmp_path / "there")
    layout = build_model(config).layout
    assert {"1.weight", "2.norm.weight", "2.norm.running_mean"} <= layout.frozen
    for _, content in grid.orders:
        assert not content["model"].keys() & layout.frozen
    # A window that moves holds other frozen values in every round.
    assert len(frozen_sent(grid)) == (0 if not shift else 8 if values is ROLLING else 4)
    assert len(grid.orders) == 8 + len(frozen_sent(grid))


def test_bytes(tmp_path: Path) -> None:
    """What nodes are sent is counted with the frozen part where it was sent; rows count a round's traffic alone."""
    config = frozen_config()
    grid = nodes(1.0)
    serve(grid, config, settings(tmp_path / "run"))
    federation = build(config)
    for row, sent in zip(rows(tmp_path / "run"), (True, False), strict=True):
        expected = 0
        for node in row["nodes"]:
            slice_ = federation.slice(node["level"], 0)
            expected += slice_.num_bytes(federation.model.initial)
            orders = [content for id, content in grid.orders if id == int(node["node"])]
            round = [content for content in orders if content["order"]["round"] == row["round"] - 1]
            assert len(round) == (2 if sent else 1)
            assert node["bytes_down"] == sum(size(content[part]) for content in round for part in content.array_records)
            if sent:
                assert set(round[1]["frozen"]) == slice_.frozen
        assert row["bytes_down"] == row["bytes_up"] == expected


@pytest.mark.parametrize("folder", [True, False])
def test_a_node_that_restarts_keeps_them_on_its_disk(folder: bool, tmp_path: Path) -> None:
    config = frozen_config()
    grid = nodes(1.0, **({"state_dir": str(tmp_path / "nodes")} if folder else {}))

    def restart(message: Message) -> Message:
        node = message.metadata.dst_node_id
        reply = grid.app(message, grid.nodes[node])
        if "frozen" in message.content:
            grid.restart(node, node + 1000)
        return reply

    grid.fates = {FIRST + client: restart for client in range(4)}
    serve(grid, config, settings(tmp_path / "run"))
    incofl.run(config, tmp_path / "here", progress=False)
    assert final_state(tmp_path / "here") == final_state(tmp_path / "run")
    assert len(frozen_sent(grid)) == (4 if folder else 8)
    kept = list((tmp_path / "nodes").glob("*/client-*/*"))
    assert [path.name for path in kept] == (["frozen.safetensors"] * 4 if folder else [])
    if folder:  # what is damaged is sent again
        kept[0].write_bytes(b"nothing")
        serve(grid, frozen_config(rounds=3), settings(tmp_path / "run", resume=True))
        assert len(frozen_sent(grid)) == 5
        assert load_file(kept[0]).keys() >= {"1.weight"}


@pytest.mark.parametrize("found", [True, False])
def test_pretrained_values_come_from_the_nodes_own_file(found: bool, tmp_path: Path) -> None:
    """Where a node has it under the same path; if not, from the server."""
    file = tmp_path / "model.safetensors"
    initial = build_model(frozen_config()).initial
    save_file({name: (value + 1 if value.is_floating_point() else value) for name, value in initial.items()}, file)
    config = frozen_config(model={"pretrained": str(file)})
    incofl.run(config, tmp_path / "here", progress=False)
    grid = nodes(0.0)
    honest = grid.app

    def without_file(message: Message, context: Any) -> Message:
        if not found:
            file.unlink(missing_ok=True)
        return honest(message, context)

    grid.app = without_file
    serve(grid, config, settings(tmp_path / "there"))
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")
    assert len(frozen_sent(grid)) == (0 if found else 4)


def test_a_node_that_never_has_them_is_left_out_and_named(tmp_path: Path) -> None:
    grid = nodes(1.0)

    def spoil(message: Message) -> Message:
        if "frozen" in message.content:
            message.content["frozen"] = arrays({"1.weight": torch.zeros(16, 64)})
        return grid.app(message, grid.nodes[FIRST + 1])

    grid.fates[FIRST + 1] = spoil
    serve(grid, frozen_config(rounds=1), settings(tmp_path / "run"))
    (row,) = rows(tmp_path / "run")
    assert row["rejected"] == [
        {"client": 1, "reason": "client 1: node 1001: its frozen parameters are not the server's"}
    ]


def test_digests_tell_names_types_shapes_and_values() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    assert digest(one) == digest(dict(reversed(one.items())))
    others = [{"a": torch.zeros(3, 2)}, {"a": torch.zeros(2, 3, dtype=torch.int32)}, {"a": torch.full((2, 3), 1e-9)}]
    found = {
        digest({}),
        digest(one),
        digest({"a": one["a"], "c": one["b"]}),
        *(digest(one | other) for other in others),
    }
    assert len(found) == 6
