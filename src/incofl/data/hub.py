"""Fetches data sets from the Hugging Face Hub into a cached copy in ``data.root``.

Only ``incofl data fetch`` comes here: a run reads files and never loads anything over the network.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from incofl.data import find_source
from incofl.data.cache import Pair, write_cache
from incofl.data.dataset import Examples, explained
from incofl.data.texts import SST2_LENGTH, halves_of_reviews, windows_of_roles, word_examples
from incofl.data.verify import check_counts
from incofl.errors import DataError, needs_extra

Row = dict[str, Any]
Rows = Callable[..., Iterator[Row]]  # the rows of one or more splits by their names


def images(rows: Rows, column: str = "image", mode: str = "RGB") -> Pair:
    """Makes examples of images; ``mode`` makes all of them alike, as some of CINIC-10 are grey."""

    def part(split: str) -> Examples:
        pairs = [(np.atleast_3d(row[column].convert(mode)), row["label"]) for row in rows(split)]
        pixels = np.stack([image.transpose(2, 0, 1) for image, _ in pairs])
        return Examples(torch.from_numpy(pixels), torch.tensor([label for _, label in pairs]))

    return part("train"), part("test")


def _texts(rows: Iterator[Row], column: str) -> list[tuple[str, int]]:
    return [(row[column], row["label"]) for row in rows]


EXAMPLES: dict[str, Callable[[Rows], Pair]] = {
    "mnist": partial(images, mode="L"),
    "fashion-mnist": partial(images, mode="L"),
    "cifar10": partial(images, column="img"),
    "cinic10": images,
    "svhn": images,
    # The labels of the split test are secret.
    "sst2": lambda rows: word_examples(
        _texts(rows("train"), "sentence"), _texts(rows("validation"), "sentence"), SST2_LENGTH
    ),
    "imdb": lambda rows: halves_of_reviews(_texts(rows("train", "test"), "text"), "imdb"),
    "shakespeare": lambda rows: windows_of_roles(
        "".join(row["text"] for row in rows("train", "validation", "test")), "shakespeare"
    ),
}


def fetch(name: str, root: Path, begin: Callable[[str], None] = lambda address: None) -> Path:
    """Loads a data set from the Hub and writes its cached copy under ``root``."""
    source = find_source(name)
    if not source.hub:
        raise DataError(f"{name}: got no place on the Hugging Face Hub, expected one of: {', '.join(EXAMPLES)}")
    if found := source.found(root):
        raise DataError(f"{name}: {found[0]} is there already; look at it with: incofl data verify {name}")
    with needs_extra("hub", name):
        for package in ("datasets", "PIL"):  # before anything is done; PIL decodes images
            importlib.import_module(package)
    address = f"https://huggingface.co/datasets/{source.hub['repository']}"
    begin(address)
    hint = f"try again, or put the original files into {root / source.files[0]}"
    with explained(f"{name}: {address} cannot be loaded", hint):
        train, test = EXAMPLES[name](partial(_load_rows, **source.hub))
    for check in check_counts(source, train, test):
        if check.verdict == "differs":
            raise DataError(f"{name}: {address} has other {check.what} than published: {check.note}")
    path = root / f"{name}.safetensors"
    write_cache(path, train, test, address)
    return path


def _load_rows(*splits: str, repository: str, subset: str | None = None, revision: str | None = None) -> Iterator[Row]:
    """Loads splits over the network or from the cache of ``datasets``."""
    import datasets

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what matters of a failure is in its exception
    for split in splits:
        yield from datasets.load_dataset(repository, subset, split=split, revision=revision)
