"""Algebra of named tensors."""

import math

import pytest
import torch

from incofl.tensors import all_finite, norm


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 3, 3)])
def test_the_norm_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    assert norm(torch.full(shape, -2.0)) == pytest.approx(2 * math.sqrt(math.prod(shape)))


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    assert all_finite({"a": torch.full((4,), 3e38), "steps": torch.tensor(3)})
    assert not all_finite({"a": torch.tensor([1.0, math.inf])})
    assert not all_finite({"a": torch.tensor(math.nan)})
