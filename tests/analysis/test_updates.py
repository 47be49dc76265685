"""Updates of runs: known shapes, updates put together by hand, and two runs against each other."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from incofl.analysis.environments import compare_updates, normalised, relations
from incofl.analysis.environments import figures as cross_environment
from incofl.analysis.layers import Layers, groups_of
from incofl.analysis.runs import RecordedRun
from incofl.analysis.similarity import cka_matrix, gram
from incofl.analysis.updates import (
    describe,
    figures,
    floor,
    histogram,
    quantiles,
    roughness,
    shallow_smoother,
    step,
    update_between,
    update_rounds,
    updates,
)
from incofl.engine.run import run
from incofl.errors import RunError
from incofl.layout import Axis, Layout
from incofl.server import Server
from incofl.split import cut
from tests.federations import tiny_config

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal(20_000)
COMB = RNG.integers(0, 8, 20_000) + RNG.normal(0, 0.05, 20_000)
TWO = np.concatenate([NORMAL[:10_000] - 4, NORMAL[10_000:] + 4])


def rough(values: np.ndarray) -> float:
    found = describe(values)
    assert found is not None
    return found.numbers["roughness"]


def test_roughness_counts_extra_peaks() -> None:
    assert roughness(np.array([0, 1, 3, 7, 7, 2, 0.0])) == 0  # one rise, one fall
    assert roughness(np.array([5, 0, 5, 0, 5.0])) == 2  # three equal peaks
    assert roughness(np.array([4, 1, 3.0])) == pytest.approx((4 + 3 + 2 + 3) / 8 - 1)


def test_a_comb_is_rougher_than_two_peaks_and_these_than_one() -> None:
    assert rough(COMB) > 5
    assert rough(TWO) == pytest.approx(1, abs=0.15)
    for smooth in (NORMAL, RNG.laplace(size=20_000), RNG.standard_t(2, 20_000)):  # whatever the tails
        assert rough(smooth) < 0.1


def test_shift_and_scale_change_nothing_but_mean_and_width() -> None:
    one, other = describe(COMB), describe(-1e-4 * COMB[::-1] + 3e-4)
    assert one is not None
    assert other is not None
    assert other.numbers["kurtosis"] == pytest.approx(one.numbers["kurtosis"])
    assert other.numbers["scale"] == pytest.approx(1e-4 * one.numbers["scale"])
    shifted = describe(1e-3 * COMB + 5)
    assert shifted is not None
    assert shifted.numbers["roughness"] == pytest.approx(one.numbers["roughness"], abs=0.02)


def test_kurtosis_of_known_shapes() -> None:
    normal, uniform = describe(NORMAL), describe(RNG.uniform(1, 2, 20_000))
    assert normal is not None
    assert uniform is not None
    assert normal.numbers["kurtosis"] == pytest.approx(0, abs=0.15)
    assert uniform.numbers["kurtosis"] == pytest.approx(-1.2, abs=0.05)


def test_floor_is_what_normal_numbers_have() -> None:
    assert rough(NORMAL) == pytest.approx(floor(20_000), abs=0.04)
    assert floor(20_000) == floor(20_000) > 0


def test_positions_that_nobody_trained_are_left_out() -> None:
    padded = describe(np.concatenate([NORMAL, np.zeros(50_000)]))
    alone = describe(NORMAL)
    assert padded is not None
    assert alone is not None
    for part, same in zip(dataclasses.astuple(padded), dataclasses.astuple(alone), strict=True):
        np.testing.assert_equal(part, same)
    assert describe(np.zeros(1000)) is None
    assert describe(NORMAL[:50]) is None  # too few
    assert describe(np.ones(1000)) is None  # no width


def test_the_histogram_has_its_values_where_they_are() -> None:
    found = describe(3 + 0.5 * NORMAL)
    assert found is not None
    edges, counts = found.edges, found.counts
    assert len(edges) == len(counts) + 1
    assert edges[[0, -1]] == pytest.approx([3 - 2, 3 + 2], abs=0.05)  # four standard deviations
    assert np.average((edges[1:] + edges[:-1]) / 2, weights=counts) == pytest.approx(3, abs=0.02)
    assert counts.sum() == pytest.approx(20_000, rel=1e-3)


def test_step_is_the_distance_of_a_shift() -> None:
    assert step(quantiles(NORMAL), quantiles(NORMAL)) == 0
    assert step(quantiles(NORMAL), quantiles(NORMAL + 0.25)) == pytest.approx(0.25, rel=0.01)
    shuffled = RNG.permutation(NORMAL)
    assert step(quantiles(NORMAL), quantiles(shuffled)) == 0


# Two layers that InCo would pair, each in a block of its own.
AXIS = Axis("out", 4)
LAYOUT = Layout(
    axes={"a.w": (AXIS, None), "b.w": (AXIS, None)},
    shapes={"a.w": (4, 2), "b.w": (4, 2)},
    stages=(("a", "b"),),
    shallow={"b.w": "a.w"},
    buffers=frozenset(),
)


def test_update_of_shared_layers_is_their_difference() -> None:
    before = Server(LAYOUT, {"a.w": torch.ones(4, 2), "b.w": torch.zeros(4, 2)})
    after = dataclasses.replace(before, shared={"a.w": torch.full((4, 2), 3.0), "b.w": torch.full((4, 2), -1.0)})
    update = update_between(before, after, ["a.w", "b.w"], [])
    assert torch.equal(update["a.w"], torch.full((4, 2), 2.0))
    assert torch.equal(update["b.w"], torch.full((4, 2), -1.0))


def test_update_of_separate_levels_is_the_mean_over_the_clients_that_hold_a_position() -> None:
    """Level 0 (3 clients, the upper half of a) moves by 1, level 1 (1 client, all of a and b) by 5."""
    zeros = {"a.w": torch.zeros(4, 2), "b.w": torch.zeros(4, 2)}
    half = torch.cat([torch.ones(2, 2), torch.zeros(2, 2)])
    small = cut(LAYOUT, ["a"], {"out": slice(0, 2)})
    before = Server(LAYOUT, zeros)
    private = {0: {"a.w": half}, 1: {"a.w": torch.full((4, 2), 5.0), "b.w": torch.full((4, 2), 5.0)}}
    after = dataclasses.replace(before, private=private)
    update = update_between(before, after, ["a.w", "b.w"], [(0, small, 3), (1, cut(LAYOUT, ["a", "b"]), 1)])
    assert update["a.w"][:, 0].tolist() == [2, 2, 5, 5]  # (3 * 1 + 5) / 4, and level 1 alone
    assert update["b.w"][:, 0].tolist() == [5, 5, 5, 5]
    nobody = update_between(before, before, ["a.w"], [])
    assert torch.equal(nobody["a.w"], torch.zeros(4, 2))


def test_groups_have_a_shallow_layer_and_its_deep_ones() -> None:
    assert groups_of(LAYOUT) == {"a.w": "a.w", "b.w": "a.w"}


def made(what: str, group_of: dict[str, str], **values: list[float]) -> Layers:
    return Layers.of(group_of, {name: {r: {what: v} for r, v in enumerate(own)} for name, own in values.items()})


def test_shallow_smoother_counts_pairs_and_layers() -> None:
    group_of = {"s": "s", "d": "s", "e": "s", "t": "t"}
    found = made("roughness", group_of, s=[1, 1, 1], d=[2, 2, 0], e=[3, 0.5, 0.5], t=[1])
    test = shallow_smoother(found, "roughness")
    assert (test.pairs.wins, test.pairs.losses) == (3, 3)
    assert (test.layers.wins, test.layers.losses) == (1, 1)  # medians of the differences: 1 and -0.5
    assert test.by_group == {"s": 0.5}
    assert test.lowest_above_highest == {"s": False}
    lonely = made("step", {"d": "s"}, d=[1, 2])
    assert shallow_smoother(lonely, "step").pairs.share is None


def test_the_size_of_the_kurtosis_counts() -> None:
    found = made("kurtosis", {"s": "s", "d": "s"}, s=[0.5, -0.5], d=[-1.0, 1.0])
    assert shallow_smoother(found, "kurtosis").pairs.wins == 2
    assert shallow_smoother(found, "kurtosis").lowest_above_highest == {"s": True}


def test_similarity_of_equal_rotated_and_unrelated_updates() -> None:
    rng = torch.Generator().manual_seed(1)
    one, other = (torch.randn(16, 8, 3, 3, generator=rng) for _ in range(2))
    turn = torch.linalg.qr(torch.randn(72, 72, generator=rng))[0]
    turned = compare_updates(one, 3 * (one.reshape(16, 72) @ turn).reshape(one.shape))
    assert turned is not None
    assert turned["cka"] == pytest.approx(1, abs=1e-5)
    assert turned["debiased"] == pytest.approx(1, abs=1e-5)
    unrelated = compare_updates(one, other)
    assert unrelated is not None
    assert unrelated["cka"] == pytest.approx(float(cka_matrix([gram(x.flatten(1)) for x in (one, other)])[0, 1]))
    assert unrelated["cka"] == pytest.approx(unrelated["chance"], abs=0.05)  # both far from 0
    assert unrelated["cka"] > 0.7
    assert unrelated["debiased"] == pytest.approx(0, abs=0.15)
    assert compare_updates(one, torch.zeros_like(one)) is None
    assert compare_updates(torch.ones(4, 3), torch.randn(4, 3, generator=rng)) is None  # no output differs


def test_statistics_of_two_updates_by_hand() -> None:
    pair = compare_updates(torch.tensor([1.0, 2, 3, 6]), torch.tensor([-1.0, -2, -3, -6]))
    assert pair is not None
    assert pair["cka"] == pytest.approx(1)  # of vectors CKA is the squared correlation
    assert pair["mean"] == pytest.approx(3)
    assert pair["variance"] == pytest.approx(14 / 3)
    assert pair["covariance"] == pytest.approx(-14 / 4)
    assert pair["difference"] == pytest.approx(6)
    assert math.isnan(pair["roughness"])  # four elements have no distribution


def pair(cka: float, variance: float = 1.0) -> dict[str, float]:
    return {"cka": cka, "variance": variance, "roughness": math.nan, "mean": 1.0, "covariance": 1.0, "difference": 1.0}


def test_shallow_higher_and_relations_by_hand() -> None:
    records = {
        "s": {1: pair(0.8, 2), 2: pair(0.6, 2)},
        "d": {1: pair(0.5, 4), 2: pair(0.3, 4)},
        "e": {1: pair(0.4, 6), 2: pair(0.7, 6)},
        "t": {1: pair(0.9, 1)},
        "f": {1: pair(0.2, 9)},
    }
    found = Layers.of({"s": "s", "d": "s", "e": "s", "t": "t", "f": "t", "untrained": "t"}, records)
    assert "untrained" not in found.group_of
    higher = found.shallow_larger(found.numbers["cka"], np.mean)
    assert (higher.pairs.wins, higher.pairs.losses) == (4, 1)
    assert (higher.layers.wins, higher.layers.losses) == (3, 0)
    assert higher.lowest_above_highest == {"s": False, "t": True}
    assert normalised(found, "variance") == {"s": 1, "d": 2, "e": 3, "t": 1, "f": 9}
    assert normalised(found, "cka")["s"] == pytest.approx(0.7 / 0.4)
    assert relations(found)["variance"].points == 5
    assert relations(found)["roughness"].points == 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    """Runs of three rounds: shared layers, separate levels, and one that kept no states of consecutive rounds."""
    folder = tmp_path_factory.mktemp("runs")
    for name, *overrides in (
        ("hetero", "method=heteroavg", "record.every=1"),
        ("separate", "method=fedavg", "record.every=1"),
        ("sparse", "method=heteroavg", "record.every=2", "rounds=4"),
    ):
        run(tiny_config("cohort=10", *overrides), folder / name)
    return {name: RecordedRun(folder / name) for name in ("hetero", "separate", "sparse")}


def test_updates_of_a_run_add_up_to_its_whole_way(recorded: dict[str, RecordedRun]) -> None:
    one = recorded["hetero"]
    name = next(iter(one.layout.shallow))
    rounds = update_rounds(one)
    assert rounds == [1, 2, 3]
    way = sum(update[name] for _, update in updates(one, [name], rounds))
    assert torch.allclose(one.server(0).shared[name] + way, one.server().shared[name], atol=1e-6)


def test_separate_levels_have_an_update_too(recorded: dict[str, RecordedRun]) -> None:
    one = recorded["separate"]
    name = next(iter(one.layout.shallow))
    assert torch.equal(one.server(0).shared[name], one.server().shared[name])  # nothing is shared
    for _, update in updates(one, [name], update_rounds(one)):
        assert update[name].any()


def test_in_the_first_round_separate_levels_move_as_shared_ones(recorded: dict[str, RecordedRun]) -> None:
    """All clients start from one state and all take part: the mean over levels is the mean over clients."""
    names = list(recorded["hetero"].layout.shallow)
    (_, shared), (_, separate) = (next(updates(recorded[name], names, [1])) for name in ("hetero", "separate"))
    for name in names:
        assert torch.allclose(shared[name], separate[name], atol=1e-6)


def test_states_of_consecutive_rounds_are_needed(recorded: dict[str, RecordedRun]) -> None:
    with pytest.raises(RunError, match=r"no states of two consecutive rounds .* record\.every=1"):
        update_rounds(recorded["sparse"])


def test_figures_and_numbers_of_runs(recorded: dict[str, RecordedRun], tmp_path: Path) -> None:
    found = figures(list(recorded.values()), tmp_path)
    assert [path.name for path in found.files] == ["updates.json", "updates.png", "smoothness.png"] * 2
    assert all(path.stat().st_size > 0 for path in found.files)
    assert len(found.missing) == 1
    numbers = json.loads(found.files[0].read_text())
    deep = [name for name, entry in numbers["layers"].items() if entry["role"] == "deep"]
    assert deep
    assert set(deep) <= set(recorded["hetero"].layout.shallow)
    assert numbers["rounds"] == [1, 2, 3]
    assert numbers["layers"][deep[0]]["step"][0] is None
    pairs = numbers["shallow_smoother"]["roughness"]["pairs"]
    assert pairs["wins"] + pairs["losses"] <= 3 * len(deep)


def test_layers_with_too_few_elements_have_no_distribution(tmp_path: Path) -> None:
    """The norms of a tiny ViT have 32 elements."""
    run(tiny_config("method=heteroavg", "model.name=tiny-vit", "model.patch=2", "record.every=1"), tmp_path / "vit")
    with pytest.raises(RunError, match="no deep layer and its shallow counterpart with at least 64 elements"):
        figures([RecordedRun(tmp_path / "vit")], tmp_path)


def test_two_settings_against_each_other(recorded: dict[str, RecordedRun], tmp_path: Path) -> None:
    found = cross_environment([recorded["hetero"], recorded["separate"]], tmp_path)
    names = ["cross_environment.png", "relations.png", "cross_environment.json"]
    assert [path.name for path in found.files] == names
    (comparison,) = json.loads(found.files[-1].read_text())["comparisons"]
    assert comparison["runs"] == ["hetero", "separate"]
    for entry in comparison["layers"].values():
        assert all(0 <= value < 1 + 1e-9 for value in entry["cka"])
        assert entry["cka"][0] == pytest.approx(1, abs=1e-4)  # the first rounds are the same; see above
    with pytest.raises(RunError, match="got runs of one setting, expected two"):
        cross_environment([recorded["hetero"]], tmp_path)


def test_a_run_is_like_itself(recorded: dict[str, RecordedRun], tmp_path: Path) -> None:
    one = recorded["hetero"]
    names = list(one.layout.shallow)
    (_, update), *_ = updates(one, names, update_rounds(one))
    assert all((p := compare_updates(update[n], update[n])) is None or p["cka"] == pytest.approx(1) for n in names)


def test_histograms_grow_with_the_number_of_elements() -> None:
    assert [len(histogram(np.zeros(n))) for n in (64, 1000, 27_000)] == [8, 20, 60]
