"""The timeline of a run."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import incofl

CONFIG: dict[str, Any] = {
    "rounds": 2,
    "cohort": 4,
    "data": {"name": "digits", "limit": 200, "clients": 8},
    "model": {"name": "tiny-mlp"},
    "split": {"kind": "layer", "levels": [2, 6]},
    "local": {"epochs": 1},
}


@pytest.mark.parametrize("workers", [1, 2])
def test_says_who_did_what_when(workers: int, tmp_path: Path) -> None:
    incofl.run(CONFIG | {"engine": {"workers": workers, "trace": True}}, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert set(names.values()) <= {"server", "worker 1", "worker 2"}
    trained = [event for event in spans if event["name"].startswith("client")]
    assert len(trained) == 2 * CONFIG["cohort"]
    assert sum(event["name"] == "mean, transforms" for event in spans) == 2
    assert min(event["ts"] for event in spans) == 0
    for track, name in names.items():  # a process does one thing at a time
        own = sorted((event["ts"], event["dur"]) for event in spans if event["tid"] == track and name != "server")
        assert all(start + duration <= after + 1 for (start, duration), (after, _) in pairwise(own))


def test_off_by_default_and_not_part_of_what_a_run_is(tmp_path: Path) -> None:
    """A run may be resumed with a timeline."""
    incofl.run(CONFIG | {"rounds": 1}, tmp_path)
    assert not (tmp_path / "trace.json").exists()
    incofl.run(CONFIG | {"engine": {"trace": True}}, tmp_path, resume=True)
    assert (tmp_path / "trace.json").exists()
