"""The study of InCo: what a device gets, who the best baseline is, and what is said about differences."""

import dataclasses
from pathlib import Path

import pytest
import tomli_w

import incofl as library
from incofl.analysis.runs import RecordedRun
from incofl.engine.progress import Progress
from incofl.errors import ConfigError
from incofl.studies.gains import DEVICES, Evaluation, answer, evaluations, gain_table, gaps, settings
from incofl.studies.inco import PARTS, Part, collect, load_part, page, read_csv, tables, unrecorded, write_csv
from incofl.studies.reproduce import Scale, Study, arms_of, cells, run_table
from tests.federations import tiny_config
from tests.shell import Shell

# A federation of four clients in two levels, on a few digits.
BASE = {
    "rounds": 2,
    "cohort": 2,
    "data": {"name": "digits", "limit": 80, "clients": 4, "partition": "iid"},
    "model": {"name": "tiny-resnet", "width": 1.0},
    "split": {"levels": 2, "counts": [3, 1]},
    "local": {"epochs": 1, "batch_size": 16},
    "eval": {"limit": 40},
}
ROWS = [{"name": name, "set": [f"method={name}"]} for name in ("allsmall", "largestonly", "fedavg", "heteroavg")]
PART = Part(
    Study("inco-x", "a title", {"here": []}, [{"name": "arms", "base": "fleet", "rows": ROWS}]),
    Scale("part x", "a summary", [7, 8], 0, {"fleet": BASE}),
    "heteroavg",
    ("allsmall", "largestonly", "fedavg"),
)


@pytest.mark.parametrize("letter", PARTS)
def test_every_part_has_its_reference_and_all_baselines_in_every_column(letter: str) -> None:
    part = load_part(letter)
    table = cells(part.study, part.scale, seeds=[0])
    for column in part.study.columns:
        rows = {cell.row for cell in table if cell.column == column}
        assert {part.reference, *part.baselines} <= rows
    assert part.baselines == ("allsmall", "largestonly", "fedavg")
    assert len(part.scale.seeds) == (3 if letter == "b" else 20)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="--part: got 'z', expected one of a, b, c, d"):
        load_part("z")


def test_a_table_of_your_own(tmp_path: Path, incofl: Shell) -> None:
    """A file of the same form, named after its folder; what it lacks is said in one line."""
    folder = tmp_path / "mine"
    folder.mkdir()
    document = {"title": "t", "summary": "s", "seeds": [3, 5], "reference": "heteroavg", "baselines": ["allsmall"]}
    sections = [{"name": "arms", "base": "fleet", "rows": ROWS}]
    (folder / "x.toml").write_text(tomli_w.dumps(document | {"columns": {"here": []}, "base": BASE}))
    with pytest.raises(ConfigError, match=r"x.toml: expected title, .*, sections; 'sections' is missing"):
        load_part(str(folder / "x.toml"))
    whole = document | {"columns": {"here": []}, "base": BASE, "sections": sections}
    (folder / "x.toml").write_text(tomli_w.dumps(whole))
    part = load_part(str(folder / "x.toml"))
    assert (part.study.name, part.scale.seeds, part.baselines) == ("mine", [3, 4], ("allsmall",))
    code, out, _ = incofl("reproduce", "inco", "--part", folder / "x.toml", "--dry-run")
    assert code == 0
    assert out.strip().endswith("4 cells, 8 runs")
    code, _, err = incofl("reproduce", "inco", "--part", tmp_path / "none.toml", "--dry-run")
    assert code == 2
    assert "none.toml" in err


def test_runs_are_made_seed_by_seed_within_a_column() -> None:
    part = load_part("a")
    configs = list(arms_of(cells(part.study, part.scale, seeds=[1, 2])).values())
    places = [(config.data.name, config.model.stem, config.seed) for config in configs]
    assert list(dict.fromkeys(places)) == [
        (data, stem, seed) for data in ("digits", "fashion-mnist") for stem in ("small", "imagenet") for seed in (1, 2)
    ]


def test_a_device_gets_the_largest_trained_level_that_it_can_hold(tmp_path: Path) -> None:
    """From allsmall the smallest for all, from largestonly nothing but for the one large device; 3 of 4 are small."""
    table = cells(PART.study, PART.scale, seeds=[7])
    run_table(table, tmp_path, 1, lambda arm: Progress())
    last = {row.arm: row for row in collect(table, tmp_path / "runs") if row.round == 2}
    small, large = last["allsmall"].levels
    assert small == large == pytest.approx(last["allsmall"].devices, abs=0.006)
    assert last["largestonly"].levels[0] is None
    assert last["largestonly"].levels[1] is not None
    assert last["largestonly"].devices is None
    zero, one = last["fedavg"].levels
    assert zero is not None
    assert one is not None
    assert last["fedavg"].devices == pytest.approx((3 * zero + one) / 4, abs=0.006)


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    """Records without their run folders count, as they are when a study goes on elsewhere; a longer run is another."""
    table = cells(PART.study, PART.scale, seeds=[7])
    run_table(table, tmp_path, 1, lambda arm: Progress())
    rows = collect(table, tmp_path / "runs")
    path = tmp_path / "x.csv"
    write_csv(path, [row for row in rows if row.arm != "fedavg"])
    recorded = read_csv(path)
    (left,) = unrecorded(table, recorded)
    assert left.row == "fedavg"
    assert collect(table, tmp_path / "nowhere", recorded) == recorded
    assert collect(table, tmp_path / "runs", recorded) == rows
    begun = [row for row in rows if row.round < 2]
    assert len(unrecorded(table, begun)) == len(table)
    other = cells(PART.study, PART.scale, ["local.lr=0.5"], seeds=[7])
    assert len(unrecorded(other, rows)) == len(table)


def evaluation(arm: str, seed: int, round: int, *levels: float | None) -> Evaluation:
    known = [level for level in levels if level is not None]
    devices = sum(known) / len(known) if len(known) == len(levels) else None
    return Evaluation("here", arm, "accuracy", seed, round, levels, devices)


def test_csv_and_back(tmp_path: Path) -> None:
    rows = [evaluation("allsmall", 1, 10, 50.0, 50.0), evaluation("largestonly", 2, 20, None, 61.25)]
    write_csv(tmp_path / "x.csv", rows)
    assert read_csv(tmp_path / "x.csv") == rows
    assert (tmp_path / "x.csv").read_text().splitlines()[2] == ",,here,largestonly,accuracy,2,20,,,61.25"


def test_the_last_third_of_the_evaluations_counts() -> None:
    """Of four evaluations the last two, of three the last."""
    four = [evaluation("x", 1, round, float(round)) for round in (40, 10, 30, 20)]
    three = [evaluation("y", 1, round, float(round)) for round in (10, 20, 30)]
    (setting,) = settings([*four, *three])
    assert setting.values["x"]["0"] == {1: 35.0}
    assert setting.values["y"][DEVICES] == {1: 30.0}


ARMS: dict[str, list[tuple[float | None, ...]]] = {
    "allsmall": [(60.0, 60.0), (62.0, 62.0), (61.0, 61.0)],
    "largestonly": [(None, 70.0), (None, 66.0), (None, 65.0)],
    "fedavg": [(50.0, 64.0), (52.0, 60.0), (51.0, 62.0)],
    "heteroavg": [(55.0, 65.0), (56.0, 64.0), (57.0, 66.0)],
    "ours": [(61.0, 72.0), (63.5, 68.5), (62.0, 67.0)],
}
SEEDS = [evaluation(arm, seed, 1, *levels) for arm, runs in ARMS.items() for seed, levels in enumerate(runs)]


def test_the_best_baseline_of_each_level() -> None:
    (setting,) = settings(SEEDS)
    assert setting.measures == [DEVICES, "0", "1"]
    assert setting.best(PART.baselines, "0") == "allsmall"
    assert setting.best(PART.baselines, "1") == "largestonly"
    assert setting.best(PART.baselines, DEVICES) == "allsmall"  # largestonly leaves devices without a model


def test_differences_are_paired_and_corrected() -> None:
    """Largest level: ours minus largestonly is 2, 2.5, 2; hetero minus largestonly -5, -2, 1.

    t = 2.1667 / (0.28868 / sqrt 3) = 13 with two degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 0.0058652, doubled by
    Holm's correction over two arms; the other has t = -2 / (3 / sqrt 3) = -1.1547, p = 1 - sqrt(2/5) = 0.3675445.
    """
    (setting,) = settings(SEEDS)
    found = gaps(setting, {"heteroavg": "largestonly", "ours": "largestonly"}, "1")
    ours, p = found["ours"]
    assert ours.mean == pytest.approx(13 / 6)
    assert ours.p_value == pytest.approx(0.0058652, abs=1e-7)
    assert p == pytest.approx(2 * 0.0058652, abs=1e-6)
    assert found["heteroavg"][1] == pytest.approx(0.3675445, abs=1e-7)


def test_seeds_that_only_one_arm_has_are_left_out() -> None:
    rows = [evaluation("x", 1, 1, 5.0), evaluation("x", 2, 1, 9.0), evaluation("y", 2, 1, 6.0)]
    found = settings(rows)[0].difference("x", "y", "0")
    assert found is not None
    assert (found.mean, found.half_width, found.p_value) == (3.0, None, None)


def test_verdicts() -> None:
    """Ours: level 0 minus allsmall is 1, 1.5, 1, far from -0.5; the largest level is better after correction."""
    text = tables(PART, SEEDS)
    lines = {line.split(" | ")[0]: line for line in text.splitlines()[8:]}
    assert lines["| ours"].endswith("| yes | yes |")
    assert lines["| heteroavg"].endswith("| no | no |")
    assert "level 1 minus largestonly" in text
    assert "+2.2 ± 0.7*" in lines["| ours"]
    assert "+1.2 ± 0.7" in lines["| ours"]


def test_losses_are_recorded_but_not_compared() -> None:
    rows = [*SEEDS, *(dataclasses.replace(row, metric="loss_unseen_clients") for row in SEEDS)]
    assert tables(PART, rows) == tables(PART, SEEDS)
    unseen = [dataclasses.replace(row, metric="accuracy_unseen_clients") for row in SEEDS]
    assert "## here: accuracy_unseen_clients" in tables(PART, [*SEEDS, *unseen])


def test_no_verdict_from_one_seed() -> None:
    """An interval that is unknown shows nothing."""
    text = tables(PART, [row for row in SEEDS if row.seed == 0])
    assert "| yes |" not in text


def test_without_baselines_nobody_is_called_better_or_worse() -> None:
    part = dataclasses.replace(PART, baselines=())
    assert "no level worse" in page(PART, SEEDS, "x")
    assert "worse" not in page(part, SEEDS, "x")


def said(**arms: list[tuple[float | None, ...]]) -> str:
    """The answer about some arms, with the baselines of above."""
    known = {name: ARMS[name] for name in PART.baselines} | arms
    rows = [evaluation(arm, seed, 1, *levels) for arm, runs in known.items() for seed, levels in enumerate(runs)]
    return answer(settings(rows)[0], PART.baselines)


def test_the_answer_in_words() -> None:
    """Half of the devices are small: ours minus allsmall is 6.5, 4, 3.5 in the mean over devices, t with 2: ± 4.0."""
    text = said(ours=ARMS["ours"], heteroavg=ARMS["heteroavg"])
    assert text.startswith("Use ours: ")
    assert "+4.7 ± 4.0 points against the best baseline, allsmall. No level is worse off" in text
    alone = said(poor=[(50.0, 60.0), (52.0, 58.0), (51.0, 57.0)])
    assert alone.startswith("Use allsmall: the best of the other methods, poor, has ")
    assert "level 0 (-10.0 ± 0.0 against allsmall); level 1 (-8.7 ± 2.9 against largestonly)" in alone


def test_a_method_without_losers_is_preferred_to_one_with_a_higher_mean() -> None:
    greedy: list[tuple[float | None, ...]] = [(59.0, 99.0), (61.0, 98.0), (60.0, 97.0)]
    assert said(ours=ARMS["ours"], greedy=greedy).startswith("Use ours: ")
    assert said(greedy=greedy).startswith("Use greedy: ")
    assert "level 0 (-1.0 ± 0.0 against allsmall)" in said(greedy=greedy)


def test_what_cannot_be_seen_is_called_inconclusive() -> None:
    noisy: list[tuple[float | None, ...]] = [(61.0, 70.0), (60.0, 68.0), (63.0, 69.0)]
    assert "inconclusive (could have seen " in said(noisy=noisy)
    assert said(noisy=noisy).startswith("No method is seen to be better than allsmall: noisy has ")
    (one,) = settings([row for row in SEEDS if row.seed == 0])
    assert "One seed cannot say how sure that is" in answer(one, PART.baselines)
    assert answer(one, []) == ""


def test_one_seed_does_not_praise_what_is_worse() -> None:
    poor: list[tuple[float | None, ...]] = [(50.0, 60.0)]
    known = {name: ARMS[name][:1] for name in PART.baselines} | {"poor": poor}
    rows = [evaluation(arm, 0, 1, *levels) for arm, ((*levels,),) in known.items()]
    (one,) = settings(rows)
    assert answer(one, PART.baselines).startswith("allsmall is the best here: poor has ")
    assert gain_table(one, PART.baselines)[1][-2:] == ["not known", "not known"]


def test_levels_that_no_device_holds_are_nobodys_loss(tmp_path: Path) -> None:
    """Of three levels the devices hold the second and the third; the first is not trained by everyone's methods."""
    counts = [0, 6, 4]
    config = tiny_config("data.clients=10", f"split.counts={counts}", "rounds=1", "method=heteroavg")
    library.run(config, tmp_path, progress=False)
    (row,) = evaluations("here", "heteroavg", RecordedRun(tmp_path), counts)
    assert row.levels[0] is None
    assert row.levels[1] is not None
    assert row.devices == pytest.approx((6 * row.levels[1] + 4 * (row.levels[2] or 0)) / 10, abs=1e-3)
    assert settings([row])[0].measures == [DEVICES, "1", "2"]


def test_from_the_command_line(incofl: Shell, tmp_path: Path) -> None:
    code, out, _ = incofl("reproduce", "inco", "--part", "b", "--dry-run")
    assert code == 0
    assert "inco, part b: 7 cells, 21 runs" in out
    code, out, err = incofl("reproduce", "inco", "--part", "e")
    assert (code, err.count("\n")) == (2, 1)
    assert "--part: got 'e'" in err
    code, out, err = incofl("reproduce", "inco", "--part", "b", "--tables-only", "--out", tmp_path)
    assert (code, err) == (0, "")
    assert (tmp_path / "inco-b.csv").read_text().startswith("run,commit,column,arm,metric,seed,round,devices")


def test_whoever_has_one_model_has_nothing_to_choose() -> None:
    """Arms of one model take part in the reading of the best path with their accuracy; those of several do not."""
    rows = [
        Evaluation("here", "allsmall", "accuracy", 1, 2, (70.0, 70.0), 70.0),
        Evaluation("here", "largestonly", "accuracy", 1, 2, (None, 60.0), None),
        Evaluation("here", "heteroavg", "accuracy", 1, 2, (50.0, 60.0), 55.0),
        Evaluation("here", "fedavg", "accuracy", 1, 2, (66.0, 62.0), 64.0),
        Evaluation("here", "fedavg", "accuracy_best_path", 1, 2, (66.0, 67.0), 66.5),
    ]
    plain, best = settings(rows)
    assert plain.values.keys() == {"allsmall", "largestonly", "heteroavg", "fedavg"}
    assert best.metric == "accuracy_best_path"
    assert best.values.keys() == {"allsmall", "largestonly", "fedavg"}
    assert best.values["allsmall"][DEVICES] == {1: 70.0}
    assert best.values["fedavg"]["1"] == {1: 67.0}
