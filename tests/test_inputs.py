"""Inputs of models: tensors, tuples and dicts of tensors."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from incofl.inputs import Inputs, call, map_inputs, num_examples

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
