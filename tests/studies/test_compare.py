"""Paired comparisons, from the command line and by hand."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from incofl import METHODS, InCo, compare
from incofl.analysis.runs import RecordedRun
from incofl.cli.display import print_table
from incofl.config import make_config
from incofl.errors import ConfigError, RunError
from incofl.methods import BASELINES
from incofl.statistics import Estimate
from incofl.studies.compare import MethodResult, markdown, summarise, table, write_csv
from tests.cli.test_cli import SMALL
from tests.own import Net, data
from tests.shell import Shell

# What else a row has.
REST: dict[str, object] = {"loss": 1.0, "clients": [], "rejected": [], "bytes_up": 0, "bytes_down": 0, "seconds": 0.1}


def written(out: Path, curves: Mapping[str, Sequence[Sequence[float | None]]]) -> list[MethodResult]:
    """Compares runs with these accuracies, round by round, for each method and seed; ``None``: not evaluated."""
    for method, seeds in curves.items():
        for seed, curve in enumerate(seeds):
            folder = out / f"{method}-s{seed}"
            folder.mkdir(parents=True)
            levels = [None if accuracy is None else [accuracy - 0.1, accuracy + 0.1] for accuracy in curve]
            rows = [
                REST | {"round": at, "accuracy": accuracy, "accuracy_by_level": of_levels}
                for at, (accuracy, of_levels) in enumerate(zip(curve, levels, strict=True), start=1)
            ]
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            (folder / "summary.json").write_text('{"levels": [0, 1]}')
            (folder / "config.toml").write_text(make_config().to_toml())
    arms = [(method, seed) for method, seeds in curves.items() for seed in range(len(seeds))]
    return summarise({(method, seed): RecordedRun(out / f"{method}-s{seed}") for method, seed in arms})


def test_a_short_run_is_judged_by_its_last_round(tmp_path: Path) -> None:
    """Five rounds: a mean over all of them says that the second method is worse, its last round that it is better."""
    slow, fast = [0.1, 0.1, 0.1, 0.2, 0.7], [0.3, 0.4, 0.4, 0.5, 0.6]
    first, second = written(tmp_path, {"heteroavg": [fast, fast, fast], "incoavg": [slow, slow, slow]})
    assert (first.measure, second.measure) == ("round 5", "round 5")
    assert second.difference is not None
    assert second.difference.mean == pytest.approx(0.1)
    assert table([first, second])[0] == [
        *("method", "round 5", "level 0", "level 1"),
        *("minus heteroavg", "visible from", "wins"),
    ]


def test_a_long_run_is_judged_by_its_last_ten_rounds(tmp_path: Path) -> None:
    curve = [0.0] * 40 + [0.5, 0.7] * 5
    (result,) = written(tmp_path, {"heteroavg": [curve, curve]})
    assert result.measure == "mean of rounds 41-50"
    assert [result.tail.mean, result.last.mean] == pytest.approx([0.6, 0.7])
    assert result.by_level[1].mean == pytest.approx(0.7)
    assert table([result])[0][:3] == ["method", "last round", "mean of rounds 41-50"]


def test_every_difference_comes_with_what_could_have_been_seen(tmp_path: Path) -> None:
    """Differences 1, 2 and 3 points: mean 2, sd 1, half width 4.3027 / sqrt 3, and 3.264 sd are visible."""
    results = written(tmp_path, {"heteroavg": [[0.5]] * 3, "incoavg": [[0.51], [0.52], [0.53]]})
    assert table(results)[2] == [
        *("incoavg", "52.0 ± 2.5", "42.0 ± 2.5", "62.0 ± 2.5"),
        *("+2.0 ± 2.5", "3.3", "3 of 3"),
    ]
    write_csv(tmp_path / "numbers.csv", results)
    lines = (tmp_path / "numbers.csv").read_text().splitlines()
    (line,) = (row for row in csv.DictReader(lines) if row["method"] == "incoavg")
    assert float(line["difference_visible_from"]) == pytest.approx(0.0326405, abs=1e-6)
    assert float(line["tail_half_width"]) == pytest.approx(0.024841, abs=1e-5)


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    results = written(tmp_path, {"heteroavg": [[0.5]], "incoavg": [[0.4]]})
    assert table(results)[2][-3:] == ["-10.0", "", "0 of 1"]
    assert Estimate.of([5.0]) == Estimate(5.0, None)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_names_and_numbers_are_never_cut(
    tmp_path: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of levels are left out first, and the line below the table says so."""
    monkeypatch.setenv("COLUMNS", str(width))
    curves = [[0.1 * seed + 0.011 * at for at in range(40)] for seed in range(3)]
    names = ["heteroavg", "heteroscaffold+noise", "inclusivefl+inco"]
    results = written(tmp_path, dict.fromkeys(names, curves))
    by_level = {level: Estimate(0.5, 0.123) for level in range(5)}
    lines = table([dataclasses.replace(result, by_level=by_level) for result in results])
    print_table(lines, "a title", Console(highlight=False, markup=False))
    out = capsys.readouterr().out
    shown = [line.rstrip() for line in out.splitlines()]
    assert all(any(line.split()[:1] == [name] for line in shown) for name in names)
    assert "…" not in out
    assert out.count("+0.0 ± 0.0") == 2
    assert ("level 4" in out.partition("left out")[0]) == (width == 200)
    assert ("left out, the terminal is too narrow: " in out) == (width < 200)
    if width >= 80:
        assert max(len(line) for line in shown if not line.startswith("left out")) <= width


def test_the_metric_of_the_task_is_compared_in_its_direction(tmp_path: Path) -> None:
    """A lower error is better, and is no percentage."""
    configs = {(method, seed): make_config({"task": {"name": "regression"}}) for method in "ab" for seed in (0, 1)}
    for (method, seed), error in zip(configs, (3.0, 3.2, 2.0, 3.1), strict=True):
        folder = tmp_path / f"{method}-s{seed}"
        folder.mkdir()
        (folder / "summary.json").write_text('{"levels": [2]}')
        (folder / "config.toml").write_text(configs[method, seed].to_toml())
        row = REST | {"round": 1, "accuracy": error, "accuracy_by_level": [error]}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    results = summarise({(method, seed): RecordedRun(tmp_path / f"{method}-s{seed}") for method, seed in configs})
    assert (results[1].metric, results[1].percent) == ("rmse", False)
    line = table(results)[2]
    assert line[1].startswith("2.550 ± ")
    assert line[3].startswith("-0.550 ± ")
    assert line[-1] == "2 of 2"


def test_runs_without_evaluation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="heteroavg-s0: was never evaluated, expected data with a test set"):
        written(tmp_path, {"heteroavg": [[None]]})


def test_markdown() -> None:
    assert markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_compare(incofl: Shell, tmp_path: Path) -> None:
    arguments = ["compare", *SMALL, "--methods", "heteroavg,IncoAvg,fedprox", "--seeds", "0,1", "--out", tmp_path]
    code, out, err = incofl(*arguments)
    assert (code, err) == (0, "")
    assert "run 6/6: fedprox, seed 1" in out
    for word in (
        "heteroavg",
        "incoavg",
        "fedprox",
        "round 2",
        "level 2",
        "minus heteroavg",
        "visible from",
        "wins",
        "95 % interval",
    ):
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
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == ["heteroavg", "incoavg", "fedprox"]
    assert float(lines[1]["difference_mean"]) == pytest.approx(result["results"][1]["difference"]["mean"])
    opening, page = (tmp_path / "comparison.md").read_text().split("\n\n", 1)
    assert opening == result["answer"]
    assert page.partition("\n\n")[0].count("\n") == 4
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
    assert large["by_level_0_mean"] == ""
    assert float(large["by_level_2_mean"]) == float(large["tail_mean"])


def test_an_impossible_method_is_refused_before_the_first_run(incofl: Shell, tmp_path: Path) -> None:
    arms = ("-m", "heteroavg,reefl", "--seeds", "0", "--set", "model.name=tiny-mlp", "--set", "split.kind=auto")
    code, _, err = incofl("compare", *SMALL, *arms, "-o", tmp_path / "out")
    assert code == 2
    assert "cannot have a shared exit, expected a ViT or a model with a method add_shared_exit" in err
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


def test_a_method_of_your_own_in_two_jobs(incofl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    lines = ("from incofl import METHODS, InCo", 'mine = METHODS["heteroavg"].then(InCo(rule="theorem"))')
    (tmp_path / "own_method_to_compare.py").write_text("\n".join(lines) + "\n")
    name = "own_method_to_compare:mine"
    code, out, err = incofl("compare", *SMALL, "-m", f"heteroavg,{name}", "--seeds", "0", "-o", "both", "-j", "2")
    assert (code, err) == (0, "")
    assert "own_method_to_compare:mine, seed 0" in out
    by_rule = json.loads(Path("both/comparison.json").read_text())["results"]
    assert [result["method"] for result in by_rule] == ["heteroavg", name]
    assert incofl("run", *SMALL, "-m", "incoavg", "--set", "inco.rule=theorem", "--out", "named")[0] == 0
    assert rows(Path("both/own_method_to_compare-mine-s0"))[-1]["accuracy"] == rows(Path("named"))[-1]["accuracy"]


def test_objects_in_two_jobs_from_a_script(tmp_path: Path) -> None:
    """A script without a main guard, with a model that only it has; one job gives the same numbers."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout.count("scripts run once")) == (0, 1), done.stderr
    document = json.loads((tmp_path / "two" / "comparison.json").read_text())
    assert [result["method"] for result in document["results"]] == ["heteroavg", "heteroavg+inco"]
    assert document["seeds"] == [0, 1]
    assert document["configs"]["heteroavg+inco"]["inco"]["rule"] == "theorem"
    assert {path.name for path in (tmp_path / "two").glob("*-s1")} == {"heteroavg-s1", "heteroavg+inco-s1"}


SCRIPT = """
import incofl
from tests.own import Net, data

print("scripts run once")
model = lambda: Net(blocks=4)
methods = ["heteroavg", incofl.METHODS["heteroavg"].then(incofl.InCo(rule="theorem"))]
config = {"rounds": 2, "cohort": 2, "data": {"clients": 4}, "split": {"levels": 2}, "local": {"epochs": 1}}
both = [
    incofl.compare(methods, config, out, seeds=2, jobs=jobs, model=model, data=data, progress=False)
    for jobs, out in ((1, "one"), (2, "two"))
]
assert both[0] == both[1]
assert both[0][1].difference.mean == both[0][1].tail.mean - both[0][0].tail.mean
"""


def test_what_fails_in_a_process_of_its_own_is_said(tmp_path: Path) -> None:
    """The folder of the second comparison holds another run."""
    config = {"rounds": 1, "data": {"clients": 4}, "split": {"levels": 2}, "local": {"epochs": 1}}
    compare(["heteroavg"], config, tmp_path, seeds=[5], model=Net, data=data, progress=False)
    words = r"heteroavg-s5: holds a run with another config \(data\.alpha is 0\.5 there, 2\.0 here\)"
    with pytest.raises(RunError, match=words):
        compare(["heteroavg"], config, tmp_path, seeds=[5], jobs=2, model=Net, data=data, overrides=["data.alpha=2.0"])


def test_methods_need_names_of_their_own(tmp_path: Path) -> None:
    mixed = [METHODS["heteroavg"].then(InCo(rule=rule)) for rule in ("theorem", "algorithm1")]
    with pytest.raises(ConfigError, match=r"methods: got two called 'heteroavg\+inco', expected a name for each"):
        compare(mixed, {"model": {"name": "tiny-mlp"}}, tmp_path)
    with pytest.raises(ConfigError, match=r"compare: got methods \[\] and seeds 3, expected at least one of each"):
        compare([], None, tmp_path)


def test_baselines_are_what_needs_no_slices() -> None:
    found = {name for name, method in METHODS.items() if method.is_baseline}
    per_size = {"fedavg", "fedprox", "fednova", "scaffold", "moon", "feddyn", "fedbn", "fedavgm", "fedadam", "fedyogi"}
    assert found == per_size | {"allsmall", "largestonly", "fedit"}
    assert set(BASELINES) <= found


def test_the_gain_over_the_best_baseline(incofl: Shell, tmp_path: Path) -> None:
    command = ["compare", "--methods", "heteroavg", "--seeds", "0,1", *SMALL, "--out", tmp_path]
    code, out, _ = incofl(*command)
    assert code == 0
    assert "no baseline among them: --baselines" in out
    code, out, _ = incofl(*command, "--baselines", "--jobs", "2")
    assert code == 0
    assert "gains over its best baseline" in out
    assert "no level worse" in out
    page = (tmp_path / "comparison.md").read_text()
    assert page.count("| heteroavg |") == 2
    assert "| largestonly |" in page


def test_options_of_one_method_do_not_trouble_the_others(incofl: Shell, tmp_path: Path) -> None:
    """A section of a method of your own, in a comparison with a method that has none."""
    methods = "heteroavg,tests.own:method,tests.own:method+inco"
    code, _, err = incofl(
        "compare", *SMALL, "--set", "scaled.factor=0.5", "-m", methods, "--seeds", "0", "-o", tmp_path, "--quiet"
    )
    assert (code, err) == (0, "")
    configs = json.loads((tmp_path / "comparison.json").read_text())["configs"]
    assert "scaled" not in configs["heteroavg"]
    assert configs["tests.own:method"]["scaled"] == {"factor": 0.5}
    assert configs["tests.own:method+inco"]["inco"]["rule"] == "released"
    code, _, err = incofl("run", *SMALL, "--method", "tests.own:method+incoo", "--out", tmp_path / "x")
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean 'inco'" in err
