"""Checks that a data set is what was published: sizes, class counts, checksums."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from incofl.data import find_source
from incofl.data.cache import check_cache, unpack
from incofl.data.dataset import Examples
from incofl.data.source import Source

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
