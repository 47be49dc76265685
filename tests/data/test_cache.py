"""The cached copy of a data set: read before the original files, complete or refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from incofl.data import DATASETS, Examples
from incofl.data.cache import check_cache, read_cache, write_cache
from incofl.errors import DataError
from tests.hub import examples
from tests.sources import load_dataset
from tests.texts import write_shakespeare


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.safetensors"
    train = Examples(torch.arange(12).view(3, 4), torch.tensor([0, 1, 1]), torch.tensor([5, 5, 0]))
    test = Examples(torch.zeros(2, 4, dtype=torch.float16), torch.tensor([[1, 0], [0, 0]], dtype=torch.uint8))
    write_cache(path, train, test, "here")
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]
    for written, read in zip((train, test), read_cache(path, 2), strict=True):
        for name, tensor in vars(written).items():
            other = getattr(read, name)
            assert other is tensor is None or (other.dtype == tensor.dtype and torch.equal(other, tensor))
    assert check_cache(path) == (True, "here")
    first = path.read_bytes()
    write_cache(path, train, test, "here")
    assert path.read_bytes() == first  # no date in it


def test_it_is_read_before_the_original_files(tmp_path: Path) -> None:
    write_shakespeare(tmp_path)
    train, test = DATASETS["shakespeare"].load(tmp_path)
    write_cache(tmp_path / "shakespeare.safetensors", test, train, "the other way round")
    data = load_dataset("shakespeare", tmp_path)
    assert (len(data.train), len(data.test)) == (len(test), len(train))
    assert data.train.groups is not None


def test_digits_are_embedded_whatever_there_is(tmp_path: Path) -> None:
    write_cache(tmp_path / "digits.safetensors", examples(10, 1, 8, 8), examples(10, 1, 8, 8), "x")
    assert len(load_dataset("digits", tmp_path).train) == 1442


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test.y": None}, "test.x, test.y or test.groups is missing or incomplete"),
        ({"train.x": None}, "train.x, train.y or train.groups is missing or incomplete"),
        ({"train.y": torch.zeros(9, dtype=torch.int64)}, "train.x, train.y or train.groups is missing or incomplete"),
        ({"test.groups": torch.zeros(9, dtype=torch.int64)}, "test.x, test.y or test.groups is missing or incomplete"),
        ({"test.x": torch.zeros(0, 3), "test.y": torch.zeros(0)}, "test.x, test.y or test.groups is missing"),
        ({"train.y": torch.full((10,), 10)}, "train.y is 10 to 10, expected 0 to 9"),
        ({"test.y": torch.arange(-1, 9)}, "test.y is -1 to 8, expected 0 to 9"),
    ],
)
def test_incomplete(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    path = tmp_path / "svhn.safetensors"
    write_cache(path, examples(10, 3, 32, 32), examples(10, 3, 32, 32), "x")
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(
        DataError,
        match=rf"svhn.safetensors: not a readable cached copy \({message}.*; delete it, then: incofl data fetch",
    ):
        load_dataset("svhn", tmp_path)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"rubbish", lambda raw: b""])
def test_truncated_or_of_another_kind(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "svhn.safetensors"
    write_cache(path, examples(10, 3, 32, 32), examples(10, 3, 32, 32), "x")
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        DataError, match=r"svhn.safetensors: not a readable cached copy \(.*delete it, then: incofl data fetch svhn$"
    ):
        load_dataset("svhn", tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_cache(path, examples(10, 3, 32, 32), examples(20, 3, 32, 32), "x")
    assert list(tmp_path.iterdir()) == [path]
