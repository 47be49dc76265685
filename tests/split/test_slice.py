"""Slices: adjointness, round trips, and refusal of what does not fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from incofl.errors import UploadError
from incofl.layout import Axis, Layout
from incofl.models import ModelOptions, make_model
from incofl.split import Slice, Splitter, Window, cut

LAYOUT = make_model("resnet26", ModelOptions(width=1 / 16, shape=(1, 8, 8), stem="small")).layout


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    depth = tuple(draw(st.integers(1, n)) for n in LAYOUT.depth)
    if draw(st.booleans()):
        return Splitter((1.0,), (depth,)).slice(LAYOUT, 0, 0)
    window: Window = draw(st.sampled_from(["prefix", "rolling"]))
    ratio = draw(st.floats(0.05, 1.0))
    return Splitter((ratio,), (depth,), window).slice(LAYOUT, 0, draw(st.integers(0, 100)))


def random_state(names: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in names.items()}


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(sum((a[name] * b[name]).sum() for name in a))


@given(slices(), st.integers(0, 10**6))
def test_take_and_put_are_adjoint(piece: Slice, seed: int) -> None:
    """<take(x), y> = <x, put(y)>"""
    x = random_state(dict(LAYOUT.shapes), seed)
    y = random_state(dict(piece.shapes), seed + 1)
    spread = {name: torch.zeros_like(value) for name, value in x.items()}
    piece.put(y, spread)
    assert dot(piece.take(x), y) == pytest.approx(dot(spread, x), rel=1e-12, abs=1e-12)


@given(slices(), st.integers(0, 10**6))
def test_what_is_put_is_what_is_taken(piece: Slice, seed: int) -> None:
    """take(put(y)) = y exactly, with a weight too: every position is hit once."""
    y = random_state(dict(piece.shapes), seed)
    spread = {name: torch.zeros(LAYOUT.shapes[name], dtype=torch.float64) for name in piece.index}
    piece.put(y, spread, weight=2.0)
    back = piece.take(spread)
    assert back.keys() == y.keys()
    assert all(torch.equal(back[name], 2 * y[name]) for name in y)


@given(slices())
def test_take_has_the_declared_shapes_and_its_own_memory(piece: Slice) -> None:
    x = random_state(dict(LAYOUT.shapes), 0)
    part = piece.take(x)
    assert {name: tuple(value.shape) for name, value in part.items()} == dict(piece.shapes)
    assert piece.num_elements == sum(value.numel() for value in part.values())
    for value in part.values():
        value.fill_(float("nan"))
    assert not any(value.isnan().any() for value in x.values())


def test_lists_of_channels_act_on_their_own_dimension() -> None:
    """Rows 2, 0 and columns 3, 1 of a matrix, and of a tensor whose cut dimensions are not neighbours."""
    rows, columns = Axis("rows", 3), Axis("columns", 4)
    layout = Layout(
        axes={"matrix": (rows, columns), "apart": (rows, None, columns)},
        shapes={"matrix": (3, 4), "apart": (3, 2, 4)},
        stages=(),
        shallow={},
        buffers=frozenset(),
    )
    piece = cut(layout, (), {"rows": torch.tensor([2, 0]), "columns": torch.tensor([3, 1])})
    full = {"matrix": torch.arange(12).view(3, 4), "apart": torch.arange(24).view(3, 2, 4)}
    part = piece.take(full)
    assert part["matrix"].tolist() == [[11, 9], [3, 1]]
    assert part["apart"].tolist() == [[[19, 17], [23, 21]], [[3, 1], [7, 5]]]


class TestCheck:
    def piece(self) -> Slice:
        return Slice({"w": (slice(0, 2),)}, {"w": (2,)})

    def test_accepts_its_own(self) -> None:
        self.piece().check({"w": torch.zeros(2)}, "client 1")

    @pytest.mark.parametrize(
        ("part", "message"),
        [
            ({"w": torch.zeros(1)}, r"client 17: 'w' has shape \(1,\), its slice expects \(2,\)"),
            ({}, "client 17: 'w' is missing"),
            ({"w": torch.zeros(2), "x": torch.zeros(1)}, "client 17: 'x' is not in its slice"),
        ],
    )
    def test_refuses(self, part: dict[str, Tensor], message: str) -> None:
        with pytest.raises(UploadError, match=message):
            self.piece().check(part, "client 17")


class TestUnitsAndCopies:
    """Three matrices of two heads of two channels in one: q, k and v; and gates of an LSTM."""

    heads = Axis("heads", 2, unit=2)
    stacked = Axis("heads", 2, copies=3, unit=2)
    layout = Layout(
        axes={"qkv": (stacked, None), "proj": (None, heads)},
        shapes={"qkv": (12, 1), "proj": (1, 4)},
        stages=(),
        shallow={},
        buffers=frozenset(),
    )

    def test_a_head_is_kept_whole_in_every_copy(self) -> None:
        piece = cut(self.layout, (), {"heads": slice(0, 1)})
        full = {"qkv": torch.arange(12).view(12, 1), "proj": torch.arange(4).view(1, 4)}
        part = piece.take(full)
        assert part["qkv"].flatten().tolist() == [0, 1, 4, 5, 8, 9]
        assert part["proj"].tolist() == [[0, 1]]
        assert piece.shapes == {"qkv": (6, 1), "proj": (1, 2)}

    def test_units_in_another_order(self) -> None:
        """A window that wraps: head 1, then head 0."""
        piece = cut(self.layout, (), {"heads": torch.tensor([1, 0])})
        part = piece.take({"qkv": torch.arange(12).view(12, 1), "proj": torch.arange(4).view(1, 4)})
        assert part["qkv"].flatten().tolist() == [2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9]
        assert part["proj"].tolist() == [[2, 3, 0, 1]]

    def test_what_is_put_back_lies_where_it_was_taken(self) -> None:
        piece = cut(self.layout, (), {"heads": slice(1, 2)})
        full = {"qkv": torch.zeros(12, 1), "proj": torch.zeros(1, 4)}
        piece.put({name: torch.ones(shape) for name, shape in piece.shapes.items()}, full)
        assert full["qkv"].flatten().tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
        assert full["proj"].tolist() == [[0, 0, 1, 1]]
