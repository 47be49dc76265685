"""What is fetched from the Hub is kept in one file, which every source reads first; a failure leaves nothing."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from incofl.data import DATASETS, Examples
from incofl.data.provenance import fetch
from incofl.errors import DataError, IncoflError
from tests.hub import Calls, Row, examples, expect, image_rows, serve, serve_small_svhn
from tests.sources import load_dataset


def same(a: Examples, b: Examples) -> bool:
    return torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


@pytest.fixture
def small_svhn(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return serve_small_svhn(monkeypatch)


@pytest.mark.parametrize(
    ("name", "column", "shape"),
    [
        ("mnist", "image", (1, 28, 28)),
        ("fashion-mnist", "image", (1, 28, 28)),
        ("cifar10", "img", (3, 32, 32)),
        ("cinic10", "image", (3, 32, 32)),
        ("svhn", "image", (3, 32, 32)),
    ],
)
def test_images_are_fetched_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, column: str, shape: tuple[int, ...]
) -> None:
    parts = {"train": examples(30, *shape), "test": examples(20, *shape)}
    calls = serve(monkeypatch, {split: image_rows(part, column) for split, part in parts.items()})
    expect(monkeypatch, name, 3, 2)
    root = tmp_path / "new" / "data"
    assert fetch(name, root) == root / f"{name}.safetensors"
    assert [path.name for path in root.iterdir()] == [f"{name}.safetensors"]  # nothing half-written
    hub = DATASETS[name].hub
    assert calls == [(hub["repository"], hub.get("subset"), split, None) for split in parts]
    data = load_dataset(name, root)
    assert same(data.train, parts["train"])
    assert same(data.test, parts["test"])
    assert (data.train.x.dtype, data.train.y.dtype) == (torch.uint8, torch.int64)


def test_grey_images_among_coloured_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CINIC-10 has some."""
    grey, coloured = examples(10, 1, 32, 32), examples(10, 3, 32, 32)
    serve(monkeypatch, {"train": image_rows(grey) + image_rows(coloured), "test": image_rows(coloured)})
    expect(monkeypatch, "cinic10", 2, 1)
    fetch("cinic10", tmp_path)
    train = load_dataset("cinic10", tmp_path).train
    assert torch.equal(train.x, torch.cat([grey.x.expand(-1, 3, -1, -1), coloured.x]))


def test_texts_are_fetched_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as the Hub has them give the same examples as the original files do."""
    speech = "What is thy name? " * 40
    rows: dict[str, dict[str, list[Row]]] = {
        "sst2": {
            "train": [{"sentence": "a fine film ", "label": 1}, {"sentence": "dull", "label": 0}],
            "validation": [{"sentence": "fine", "label": 1}],
        },
        "imdb": {
            "train": [{"text": "Good one", "label": 1}, {"text": "Bad one", "label": 0}],
            "test": [{"text": "Good two", "label": 1}, {"text": "Bad two", "label": 0}],
        },
        "shakespeare": {
            "train": [{"text": f"Hamlet:\n{speech}\n\nGhost:\n{speech[:-9]}"}],
            "validation": [{"text": f"{speech[-9:]}\n\nHamlet:\n"}],
            "test": [{"text": f"{speech}\n"}],
        },
    }
    originals = {
        "sst2/train.tsv": "sentence\tlabel\na fine film \t1\ndull\t0\n",
        "sst2/dev.tsv": "sentence\tlabel\nfine\t1\n",
        "imdb/reviews.json": '[{"t": "Good one", "s": 1}, {"t": "Bad one", "s": 0}, {"t": "Good two", "s": 1}, '
        '{"t": "Bad two", "s": 0}]',
        "tinyshakespeare.txt": f"Hamlet:\n{speech}\n\nGhost:\n{speech}\n\nHamlet:\n{speech}\n",
    }
    for name, content in originals.items():
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_text(content)
    for name, splits in rows.items():
        calls = serve(monkeypatch, splits)
        fetch(name, tmp_path)
        assert {call[3] for call in calls} == {"refs/convert/parquet" if name == "shakespeare" else None}
        for fetched, read in zip(DATASETS[name].load(tmp_path), DATASETS[name].load(tmp_path / "files"), strict=True):
            assert same(fetched, read)
            assert (fetched.groups is None) == (read.groups is None) == (name != "shakespeare")
            if fetched.groups is not None and read.groups is not None:
                assert torch.equal(fetched.groups, read.groups)


def test_what_is_there_is_not_fetched_again(small_svhn: Calls, tmp_path: Path) -> None:
    fetch("svhn", tmp_path)
    with pytest.raises(DataError, match=r"svhn.safetensors is there already; look at it with: incofl data verify svhn"):
        fetch("svhn", tmp_path)
    (tmp_path / "svhn.safetensors").unlink()
    (tmp_path / "train_32x32.mat").touch()
    with pytest.raises(DataError, match=r"train_32x32.mat is there already"):
        fetch("svhn", tmp_path)
    assert len(small_svhn) == 2


def test_a_failed_fetch_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: object, **options: object) -> None:
        raise ConnectionError("no route to the Hub\nmore about it")

    serve(monkeypatch, {})
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", unreachable)
    with pytest.raises(
        DataError,
        match=r"^svhn: https://huggingface.co/datasets/ufldl-stanford/svhn cannot be loaded \(no route to the Hub\); "
        r"try again, or put the original files into .*svhn/\*_32x32.mat$",
    ):
        fetch("svhn", tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_what_differs_from_the_published_counts_is_refused(
    small_svhn: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, "svhn", 4, 3)
    with pytest.raises(DataError, match=r"other test examples than published: 20, 2 of each class; expected 30, 3 of"):
        fetch("svhn", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["datasets", "PIL"])
def test_without_its_extra_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    begun: list[str] = []
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(IncoflError, match=rf"^svhn: needs {package}; try: pip install 'incofl\[hub\]'$"):
        fetch("svhn", tmp_path / "data", begun.append)
    assert begun == []
    assert list(tmp_path.iterdir()) == []


def test_every_data_set_with_files_can_be_fetched(tmp_path: Path) -> None:
    for name, source in DATASETS.items():
        assert bool(source.files) == (name != "digits")
        assert bool(source.hub) == (
            name not in ("digits", "har")
        )  # HAR is nowhere on the Hub as its authors publish it
    assert DATASETS["svhn"].hub.items() >= {"repository": "ufldl-stanford/svhn", "subset": "cropped_digits"}.items()
    with pytest.raises(DataError, match="digits: got no place on the Hugging Face Hub, expected one of: mnist, "):
        fetch("digits", tmp_path)
