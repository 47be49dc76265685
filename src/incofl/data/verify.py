"""Checks that a data set is what was published: sizes, class counts, checksums."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from incofl.data.cache import check_cache, unpack
from incofl.data.dataset import Examples
from incofl.data.source import Source
from incofl.data.sources import find_source

LARGEST = 10**9  # bytes that a packed file may unpack to


class Check(NamedTuple):
    """The result of one comparison."""

    what: str
    verdict: Literal["ok", "differs", "not checked"]
    note: str


def verify(name: str, root: Path) -> list[Check]:
    """Reads a data set and compares it with what is published; unreadable files are an error."""
    source = find_source(name)
    files = [_check_file(path, str(path.relative_to(root)), source.checksums) for path in source.found(root)]
    return check_counts(source, *source.load(root)) + files


def check_counts(source: Source, train: Examples, test: Examples) -> list[Check]:
    """Compares the numbers of training and test examples of each class."""
    return [
        _check_part("training examples", train.y, source.train_counts),
        _check_part("test examples", test.y, source.test_counts),
    ]


def _check_part(what: str, labels: Tensor, expected: Sequence[int]) -> Check:
    if not expected:
        return Check(what, "not checked", f"{len(labels):,}")
    counts = [int((labels == label).sum()) for label in range(len(expected))]
    if counts == [*expected] and len(labels) == sum(expected):
        return Check(what, "ok", _by_class(counts))
    return Check(what, "differs", f"{_by_class(counts)}; expected {_by_class(expected)}")


def _by_class(counts: Sequence[int]) -> str:
    classes = f"{counts[0]:,} of each class" if len(set(counts)) == 1 else f"by class {' '.join(map(str, counts))}"
    return f"{sum(counts):,}, {classes}"


def _check_file(path: Path, what: str, checksums: Mapping[str, str]) -> Check:
    if path.is_dir():
        return Check(str(Path(what).parent), "not checked", "no checksums of its files are published")
    if path.suffix == ".safetensors":
        intact, source = check_cache(path)
        return Check(what, "ok" if intact else "differs", f"{'as' if intact else 'not as'} fetched from {source}")
    found, expected, content = _md5(path.read_bytes()), checksums.get(path.name), checksums.get(path.stem)
    if found == expected:
        return Check(what, "ok", f"MD5 {found}")
    if path.suffix == ".gz" and content is not None and _md5(unpack(path, LARGEST)) == content:
        return Check(what, "ok", f"packed anew, content MD5 {content}")
    if expected is None:
        return Check(what, "not checked", f"MD5 {found}, none is published")
    return Check(what, "differs", f"MD5 {found}, expected {expected}")


def _md5(content: bytes) -> str:
    """Computes the checksum that data sets are published with; it reveals damage, not malice."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
