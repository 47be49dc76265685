"""Paired comparisons, from the command line and by hand."""

import csv
import json
from pathlib import Path

import pytest

from incofl.engine.compare import Difference, Spread
from tests.shell import Shell
from tests.test_cli import SMALL


def test_spread_and_difference_by_hand() -> None:
    """Differences 1, 2 and 3: mean 2, sd 1, half width 4.3027 / sqrt 3 = 2.4841."""
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0)
    assert Spread.of([5.0]) == Spread(5.0, None)
    gap = Difference.of([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (gap.mean, gap.wins) == (2.0, 3)
    assert gap.half_width == pytest.approx(2.4841, abs=1e-4)
    assert Difference.of([2.0], [3.0]) == Difference(-1.0, None, 0)


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_compare(incofl: Shell, tmp_path: Path) -> None:
    arguments = ["compare", *SMALL, "--methods", "heteroavg,IncoAvg,fedprox", "--seeds", "0,1", "--out", tmp_path]
    code, out, err = incofl(*arguments)
    assert (code, err) == (0, "")
    assert "run 6/6: fedprox, seed 1" in out
    for word in ("heteroavg", "incoavg", "fedprox", "last ten", "level 2", "minus heteroavg", "wins"):
        assert word in out
    found = {path.name for path in tmp_path.iterdir()}
    assert {"comparison.md", "comparison.csv", "comparison.json", "incoavg-s1"} <= found
    # Paired: the same clients, round by round, under every method of a seed.
    for seed in (0, 1):
        cohorts = [
            [row["clients"] for row in rows(tmp_path / f"{m}-s{seed}")] for m in ("heteroavg", "incoavg", "fedprox")
        ]
        assert cohorts[0] == cohorts[1] == cohorts[2]
        partitions = {(tmp_path / f"{m}-s{seed}" / "partition.json").read_text() for m in ("heteroavg", "incoavg")}
        assert len(partitions) == 1
    result = json.loads((tmp_path / "comparison.json").read_text())
    assert result["seeds"] == [0, 1]
    assert [entry["method"] for entry in result["results"]] == ["heteroavg", "incoavg", "fedprox"]
    assert result["results"][0]["difference"] is None
    assert len(result["results"][1]["seeds"]) == 2
    assert result["configs"]["fedprox"]["method"] == "fedprox"
    values = [[row["accuracy"] for row in rows(tmp_path / f"incoavg-s{seed}")] for seed in (0, 1)]
    assert result["results"][1]["last"]["mean"] == pytest.approx((values[0][-1] + values[1][-1]) / 2)  # type: ignore[operator]
    with (tmp_path / "comparison.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["method"] for line in table] == ["heteroavg", "incoavg", "fedprox"]
    assert float(table[1]["difference"]) == pytest.approx(result["results"][1]["difference"]["mean"])
    assert (tmp_path / "comparison.md").read_text().count("\n") == 5
    # Once more: nothing is trained again, the table is the same.
    before = (tmp_path / "comparison.md").read_text()
    assert incofl(*arguments)[0] == 0
    assert (tmp_path / "comparison.md").read_text() == before


def test_side_by_side_is_the_same(incofl: Shell, tmp_path: Path) -> None:
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        code, _, err = incofl(
            "compare", *SMALL, "-m", "heteroavg,heteroscaffold", "--seeds", "3", "-o", out, "-j", jobs
        )
        assert (code, err) == (0, "")
    one, two = (json.loads((tmp_path / jobs / "comparison.json").read_text())["results"] for jobs in "12")
    assert one == two


def test_levels_are_named_by_what_they_are(incofl: Shell, tmp_path: Path) -> None:
    """alllarge has only the last level: its column, and no other."""
    code, _, _ = incofl("compare", *SMALL, "-m", "heteroavg,alllarge", "--seeds", "0", "-o", tmp_path)
    assert code == 0
    with (tmp_path / "comparison.csv").open() as file:
        large = list(csv.DictReader(file))[1]
    assert large["level_0_mean"] == ""
    assert float(large["level_2_mean"]) == float(large["last_ten_mean"])


def test_an_impossible_method_is_refused_before_the_first_run(incofl: Shell, tmp_path: Path) -> None:
    arms = ("-m", "heteroavg,scalefl", "--seeds", "0", "--set", "model.name=tiny-mlp", "--set", "split.kind=auto")
    code, _, err = incofl("compare", *SMALL, *arms, "-o", tmp_path / "out")
    assert code == 2
    assert "expected a model with early exits" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "heteroavg,nonsense"], "method: got 'nonsense'"),
        (["--methods", ","], "--methods: got ',', expected names"),
        (["--seeds", "0,x"], "--seeds: got '0,x', expected whole numbers >= 0"),
        (["--seeds", "-1"], "--seeds: got '-1', expected whole numbers >= 0"),
    ],
)
def test_bad_input(incofl: Shell, tmp_path: Path, arguments: list[str], words: str) -> None:
    code, _, err = incofl("compare", *SMALL, *arguments, "--out", tmp_path)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
