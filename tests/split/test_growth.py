"""Levels that open during a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import incofl
from incofl import Run
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError
from incofl.split.growth import Growth, make_growth
from tests.federations import tiny_config, tiny_federation


def weights(folder: Path) -> bytes:
    return RunFolder(folder).checkpoint.read_bytes()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(RunFolder(folder).checkpoint)


def rows(*entries: tuple[int, float | None]) -> list[dict[str, Any]]:
    return [{"open": top, "loss": loss} for top, loss in entries]


def test_levels_open_after_given_rounds() -> None:
    growth = Growth((2, 2, 5), 4)
    assert [growth.top([{}] * finished) for finished in range(7)] == [0, 0, 2, 2, 2, 3, 3]


def test_shares_and_numbers_of_rounds() -> None:
    assert make_growth((0.1, 0.25, 30), 4, 40) == Growth((4, 10, 30), 4)
    assert make_growth((0, 0), 3, 40) == Growth((0, 0), 3)
    assert make_growth(None, 3, 40) is None
    assert make_growth("plateau", 3, 40) == Growth(None, 3)


@pytest.mark.parametrize("grow", [(1,), (1, 2, 3), (3, 2)])
def test_wrong_lists_are_refused(grow: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"split\.grow: got .* expected 2 numbers, from small to large"):
        make_growth(grow, 3, 40)


def test_a_level_opens_when_the_loss_stops_falling() -> None:
    """Five rounds against the five before: a fall of 3 percent is one, a fall of 1 percent is none."""
    growth, high = Growth(None, 3), [(0, 1.0)] * 5
    assert growth.top([]) == 0
    assert growth.top(rows(*high, *[(0, 0.99)] * 4)) == 0  # not enough rounds
    assert growth.top(rows(*high, *[(0, 0.97)] * 5)) == 0
    assert growth.top(rows(*high, *[(0, 0.99)] * 5)) == 1
    assert growth.top(rows(*high, *[(1, 0.99)] * 5)) == 1  # the new level has had five rounds only
    assert growth.top(rows(*[(2, 1.0)] * 10)) == 2  # there is no larger one


def test_all_levels_open_from_the_start_is_no_growth(tmp_path: Path) -> None:
    """The same weights, bit for bit; the files differ in the config that they belong to."""
    incofl.run(tiny_config("method=heteroavg"), tmp_path / "plain", progress=False)
    incofl.run(tiny_config("method=heteroavg", "split.grow=[0,0]"), tmp_path / "open", progress=False)
    first, second = tensors(tmp_path / "plain"), tensors(tmp_path / "open")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("grow", ["[2,4]", "plateau"])
def test_resumed_across_the_opening_bit_for_bit(tmp_path: Path, grow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("incofl.split.growth.WINDOW", 1)
    monkeypatch.setattr("incofl.split.growth.LEAST_FALL", 2.0)  # every loss has stopped falling
    config = tiny_config("method=incoscaffold", "rounds=6", f"split.grow={grow}", "split.start=identity")
    whole = incofl.run(config, tmp_path / "whole", progress=False)
    for _ in range(3):
        with Run(config, tmp_path / "parts", resume=True, progress=False) as run:
            for row in run:
                if row["round"] % 2 == 0:
                    break
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    assert [row["open"] for row in whole.history] == [0, 0, 1, 1, 2, 2]


def test_closed_levels_train_and_show_the_largest_open_one(tmp_path: Path) -> None:
    config = tiny_config("method=heteroavg", "rounds=4", "cohort=10", "split.grow=[1,3]")
    with Run(config, tmp_path, progress=False) as run:
        shown = [(row["open"], row["accuracy_by_level"]) for row in run]
        assert run.federation.level_of(9) == 2
    assert [top for top, _ in shown] == [0, 1, 1, 2]
    assert len(set(shown[0][1])) == 1
    assert shown[1][1][1] == shown[1][1][2]
    history = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    costs = run.federation.costs
    assert history[0]["bytes_up"] == 10 * costs[0].bytes_up  # all ten clients hold the smallest
    assert history[3]["bytes_up"] == sum(costs[run.federation.level_of(client)].bytes_up for client in range(10))


def test_a_level_that_opens_starts_from_the_next_smaller() -> None:
    federation = tiny_federation("method=heteroavg", "split.grow=[2,4]")
    server = federation.start()
    statistics = {"bn1.running_mean": torch.full_like(server.shared["bn1.running_mean"], 7.0)}
    server = server.measured({0: statistics})
    grown = federation.after([{}] * 2)
    assert grown.top == 1
    opened = grown.opened(server, before=0)
    assert torch.equal(opened.state(1)["bn1.running_mean"], statistics["bn1.running_mean"])
    assert not torch.equal(opened.state(2)["bn1.running_mean"], statistics["bn1.running_mean"])
    assert grown.opened(server, before=1).private.keys() == {0}
    assert {level: count for level, (_, count) in grown.population.items()} == {0: 4, 1: 6}


def test_levels_that_open_together_are_saved_apart(tmp_path: Path) -> None:
    """In a round without a client of either, both have the statistics of the next smaller, each its own copy."""
    config = tiny_config("method=heteroavg", "rounds=2", "cohort=1", "split.grow=[1,1]")
    incofl.run(config, tmp_path, progress=False)
    saved = tensors(tmp_path)
    assert any(name.startswith("private/2/") for name in saved)


def test_baselines_of_one_level_have_nothing_to_grow(tmp_path: Path) -> None:
    result = incofl.run(tiny_config("method=alllarge", "rounds=1", "split.grow=[2,4]"), tmp_path, progress=False)
    assert "open" not in result.history[0]
    assert result["levels"] == [2]
