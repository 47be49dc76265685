"""InCo's coefficients from records written by hand, and from runs."""

import json
from pathlib import Path

import pytest

from incofl.analysis.coefficients import (
    Coefficients,
    coefficients,
    figures,
    norm_of_change,
    of_layer,
    summary,
    unsteadiness,
)
from incofl.analysis.runs import RecordedRun
from incofl.engine.run import run
from incofl.errors import RunError
from tests.federations import tiny_config

LAYER = {
    "theta": {1: 0.5, 2: 1.5},
    "beta": {1: -1.0, 2: 3.0},
    "beta_positive": {1: 0.25, 2: 0.75},
    "norm_deep": {1: 2.0, 2: 0.0},
    "norm_shallow": {1: 1.0, 2: 1.0},
    "norm_change": {1: 3.0, 2: 0.0},
}


def test_means_of_a_layer_by_hand() -> None:
    found = of_layer(LAYER)
    means = {"theta": 1.0, "beta": 1.0, "beta_positive": 0.5, "rounds_positive": 0.5}
    assert found == means | {"relative_change": 1.5}  # a round without an update has none
    assert of_layer({})["theta"] is None


def test_norms_of_layers_add_in_squares() -> None:
    other = {**LAYER, "norm_change": {1: 4.0}}
    assert norm_of_change(Coefficients("inco", True, {"a": LAYER, "b": other})) == {1: 5.0, 2: 0.0}


def test_unsteadiness_by_hand() -> None:
    assert unsteadiness({1: 2.0, 2: 2.0, 3: 2.0}) == 0
    assert unsteadiness({3: 1.0, 1: 1.0, 2: 4.0}) == pytest.approx(3 / 2)  # 1, 4, 1: steps of 3, mean 2
    assert unsteadiness({1: 1.0}) is None


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
    return {name: RecordedRun.open(folder / name) for name in ("with", "without", "noise", "plain")}


def test_without_optimisation_theta_is_one(runs: dict[str, RecordedRun]) -> None:
    one, other = coefficients(runs["with"]), coefficients(runs["without"])
    assert one is not None
    assert other is not None
    assert (one.optimise, other.optimise) == (True, False)
    assert one.layers.keys() == other.layers.keys() == runs["with"].layout.shallow.keys()
    assert {value for layer in other.layers.values() for value in layer["theta"].values()} == {1.0}
    assert 1.0 not in [value for layer in one.layers.values() for value in layer["theta"].values()]


def test_records_are_those_of_the_rounds(runs: dict[str, RecordedRun]) -> None:
    found = coefficients(runs["with"])
    assert found is not None
    row = runs["with"].rows[1]
    for name, values in row["inco"].items():
        assert found.layers[name]["beta"][2] == values["beta"]
        assert found.layers[name]["norm_change"][2] == values["norm_change"] > 0


def test_noise_has_a_size_only(runs: dict[str, RecordedRun]) -> None:
    found = coefficients(runs["noise"])
    assert found is not None
    assert found.kind == "noise"
    assert all(value > 0 for value in norm_of_change(found).values())
    assert all(layer["theta"] is None for layer in summary(found)["layers"].values())
    assert coefficients(runs["plain"]) is None


def test_figures_and_numbers_of_runs(runs: dict[str, RecordedRun], tmp_path: Path) -> None:
    found = figures(list(runs.values()), tmp_path)
    assert [path.name for path in found.files] == ["coefficients.json", "coefficients.png"] * 3 + ["coefficients.png"]
    assert all(path.stat().st_size > 0 for path in found.files)
    numbers = json.loads(found.files[0].read_text())
    assert numbers["norm_of_change"]["rounds"] == [1, 2, 3]
    assert [line[1] for line in found.table[1:]] == ["InCo", "InCo without optimisation", "noise"]
    with pytest.raises(RunError, match="without InCo and without noise"):
        figures([runs["plain"]], tmp_path)
