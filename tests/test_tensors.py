"""Named tensors, and inputs of models: tensors, tuples and dicts of tensors."""

import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from incofl.tensors import Inputs, all_finite, call, map_inputs, norm, num_examples


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 3, 3)])
def test_the_norm_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    assert norm(torch.full(shape, -2.0)) == pytest.approx(2 * math.sqrt(math.prod(shape)))


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    assert all_finite({"a": torch.full((4,), 3e38), "steps": torch.tensor(3)})
    assert not all_finite({"a": torch.tensor([1.0, math.inf])})
    assert not all_finite({"a": torch.tensor(math.nan)})


ONE, TWO = torch.ones(3, 2), torch.full((3, 4), 2.0)


def test_map_inputs_keeps_the_structure() -> None:
    assert torch.equal(_tensor(map_inputs(torch.neg, ONE)), -ONE)
    pair = map_inputs(torch.neg, (ONE, TWO))
    assert isinstance(pair, tuple)
    assert all(torch.equal(found, -given) for found, given in zip(pair, (ONE, TWO), strict=True))
    named = map_inputs(torch.neg, {"a": ONE, "b": TWO})
    assert isinstance(named, dict)
    assert {name: float(value[0, 0]) for name, value in named.items()} == {"a": -1.0, "b": -2.0}


def test_call() -> None:
    def model(x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x if scale is None else x.sum() * scale

    assert call(model, ONE) is ONE
    assert torch.equal(call(model, (ONE, TWO)), 6 * TWO)
    assert torch.equal(call(model, {"scale": TWO, "x": ONE}), 6 * TWO)


def test_call_returns_the_logits_of_an_output_that_has_them() -> None:
    def model(input_ids: Tensor) -> Any:
        return types.SimpleNamespace(loss=None, logits=input_ids)

    assert call(model, {"input_ids": ONE}) is ONE


@pytest.mark.parametrize("inputs", [ONE, (ONE, TWO), {"a": TWO}])
def test_num_examples(inputs: Inputs) -> None:
    assert num_examples(inputs) == 3


def _tensor(inputs: Inputs) -> Tensor:
    assert isinstance(inputs, Tensor)
    return inputs
