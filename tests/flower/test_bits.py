"""Rounds over messages give the bits of rounds in this process."""

import json
from pathlib import Path
from typing import Any

import pytest

import incofl
from incofl.config import Config
from incofl.flower import Settings, make_client_app, serve
from tests.federations import tiny_config
from tests.flower.loop import LoopGrid


def final_state(folder: Path) -> bytes:
    return (folder / "checkpoint" / "state.safetensors").read_bytes()


def comparable(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "nodes")} for row in rows]


def fleet(config: Config) -> LoopGrid:
    grid = LoopGrid(make_client_app())
    for client in range(config.data.clients):
        grid.add(1000 + client, partition_id=client)
    return grid


@pytest.mark.parametrize("method", ["incoavg", "incoscaffold", "fedrolex+inco", "scalefl"])
def test_two_rounds_are_those_of_the_engine(method: str, tmp_path: Path) -> None:
    config = tiny_config(f"method={method}", "rounds=2", "engine.workers=1")
    incofl.run(config, tmp_path / "here")
    serve(fleet(config), config, Settings(out=str(tmp_path / "there"), poll=0.01))
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")
    assert comparable(tmp_path / "here") == comparable(tmp_path / "there")
