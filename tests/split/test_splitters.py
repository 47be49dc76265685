"""The three splitting methods: their levels, their indices, what they refuse."""

import itertools
import math
from typing import Any

import pytest
import torch

from incofl.errors import LayoutError
from incofl.layout import Layout
from incofl.models import ModelOptions, make_model
from incofl.split import Splitter, Window, kept_channels, make_splitter


@pytest.fixture(scope="module")
def resnet() -> Layout:
    return make_model("resnet26", ModelOptions(width=0.0625)).layout


@pytest.fixture(scope="module")
def mlp() -> Layout:
    return make_model("tiny-mlp").layout  # one stage of six blocks


def parameters(layout: Layout, splitter: Splitter, level: int) -> set[str]:
    return set(splitter.slice(layout, level, 0).index)


class TestStage:
    def test_five_levels_are_the_papers(self, resnet: Layout) -> None:
        expected = ((1, 1, 1, 1), (1, 1, 2, 2), (2, 2, 2, 2), (2, 2, 3, 3), (3, 3, 3, 3))
        assert make_splitter(resnet, "stage", 5).depths == expected

    @pytest.mark.parametrize("count", range(1, 10))
    def test_any_number_of_levels_grows_to_the_whole_model(self, resnet: Layout, count: int) -> None:
        depths = make_splitter(resnet, "stage", count).depths
        assert len(set(depths)) == count
        assert depths[-1] == (3, 3, 3, 3)
        for small, large in itertools.pairwise(depths):
            assert all(a <= b for a, b in zip(small, large, strict=True))

    def test_keeps_the_first_blocks_of_each_stage(self, resnet: Layout) -> None:
        held = parameters(resnet, make_splitter(resnet, "stage", 5), 1)  # (1, 1, 2, 2)
        blocks = {resnet.block_of[name] for name in held}
        assert blocks == {None, "layer1.0", "layer2.0", "layer3.0", "layer3.1", "layer4.0", "layer4.1"}

    def test_one_number_stands_for_all_stages(self, resnet: Layout) -> None:
        assert make_splitter(resnet, "stage", [1, 3]).depths == ((1, 1, 1, 1), (3, 3, 3, 3))


class TestLayer:
    def test_first_blocks_of_the_model(self, mlp: Layout) -> None:
        splitter = make_splitter(mlp, "layer", [2, 6])
        blocks = {mlp.block_of[name] for name in parameters(mlp, splitter, 0)}
        assert blocks == {None, "blocks.0", "blocks.1"}

    def test_counts_through_stages(self, resnet: Layout) -> None:
        assert make_splitter(resnet, "layer", [10, 11, 12]).depths == ((3, 3, 3, 1), (3, 3, 3, 2), (3, 3, 3, 3))

    @pytest.mark.parametrize(("count", "expected"), [(1, [6]), (2, [4, 6]), (3, [4, 5, 6]), (6, [1, 2, 3, 4, 5, 6])])
    def test_any_number_of_levels(self, mlp: Layout, count: int, expected: list[int]) -> None:
        assert [depth[0] for depth in make_splitter(mlp, "layer", count).depths] == expected


class TestHetero:
    def test_five_widths_are_the_papers(self, resnet: Layout) -> None:
        splitter = make_splitter(resnet, "hetero", 5)
        assert isinstance(splitter, Splitter)
        assert splitter.shares == (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
        assert set(splitter.depths) == {(3, 3, 3, 3)}

    def test_widths_of_64_channels(self) -> None:
        expected = [slice(None), *(slice(0, n) for n in (32, 16, 8, 4))]
        assert [kept_channels(64, 2.0**-k) for k in range(5)] == expected

    def test_rounds_up_but_not_for_floating_point_dust(self) -> None:
        assert kept_channels(10, 0.33) == slice(0, 4)
        assert 0.07 * 100 > 7
        assert kept_channels(100, 0.07) == slice(0, 7)

    def test_at_least_one_channel(self, resnet: Layout) -> None:
        assert kept_channels(64, 1e-12) == slice(0, 1)
        assert make_splitter(resnet, "hetero", 40).slice(resnet, 0, 0).shapes["fc.weight"] == (10, 1)

    def test_depth_can_be_scaled_too(self, resnet: Layout) -> None:
        depths = make_splitter(resnet, "hetero", 5, "scaled").depths
        assert depths == ((1,) * 4, (1,) * 4, (1,) * 4, (2,) * 4, (3,) * 4)
        listed = make_splitter(resnet, "hetero", [0.5, 1], [[1, 1, 2, 2], 3]).depths
        assert listed == ((1, 1, 2, 2), (3, 3, 3, 3))

    def test_fixed_axes_are_never_narrowed(self, resnet: Layout) -> None:
        piece = make_splitter(resnet, "hetero", 5).slice(resnet, 0, 0)
        assert piece.shapes["fc.weight"] == (10, 2)
        assert piece.shapes["conv1.weight"] == (1, 3, 7, 7)

    def test_rolling_window(self) -> None:
        """O = 8, w = 3: round 2 holds channels 2, 3, 4; round 6 wraps; eight rounds visit each channel three times."""
        assert kept_channels(8, 3 / 8, 2) == slice(2, 5)
        wrapped = kept_channels(8, 3 / 8, 6)
        assert isinstance(wrapped, torch.Tensor)
        assert wrapped.tolist() == [6, 7, 0]
        visits = torch.zeros(8)
        for round in range(8):
            visits[kept_channels(8, 3 / 8, round)] += 1
        assert visits.tolist() == [3.0] * 8

    def test_rolling_starts_as_prefix(self, resnet: Layout) -> None:
        ratios, depths = (0.5,), ((3, 3, 3, 3),)
        rolling = Splitter(ratios, depths, "rolling")
        assert rolling.slice(resnet, 0, 0) == Splitter(ratios, depths).slice(resnet, 0, 0)
        assert rolling.slice(resnet, 0, 1) != rolling.slice(resnet, 0, 0)

    def test_the_window_moves_by_one_channel_a_round(self) -> None:
        """O = 8, w = 3, forwards as in the paper and backwards as in its code."""
        layout = make_model("tiny-resnet").layout
        (size,) = layout.shapes["bn1.weight"]
        assert size == 8
        steps: dict[Window, int] = {"rolling": 1, "rolling-back": -1}
        for window, step in steps.items():
            splitter = Splitter((3 / 8,), ((1, 1),), window)
            for round in range(10):
                (held,) = splitter.slice(layout, 0, round).index["bn1.weight"]
                expected = [(step * round + channel) % 8 for channel in range(3)]
                assert torch.arange(8)[held].tolist() == expected


@pytest.mark.parametrize(
    ("kind", "levels", "depth", "message"),
    [
        ("stage", 10, "full", "split.levels: got 10 levels, expected 1 to 9"),
        ("stage", [[1, 1, 1, 4]], "full", r"level 0 keeps \[1, 1, 1, 4\] blocks, expected 4 numbers"),
        ("stage", [[1, 1, 1]], "full", "expected 4 numbers"),
        ("stage", [[0, 1, 1, 1]], "full", "expected 4 numbers"),
        ("stage", [1.5], "full", "level 0 is 1.5, expected a whole number of blocks"),
        ("layer", [9], "full", "layer splitting cannot leave a stage empty"),
        ("layer", [13], "full", "keeps the first 13 blocks, expected 10 to 12"),
        ("layer", 4, "full", "got 4 levels, expected 1 to 3: layer splitting .* use split.kind=stage"),
        ("hetero", [0.0], "full", r"expected a share of the channels in \(0, 1\]"),
        ("hetero", [2], "full", r"expected a share of the channels in \(0, 1\]"),
        ("hetero", [0.5, 1], [1], "split.depth: got 1 entries, expected 2, one per level"),
        ("stage", 5, "scaled", "expected it with split.kind=hetero"),
        ("stage", [], "full", "split.levels: got an empty list"),
        ("stage", [3, 1], "full", "expected the levels from small to large"),
        ("hetero", [1, 0.5], "full", "expected the levels from small to large"),
        ("hetero", [0.5, 1], [3, 4], "split.depth: level 1 keeps"),
    ],
)
def test_levels_that_do_not_fit(resnet: Layout, kind: Any, levels: Any, depth: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_splitter(resnet, kind, levels, depth)


def test_slices_nest(resnet: Layout) -> None:
    """A smaller level holds a part of what a larger one holds, so the server model is consistent."""
    for kind in ("stage", "hetero"):
        splitter = make_splitter(resnet, kind, 5)
        sizes = [splitter.slice(resnet, level, 0).num_elements for level in range(5)]
        assert sizes == sorted(sizes)
        assert sizes[-1] == sum(math.prod(shape) for shape in resnet.shapes.values())
