"""Where files come from: fetched from the Hugging Face Hub into a cached copy, verified against what is published.

Only ``incofl data fetch`` loads anything over the network; a run reads files.
"""

import hashlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from incofl.data import DATASETS, find_source
from incofl.data.cache import Pair, check_cache, unpack, write_cache
from incofl.data.dataset import Examples, explained
from incofl.data.source import Source
from incofl.data.texts import halves_of_reviews, windows_of_roles, word_examples
from incofl.errors import DataError, needs_extra

LARGEST = 10**9  # bytes that a packed file may unpack to
_md5 = partial(hashlib.md5, usedforsecurity=False)  # as data sets are published with; reveals damage, not malice
Rows = Iterator[tuple[Any, int]]  # images or texts, and their classes


def _images(source: Source, train: Rows, test: Rows) -> Pair:
    """Makes examples of images, all of them grey or in colour: CINIC-10 has both."""
    mode = "L" if source.shape[0] == 1 else "RGB"

    def part(rows: Rows) -> Examples:
        pairs = [(np.atleast_3d(image.convert(mode)), label) for image, label in rows]
        pixels = np.stack([image.transpose(2, 0, 1) for image, _ in pairs])
        return Examples(torch.from_numpy(pixels), torch.tensor([label for _, label in pairs]))

    return part(train), part(test)


_TEXTS = {"sst2": word_examples, "imdb": halves_of_reviews, "shakespeare": windows_of_roles}


def fetch(name: str, root: Path, begin: Callable[[str], None] = lambda address: None) -> Path:
    """Loads a data set from the Hub and writes its cached copy under ``root``."""
    source = find_source(name)
    hub = source.hub
    if not hub:
        known = ", ".join(name for name, source in DATASETS.items() if source.hub)
        raise DataError(f"{name}: got no place on the Hugging Face Hub, expected one of: {known}")
    if found := source.found(root):
        raise DataError(f"{name}: {found[0]} is there already; look at it with: incofl data verify {name}")
    with needs_extra("hub", name):  # before anything is done; PIL decodes images
        datasets, _ = (importlib.import_module(package) for package in ("datasets", "PIL"))
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what matters of a failure is in its exception
    repository, address = hub["repository"], f"https://huggingface.co/datasets/{hub['repository']}"

    def rows(splits: list[str]) -> Rows:
        for split in splits:
            found = datasets.load_dataset(repository, hub.get("subset"), split=split, revision=hub.get("revision"))
            yield from ((row[hub["column"]], row.get("label")) for row in found)

    begin(address)
    hint = f"try again, or put the original files into {root / source.files[0]}"
    with explained(f"{name}: {address} cannot be loaded", hint):
        train, test = _TEXTS.get(name, _images)(source, rows(hub["train"]), rows(hub["test"]))
    for check in check_counts(source, train, test):
        if check.verdict == "differs":
            raise DataError(f"{name}: {address} has other {check.what} than published: {check.note}")
    path = root / f"{name}.safetensors"
    write_cache(path, train, test, address)
    return path


class Check(NamedTuple):
    """The result of one comparison."""

    what: str
    verdict: Literal["ok", "differs", "not checked"]
    note: str


def verify(name: str, root: Path) -> list[Check]:
    """Reads a data set and compares it with what is published; unreadable files are an error."""
    source = find_source(name)
    files = [_check_file(path, str(path.relative_to(root)), source.checksums) for path in source.found(root)]
    return [*check_counts(source, *source.load(root)), *files]


def check_counts(source: Source, train: Examples, test: Examples) -> Iterator[Check]:
    """Compares the numbers of training and test examples of each class."""
    for what, y, expected in (("training", train.y, source.train_counts), ("test", test.y, source.test_counts)):
        counts = [int((y == label).sum()) for label in range(len(expected))]
        if not expected:
            yield Check(f"{what} examples", "not checked", f"{len(y):,}")
        elif counts == [*expected] and len(y) == sum(expected):
            yield Check(f"{what} examples", "ok", _by_class(counts))
        else:
            yield Check(f"{what} examples", "differs", f"{_by_class(counts)}; expected {_by_class(expected)}")


def _by_class(counts: Sequence[int]) -> str:
    classes = f"{counts[0]:,} of each class" if len(set(counts)) == 1 else f"by class {' '.join(map(str, counts))}"
    return f"{sum(counts):,}, {classes}"


def _check_file(path: Path, what: str, checksums: Mapping[str, str]) -> Check:
    if path.is_dir():
        return Check(str(Path(what).parent), "not checked", "no checksums of its files are published")
    if path.suffix == ".safetensors":
        intact, source = check_cache(path)
        return Check(what, "ok" if intact else "differs", f"{'as' if intact else 'not as'} fetched from {source}")
    found, expected, content = _md5(path.read_bytes()).hexdigest(), checksums.get(path.name), checksums.get(path.stem)
    if found == expected:
        return Check(what, "ok", f"MD5 {found}")
    if path.suffix == ".gz" and content is not None and _md5(unpack(path, LARGEST)).hexdigest() == content:
        return Check(what, "ok", f"packed anew, content MD5 {content}")
    if expected is None:
        return Check(what, "not checked", f"MD5 {found}, none is published")
    return Check(what, "differs", f"MD5 {found}, expected {expected}")
