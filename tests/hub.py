"""A Hub that needs no network and holds a small SVHN."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from PIL import Image

from incofl.data import DATASETS, Examples
from incofl.data.hub import Remote
from incofl.data.svhn import svhn

Calls = list[tuple[str, str | None, str]]  # repository, subset, split


def examples(count: int, *shape: int) -> Examples:
    """Random images, every class equally often, ordered by class."""
    x = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return Examples(x, torch.arange(count) * 10 // count)


def serve_small_svhn(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces the Hub, and the source by one that expects the small sizes; the calls that are made."""
    calls: Calls = []

    def rows(remote: Remote, split: str) -> list[dict[str, Any]]:
        calls.append((remote.repository, remote.subset, split))
        part = examples(40 if split == "train" else 20, 3, 32, 32)
        pictures = [Image.fromarray(x.permute(1, 2, 0).contiguous().numpy()) for x in part.x]
        return [{"image": image, "label": label} for image, label in zip(pictures, part.y.tolist(), strict=True)]

    monkeypatch.setattr(Remote, "rows", rows)
    published = dataclasses.replace(DATASETS["svhn"].published, train=(4,) * 10, test=(2,) * 10)
    small = dataclasses.replace(DATASETS["svhn"], load=functools.partial(svhn, sizes=(40, 20)), published=published)
    monkeypatch.setitem(DATASETS, "svhn", small)
    return calls
