"""A stand-in for the package ``datasets`` and the Hub behind it: no network, few examples."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from incofl.data import DATASETS, Examples, Source

Row = dict[str, Any]
Calls = list[tuple[str, str | None, str, str | None]]  # repository, subset, split, revision


def examples(count: int, *shape: int) -> Examples:
    """Random images, every class equally often, ordered by class."""
    x = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return Examples(x, torch.arange(count) * 10 // count)


def image_rows(part: Examples, column: str = "image") -> list[Row]:
    """Rows as the Hub has them: images as pictures, labels as numbers."""
    pictures = [Image.fromarray(x.permute(1, 2, 0).squeeze(2).contiguous().numpy()) for x in part.x]
    return [{column: picture, "label": label} for picture, label in zip(pictures, part.y.tolist(), strict=True)]


def serve(monkeypatch: pytest.MonkeyPatch, splits: Mapping[str, Sequence[Row]]) -> Calls:
    """Puts the stand-in in place of ``datasets``, which holds these splits; returns the calls that are made to it."""
    calls: Calls = []

    def load_dataset(repository: str, subset: str | None, *, split: str, revision: str | None) -> Sequence[Row]:
        calls.append((repository, subset, split, revision))
        return splits[split]

    module = ModuleType("datasets")
    monkeypatch.setattr(module, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def expect(monkeypatch: pytest.MonkeyPatch, name: str, train: int, test: int) -> Source:
    """Replaces a source by one of which so many examples of each class are published."""
    source = dataclasses.replace(DATASETS[name], train_counts=[train] * 10, test_counts=[test] * 10)
    monkeypatch.setitem(DATASETS, name, source)
    return source


def serve_small_svhn(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A Hub with 40 and 20 digits of SVHN, which are all that is published."""
    expect(monkeypatch, "svhn", 4, 2)
    parts = {"train": examples(40, 3, 32, 32), "test": examples(20, 3, 32, 32)}
    return serve(monkeypatch, {split: image_rows(part) for split, part in parts.items()})
