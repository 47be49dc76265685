"""InCo's coefficients from records written by hand, and from runs."""

import json
from pathlib import Path

import pytest

from incofl.analysis.coefficients import Coefficients, coefficients, derived, figures, norms, summary
from incofl.analysis.layers import Layers
from incofl.analysis.runs import RecordedRun
from incofl.engine.run import run
from incofl.errors import RunError
from tests.federations import tiny_config

ROUNDS = {
    1: {"theta": 0.5, "beta": -1.0, "beta_positive": 0.25, "norm_deep": 2.0, "norm_shallow": 1.0, "norm_change": 3.0},
    2: {"theta": 1.5, "beta": 3.0, "beta_positive": 0.75, "norm_deep": 0.0, "norm_shallow": 1.0, "norm_change": 0.0},
}


def made(**layers: dict[int, dict[str, float]]) -> Coefficients:
    records = {name: {round: derived(record) for round, record in rounds.items()} for name, rounds in layers.items()}
    return Coefficients("inco", True, Layers.of(dict.fromkeys(layers, "stage 1"), records))


def test_means_of_a_layer_by_hand() -> None:
    numbers = summary(made(a=ROUNDS))["layers"]["a"]
    means = {"theta": 1.0, "beta": 1.0, "beta_positive": 0.5, "rounds_positive": 0.5}
    assert numbers["mean"] == means | {"relative_change": 1.5}  # a round without an update has none
    assert numbers["theta"].tolist() == [0.5, 1.5]


def test_norms_of_layers_add_in_squares() -> None:
    assert norms(made(a=ROUNDS, b={1: {"norm_change": 4.0}}).layers).tolist() == [5.0, 0.0]


def test_unsteadiness_by_hand() -> None:
    def unsteadiness(**norms: float) -> float | None:
        return made(a={int(at[1:]): {"norm_change": norm} for at, norm in norms.items()}).unsteadiness()

    assert unsteadiness(r1=2.0, r2=2.0, r3=2.0) == 0
    assert unsteadiness(r3=1.0, r1=1.0, r2=4.0) == pytest.approx(3 / 2)  # 1, 4, 1: steps of 3, mean 2
    assert unsteadiness(r1=1.0) is None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    folder = tmp_path_factory.mktemp("runs")
    for name, *overrides in (
        ("with", "method=incoavg"),
        ("without", "method=incoavg", "inco.optimise=false"),
        ("noise", "method=heteroavg+noise"),
        ("plain", "method=heteroavg"),
    ):
        run(tiny_config("cohort=10", *overrides), folder / name)
    return {name: RecordedRun(folder / name) for name in ("with", "without", "noise", "plain")}


def test_without_optimisation_theta_is_one(runs: dict[str, RecordedRun]) -> None:
    one, other = coefficients(runs["with"]), coefficients(runs["without"])
    assert one is not None
    assert other is not None
    assert (one.optimise, other.optimise) == (True, False)
    assert one.layers.group_of.keys() == other.layers.group_of.keys() == runs["with"].layout.shallow.keys()
    assert {value for row in other.layers.rows("theta").values() for value in row} == {1.0}
    assert 1.0 not in [value for row in one.layers.rows("theta").values() for value in row]


def test_records_are_those_of_the_rounds(runs: dict[str, RecordedRun]) -> None:
    found = coefficients(runs["with"])
    assert found is not None
    row = runs["with"].rows[1]
    assert found.layers.rounds == [1, 2, 3]
    for at, name in enumerate(found.layers.group_of):
        assert found.layers.numbers["beta"][at, 1] == row["inco"][name]["beta"]
        assert found.layers.numbers["norm_change"][at, 1] == row["inco"][name]["norm_change"] > 0


def test_noise_has_a_size_only(runs: dict[str, RecordedRun]) -> None:
    found = coefficients(runs["noise"])
    assert found is not None
    assert found.kind == "noise"
    assert (norms(found.layers) > 0).all()
    assert all(layer["mean"]["theta"] is None for layer in summary(found)["layers"].values())
    assert coefficients(runs["plain"]) is None


def test_figures_and_numbers_of_runs(runs: dict[str, RecordedRun], tmp_path: Path) -> None:
    found = figures(list(runs.values()), tmp_path)
    assert [path.name for path in found.files] == ["coefficients.json", "coefficients.png"] * 3 + ["coefficients.png"]
    assert all(path.stat().st_size > 0 for path in found.files)
    numbers = json.loads(found.files[0].read_text())
    assert numbers["rounds"] == [1, 2, 3]
    assert len(numbers["norm_of_change"]["values"]) == 3
    assert [line[1] for line in found.table[1:]] == ["InCo", "InCo without optimisation", "noise"]
    with pytest.raises(RunError, match="no run has InCo or noise"):
        figures([runs["plain"]], tmp_path)
