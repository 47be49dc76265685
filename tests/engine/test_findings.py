"""What plan says about a model, and what it warns of."""

import pytest
import torch
from torch import nn

from incofl.engine.findings import describe, warnings
from incofl.layout import Layout
from incofl.methods import METHODS
from incofl.split import make_splitter
from tests.shell import Shell

STACK = nn.Sequential(
    nn.Linear(12, 8), *[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(14)], nn.Linear(8, 5)
)


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout.infer(STACK, torch.zeros(3, 12))


def test_blocks_widths_and_pairs(layout: Layout) -> None:
    """Axes that differ in the numbers of their blocks only are one."""
    assert describe(layout) == [
        "blocks: 1 to 14",
        "widths: 0 of 8, *.0 (14 times) of 8",
        "InCo mixes 13 tensors",
    ]


def test_levels_that_hardly_differ(layout: Layout) -> None:
    """13 and 14 blocks of 72 parameters, and 104 + 45 in the rest: 1085 and 1157, which is 6.6 % more."""
    splitter = make_splitter(layout, "layer", [1, 13, 14])
    assert warnings(METHODS["incoavg"], layout, "layer", splitter) == [
        "levels 1 and 2 differ by 6.6% of their parameters; fewer levels, or another split.kind, may serve clients "
        "better"
    ]


def test_one_level(layout: Layout) -> None:
    (line,) = warnings(METHODS["incoavg"], layout, "layer", make_splitter(layout, "layer", 1))
    assert line == "there is one level, so every client trains the whole model; try split.kind = hetero"


def test_nothing_to_mix() -> None:
    flat = Layout.infer(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)), torch.zeros(3, 12))
    splitter = make_splitter(flat, "hetero", [0.5, 1])
    assert warnings(METHODS["heteroavg"], flat, "hetero", splitter) == []
    assert warnings(METHODS["incoavg"], flat, "hetero", splitter) == [
        "InCo has nothing to mix in this model, for it has no blocks: incoavg does the same without it"
    ]
    assert describe(flat)[0].startswith("blocks: none found, so the depth cannot be split; model.blocks = ")


def test_plan_says_so(incofl: Shell) -> None:
    code, out, err = incofl("plan", "--model", "tests.own_models:without_blocks", "--method", "incoavg")
    assert (code, err) == (0, "")
    assert "blocks: none found" in out
    assert "warning: InCo has nothing to mix in this model" in out
