"""The forms in which your own data can be given, and those that are refused in one line."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from incofl.data import Data
from incofl.errors import DataError

X, Y = torch.arange(24.0).view(8, 3), torch.arange(8) % 2


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: int) -> Any:
        return self.items[at]


PAIRS = Items(*zip(X, Y.tolist(), strict=True))
NAMED = Items(*({"values": x, "label": y} for x, y in zip(X, Y.tolist(), strict=True)))


@pytest.mark.parametrize(
    "given",
    [
        (X, Y),
        [X.double().numpy(), Y.to(torch.uint8).numpy()],
        (X.tolist(), Y.tolist()),
        PAIRS,
        NAMED,
        {"values": X, "label": Y},
        DataLoader(PAIRS, batch_size=3),
        DataLoader(NAMED, batch_size=3),
        iter([(X[:5], Y[:5]), (X[5:], Y[5:])]),
    ],
)
def test_all_forms_are_the_same_examples(given: Any) -> None:
    data = Data(given)
    assert data.train.x.dtype == torch.get_default_dtype()
    assert torch.equal(data.train.x, X)
    assert torch.equal(data.train.y, Y)
    assert (data.classes, len(data.test), data.train.shape) == (2, 0, (3,))


@pytest.mark.parametrize("given", [((X, 2 * X), Y), iter([((X[:5], 2 * X[:5]), Y[:5]), ((X[5:], 2 * X[5:]), Y[5:])])])
def test_several_inputs(given: Any) -> None:
    train = Data(given).train
    assert torch.equal(train.x[1], 2 * X)
    assert train.shape == ((3,), (3,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (X, "train: got Tensor, expected a pair"),
        (3, "train: got int, expected a pair"),
        ((X, Y[:7]), "train: got 8 inputs and 7 targets, expected as many of each"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "train x.0: cannot become a tensor"),
        (({"a": X, "b": ["text"] * 8}, Y), "train x.b: cannot become a tensor"),
        (Items((X[0], 0), (X[0, :2], 1)), r"train: cannot be stacked \(.*\); expected numbers of one shape: tokenise"),
        (Items(), r"train: cannot be stacked"),
        ({"values": X}, r"train: got the columns \['values'\], expected one of label"),
        ({"label": Y}, r"train: got the columns \['label'\], expected one of label.*, and inputs"),
        (iter([]), "train: got no batches, expected some"),
    ],
)
def test_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as problem:
        Data(given)
    assert "\n" not in str(problem.value)


def test_rows_with_a_single_one_are_no_class_numbers() -> None:
    rows = torch.eye(2, dtype=torch.int64)[Y]
    for given in (((X, rows),), ((X, Y), (X, rows))):
        with pytest.raises(DataError, match=r"targets are rows with a single 1, .*; use y.argmax\(1\)"):
            Data(*given)
    assert Data((X, rows), sequence=True).classes == 2  # a class for every position
    assert Data((X, rows.float())).classes is None  # several targets


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ((X[:, :2], Y), r"test: got examples of shape \(2,\), expected \(3,\) as in train"),
        (((X, X), Y), r"test: got examples of shape \(\(3,\), \(3,\)\), expected \(3,\) as in train"),
        ((X, Y + 5), "test: a target is 6, expected classes below 2"),
    ],
)
def test_a_test_set_of_another_kind(test: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Data((X, Y), test)


@pytest.mark.parametrize("clients", [[[0, 1.5]], [[0, -1]], [np.array([8])]])
def test_indices_of_no_example(clients: Any) -> None:
    with pytest.raises(DataError, match="clients: an index is out of range, expected 0 to 7"):
        Data((X, Y), clients=clients)
