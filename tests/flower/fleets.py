"""Fleets of nodes in this process, and what runs leave behind."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from incofl.config import Config
from incofl.flower import Settings, make_client_app
from tests.flower.loop import LoopGrid

FIRST = 1000  # the id of client 0's node


def fleet(config: Config, **node_config: Any) -> LoopGrid:
    """A node for each client."""
    grid = LoopGrid(make_client_app())
    for client in range(config.num_clients):
        grid.add(FIRST + client, partition_id=client, **node_config)
    return grid


def settings(out: Path, **others: Any) -> Settings:
    """Of an impatient server."""
    known: dict[str, Any] = {"out": str(out), "poll": 0.001, "deadline": 0.01, "wait": 2.0}
    return Settings(**known | others)


def final_state(folder: Path) -> bytes:
    return (folder / "checkpoint" / "state.safetensors").read_bytes()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def comparable(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in ("seconds", "nodes")} for row in rows(folder)]


def no_steps(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimiser that changes nothing."""
    return torch.optim.SGD(parameters, lr=0.0)
