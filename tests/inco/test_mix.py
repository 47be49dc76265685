"""The InCo formula: hand numbers, an oracle written another way, and the convex problem it solves."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from incofl.errors import ConfigError
from incofl.inco import mix


def kernel(value: float) -> Tensor:
    return torch.full((1, 1, 3, 3), value, dtype=torch.float64)


def oracle(deep: Tensor, shallow: Tensor, **options: Any) -> Tensor:
    """The three rules over plain Python floats, one unit at a time, straight from the definitions."""
    o: dict[str, Any] = {
        "rule": "released",
        "granularity": "kernel",
        "normalise": True,
        "optimise": True,
        "theta_max": 5.0,
        "clip": 0.1,
        "eps": 1e-7,
        "guard_zero_reference": True,
    } | options
    out = np.empty(tuple(deep.shape))
    by_kernel = o["granularity"] == "kernel" and deep.dim() == 4
    units = itertools.product(range(deep.shape[0]), range(deep.shape[1])) if by_kernel else [()]
    for unit in units:
        gk = [float(v) for v in deep[unit].flatten()]
        g0 = [float(v) for v in shallow[unit].flatten()]
        a = math.fsum(v * v for v in g0)
        b = math.fsum(v * w for v, w in zip(g0, gk, strict=True))
        nk, n0 = math.sqrt(math.fsum(v * v for v in gk)), math.sqrt(a)
        theta = (abs(b) if o["rule"] == "released" else b) / (a + o["eps"])
        if o["theta_max"] is not None:
            theta = max(-o["theta_max"], min(o["theta_max"], theta))
        sign = 1.0 if o["rule"] == "released" else -1.0
        result = []
        for vk, v0 in zip(gk, g0, strict=True):
            coefficient = sign * theta if o["optimise"] else 1.0
            if o["normalise"]:
                u = (vk / (nk + o["eps"]) + coefficient * v0 / (n0 + o["eps"])) * (nk + n0) / 2
            else:
                u = vk + coefficient * v0
            if o["rule"] == "theorem" and o["optimise"] and b >= 0:
                u = vk
            if o["guard_zero_reference"] and n0 == 0:
                u = vk
            if o["clip"] is not None:
                u = max(-o["clip"], min(o["clip"], u))
            result.append(u)
        out[unit] = np.reshape(result, tuple(deep[unit].shape))
    return torch.from_numpy(out)


class TestHandNumbers:
    """A single 3x3 kernel of equal entries x has norm 3|x|; two of them x, y have inner product 9xy."""

    def test_opposite_kernels_cancel(self) -> None:
        # theta = |-9| / 9 = 1; g_k/3 + g_0/3 = 0
        assert torch.allclose(mix(kernel(1), kernel(-1), clip=None), kernel(0), atol=1e-7)

    @pytest.mark.parametrize(("rule", "expected"), [("released", 2.25), ("algorithm1", 0.75), ("theorem", 1.0)])
    def test_one_and_two(self, rule: Any, expected: float) -> None:
        # N = 3 and 6, alpha = 36, beta = 18, theta = 0.5; (1/3 +- 0.5/3) * 4.5
        assert torch.allclose(mix(kernel(1), kernel(2), rule=rule, clip=None), kernel(expected), atol=1e-6)

    def test_zero_reference_is_left_alone_or_halved(self) -> None:
        assert torch.equal(mix(kernel(1), kernel(0), clip=None), kernel(1))
        halved = mix(kernel(1), kernel(0), clip=None, guard_zero_reference=False)
        assert torch.allclose(halved, kernel(0.5), atol=1e-6)

    def test_zero_update_stays_zero(self) -> None:
        assert torch.equal(mix(kernel(0), kernel(1)), kernel(0))
        assert torch.equal(mix(kernel(0), kernel(0), guard_zero_reference=False), kernel(0))

    def test_a_tiny_update_is_blown_up_and_clipped(self) -> None:
        # theta = 0.01, (1/3)(1.01)(1.515) = 0.51005
        assert torch.allclose(mix(kernel(0.01), kernel(1), clip=None), kernel(0.51005), atol=1e-5)
        assert torch.equal(mix(kernel(0.01), kernel(1)), kernel(0.1))

    def test_ablations(self) -> None:
        # without normalisation: 1 + 0.5 * 2 and 1 - 0.5 * 2; without optimisation: (1/3 + 1/3) * 4.5; neither: 1 + 2
        options: dict[str, Any] = {"clip": None}
        assert torch.allclose(mix(kernel(1), kernel(2), normalise=False, **options), kernel(2), atol=1e-6)
        plain = mix(kernel(1), kernel(2), rule="algorithm1", normalise=False, **options)
        assert torch.allclose(plain, kernel(0), atol=1e-6)
        for rule in ("released", "algorithm1", "theorem"):
            added = mix(kernel(1), kernel(2), rule=rule, optimise=False, **options)
            assert torch.allclose(added, kernel(3), atol=1e-6)
            both = mix(kernel(1), kernel(2), rule=rule, optimise=False, normalise=False, **options)
            assert torch.equal(both, kernel(3))

    def test_theta_is_bounded(self) -> None:
        # theta = 100, bounded to 5: (1/3 + 5/3) * (3 + 0.03) / 2 = 3.03
        assert torch.allclose(mix(kernel(1), kernel(0.01), clip=None), kernel(3.03), atol=1e-4)
        unbounded = mix(kernel(1), kernel(0.01), clip=None, theta_max=None, eps=0.0)
        assert torch.allclose(unbounded, kernel((1 + 100) / 3 * 1.515), atol=1e-6)
        # theta = -100 in algorithm1: bounded to -5
        negative = mix(kernel(-1), kernel(0.01), rule="algorithm1", normalise=False, clip=None)
        assert torch.allclose(negative, kernel(-1 + 5 * 0.01), atol=1e-6)


OPTIONS = [
    {"rule": rule, "granularity": granularity, "normalise": normalise, "optimise": optimise, **bounds}
    for rule in ("released", "algorithm1", "theorem")
    for granularity in ("kernel", "tensor")
    for normalise in (True, False)
    for optimise in (True, False)
    for bounds in (
        {},
        {"clip": None, "theta_max": None},
        {"clip": None, "theta_max": 0.5, "guard_zero_reference": False, "eps": 1e-3},
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(str(v) for v in o.values()))
@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (2, 2, 1, 1), (5, 4), (7,)])
def test_agrees_with_the_oracle(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(7)
    deep = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.05
    shallow = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
    if len(shape) == 4:
        deep[0, 0], shallow[0, 1], deep[1, 1], shallow[1, 1] = 0.0, 0.0, 0.0, 0.0
    before = deep.clone(), shallow.clone()
    assert torch.allclose(mix(deep, shallow, **options), oracle(deep, shallow, **options), rtol=1e-12, atol=1e-12)
    assert torch.equal(deep, before[0])
    assert torch.equal(shallow, before[1])


vectors = st.lists(st.floats(-3, 3, allow_subnormal=False), min_size=4, max_size=4)


@given(vectors, vectors)
def test_theorem_solves_the_convex_problem(deep: list[float], shallow: list[float]) -> None:
    """g = mix(...) is feasible, and no feasible point tried is closer to g_k (not normalised, equation 1)."""
    gk, g0 = torch.tensor(deep, dtype=torch.float64), torch.tensor(shallow, dtype=torch.float64)
    if float(g0.norm()) < 1e-3:
        return
    options: dict[str, Any] = {"normalise": False, "theta_max": None, "clip": None, "eps": 0.0}
    g = mix(gk, g0, rule="theorem", **options)
    assert float(g @ g0) >= -1e-9
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        other = g + torch.randn(4, generator=generator, dtype=torch.float64) * 0.3
        if float(other @ g0) >= 0:
            assert float((gk - g).square().sum()) <= float((gk - other).square().sum()) + 1e-9


def test_kernels_are_mixed_one_by_one() -> None:
    """Changing one kernel of g_0 changes that kernel of the result only; with granularity ``tensor`` it changes all."""
    generator = torch.Generator().manual_seed(1)
    deep, shallow = torch.randn(2, 3, 2, 3, 3, generator=generator)
    other = shallow.clone()
    other[1, 0] *= 2
    same = mix(deep, shallow, clip=None) == mix(deep, other, clip=None)
    assert not same[1, 0].any()
    assert same.sum() == same.numel() - 9
    assert not (
        mix(deep, shallow, clip=None, granularity="tensor") == mix(deep, other, clip=None, granularity="tensor")
    ).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "code"}, "inco.rule: got 'code', expected 'released' or 'algorithm1' or 'theorem'"),
        ({"granularity": "layer"}, "inco.granularity: got 'layer'"),
        ({"theta_max": 0.0}, "inco.theta_max: got 0.0, expected a number > 0 or 'none'"),
        ({"clip": -1.0}, "inco.clip: got -1.0"),
        ({"eps": -1.0}, "inco.eps: got -1.0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix(kernel(1), kernel(1), **options)


def test_shapes_must_agree() -> None:
    with pytest.raises(ConfigError, match="expected one shape"):
        mix(torch.ones(2, 2), torch.ones(2, 3))
