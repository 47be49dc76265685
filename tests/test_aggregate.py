"""The covered mean against a dense oracle, and the positions that nobody held."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from incofl.aggregate import Accumulator, Contribution, pooled_by_width
from incofl.layout import Layout
from incofl.models import ModelOptions, make_model
from incofl.server import Changes, Server
from incofl.split import Splitter, Window

LAYOUT: Layout = make_model("tiny-resnet", ModelOptions(shape=(1, 8, 8))).layout


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1), st.integers(1, 2), st.integers(1, 2), st.integers(0, 30)), min_size=1, max_size=4
    ),
    st.sampled_from(["prefix", "rolling"]),
    st.integers(0, 10**6),
)
def test_agrees_with_a_dense_mean_over_nan_masks(
    clients: list[tuple[float, int, int, int]], window: Window, seed: int
) -> None:
    """Oracle: stack the clients' tensors with NaN where they hold nothing, and take a weighted mean that skips NaN."""
    generator = torch.Generator().manual_seed(seed)
    accumulator = Accumulator(LAYOUT, torch.float64)
    dense: dict[str, list[np.ndarray]] = {name: [] for name in LAYOUT.parameters}
    weights = []
    for ratio, first, second, examples in clients:
        piece = Splitter((ratio,), ((first, second),), window).slice(LAYOUT, 0, seed % 17)
        held = {name: shape for name, shape in piece.shapes.items() if name in LAYOUT.parameters}
        part = {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in held.items()}
        accumulator.add(Contribution(piece, part, float(examples + 1)))
        weights.append(examples + 1)
        for name in LAYOUT.parameters:
            full = np.full(LAYOUT.shapes[name], np.nan)
            if name in part:
                at = [
                    np.arange(n)[i] if isinstance(i, slice) else i.numpy()
                    for i, n in zip(piece.index[name], LAYOUT.shapes[name], strict=True)
                ]
                full[np.ix_(*at)] = part[name].numpy()
            dense[name].append(full)
    covered = accumulator.mean()
    for name, stack in dense.items():
        values = np.stack(stack)
        weight = np.array(weights, float).reshape(-1, *[1] * (values.ndim - 1)) * ~np.isnan(values)
        total = weight.sum(0)
        expected = np.divide((np.nan_to_num(values) * weight).sum(0), total, out=np.zeros_like(total), where=total > 0)
        if name not in covered.values:
            assert not total.any()
            continue
        np.testing.assert_allclose(covered.values[name].numpy(), expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(covered.weight[name].expand(values.shape[1:]), torch.from_numpy(total))


def test_by_hand() -> None:
    """Two clients hold channel 0 (updates 1 and 4, weights 1 and 3), one holds channel 1 (6): means 13/4 and 6."""
    splitter = Splitter((0.5, 1.0), ((1, 1), (1, 1)))
    layout = make_model("tiny-resnet", ModelOptions(width=0.25, shape=(1, 8, 8))).layout  # two channels in stage 1
    narrow, wide = splitter.slice(layout, 0, 0), splitter.slice(layout, 1, 0)
    accumulator = Accumulator(layout)
    accumulator.add(Contribution(narrow, {"bn1.weight": torch.tensor([1.0])}, 1.0))
    accumulator.add(Contribution(wide, {"bn1.weight": torch.tensor([4.0, 6.0])}, 3.0))
    covered = accumulator.mean()
    assert covered.values["bn1.weight"].tolist() == [3.25, 6.0]
    assert covered.weight["bn1.weight"].tolist() == [4.0, 3.0]


def test_whole_numbers_are_truncated() -> None:
    """Counters 3, 4 and 4 average to 3.67, kept as 3."""
    piece = Splitter((1.0,), ((2, 2),)).slice(LAYOUT, 0, 0)
    accumulator = Accumulator(LAYOUT)
    for count in (3, 4, 4):
        accumulator.add(Contribution(piece, {"bn1.num_batches_tracked": torch.tensor(count)}))
    mean = accumulator.mean().values["bn1.num_batches_tracked"]
    assert mean.dtype == torch.int64
    assert int(mean) == 3


def test_positions_held_by_nobody_keep_every_bit() -> None:
    """Even a negative zero, which adding zero would turn into a positive one, and a NaN."""
    splitter = Splitter((0.5,), ((1, 1),))
    piece = splitter.slice(LAYOUT, 0, 0)
    accumulator = Accumulator(LAYOUT)
    accumulator.add(Contribution(piece, {"bn1.weight": torch.ones(4)}))
    state = {"bn1.weight": torch.tensor([1.0, 1, 1, 1, -0.0, float("nan"), 3e-45, 7])}
    new = Server(LAYOUT, state).advance(Changes(accumulator.mean())).shared
    assert new["bn1.weight"][:4].tolist() == [2.0] * 4
    assert torch.equal(new["bn1.weight"][4:].view(torch.int32), state["bn1.weight"][4:].view(torch.int32))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 2.0**22), (torch.float64, 2.0**22 + 0.5)])
def test_precision_of_the_running_sum(dtype: torch.dtype, expected: float) -> None:
    """(2^24 + 1 + 1 + 0) / 4: the ones are lost in a float32 sum and kept in a float64 one."""
    piece = Splitter((1.0,), ((2, 2),)).slice(LAYOUT, 0, 0)
    accumulator = Accumulator(LAYOUT, dtype)
    for value in (2.0**24, 1.0, 1.0, 0.0):
        accumulator.add(Contribution(piece, {"fc.bias": torch.full((10,), value)}))
    assert float(accumulator.mean().values["fc.bias"][0]) == expected


@pytest.mark.parametrize("window", ["prefix", "rolling"])
def test_who_arrives_together_does_not_matter(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, in groups or all at once, in chunks or whole: the same sums, bit for bit."""
    monkeypatch.setattr("incofl.aggregate._CHUNK", 50)
    splitter = Splitter((0.4, 0.7, 1.0), ((1, 1), (2, 1), (2, 2)), window)
    slices = [splitter.slice(LAYOUT, level, 5) for level in range(3)]
    generator = torch.Generator().manual_seed(1)
    parts = []
    for level, weight in ((2, 3.0), (2, 0.1), (1, 7.0), (0, 1.0), (1, 2.0), (2, 5.0)):
        held = {name: shape for name, shape in slices[level].shapes.items() if name in LAYOUT.parameters}
        values = {name: torch.randn(shape, generator=generator) for name, shape in held.items()}
        parts.append(Contribution(slices[level], values, weight))

    def result(*sizes: int) -> dict[str, torch.Tensor]:
        accumulator, rest = Accumulator(LAYOUT), list(parts)
        for size in sizes:
            accumulator.add(*rest[:size])
            del rest[:size]
        return accumulator.mean().values

    one_by_one = result(1, 1, 1, 1, 1, 1)
    for sizes in ((6,), (2, 4), (3, 3), (1, 5)):
        other = result(*sizes)
        assert all(torch.equal(other[name], one_by_one[name]) for name in one_by_one)


def test_levels_of_one_width_share_statistics() -> None:
    """Levels 1 and 2 differ in depth only; 1 has twice the weight of 2; level 0 is narrower; nobody trained level 3."""
    splitter = Splitter((0.5, 1.0, 1.0, 1.0), ((1, 1), (1, 1), (1, 2), (2, 2)))
    slices = {level: splitter.slice(LAYOUT, level) for level in range(4)}
    statistics = sorted(name for name in LAYOUT.buffers if name.endswith("running_mean"))
    everywhere = next(name for name in statistics if name in slices[0].index)
    deep = next(name for name in statistics if name in slices[2].index and name not in slices[1].index)
    means = {}
    for level, (value, clients) in enumerate([(9.0, 1), (1.0, 2), (4.0, 1)]):
        total = Accumulator(LAYOUT)
        held = {name: slices[level].shapes[name] for name in (everywhere, deep) if name in slices[level].index}
        for _ in range(clients):
            values = {name: torch.full(shape, value) for name, shape in held.items()}
            total.add(Contribution(slices[level], values))
        means[level] = total.mean()
    pooled = pooled_by_width(means, slices, LAYOUT.buffers)
    half = slices[0].shapes[everywhere][0]
    assert pooled[0].values[everywhere].tolist() == [9.0] * half + [0.0] * half
    for level in (1, 2, 3):
        assert torch.equal(pooled[level].values[everywhere], torch.full((2 * half,), 2.0))
    assert deep not in pooled[1].values
    assert torch.equal(pooled[2].values[deep], pooled[3].values[deep])
    assert set(pooled[3].values[deep].tolist()) == {4.0}
    assert pooled[2].values[everywhere].data_ptr() != pooled[3].values[everywhere].data_ptr()
