"""Whether the files of a data set are what was published: sizes, class counts, checksums."""

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from incofl.data.dataset import Examples
from incofl.data.sources import find_source
from incofl.errors import DataError


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    verdict: Literal["ok", "differs", "not checked"]
    note: str


def verify(name: str, root: Path) -> list[Check]:
    """Reads everything: what cannot be read is an error, what is not as published a check that differs."""
    source = find_source(name)
    train, test = source.load(root)
    published = source.published
    checks = [
        _counted("training examples", train, published.train),
        _counted("test examples", test, published.test),
    ]
    known = [published.checksums, _recorded(name, root)]
    archives = [root / file for file in published.checksums if (root / file).is_file()]
    for path in dict.fromkeys([*published.found(root), *archives]):
        what = str((path.parent if path.is_dir() else path).relative_to(root))
        if path.is_dir():
            checks.append(Check(what, "not checked", "no checksums of its files are published"))
        else:
            expected = {sums[path.name] for sums in known if path.name in sums}
            checks.append(_summed(what, path, expected, published.checksums.get(path.stem)))
    return checks


def _counted(what: str, examples: Examples, expected: tuple[int, ...]) -> Check:
    if examples.y.dim() > 1 or not expected:
        return Check(what, "not checked", f"{len(examples):,}")
    counts = torch.bincount(examples.y, minlength=len(expected)).tolist()
    note = f"{len(examples):,}, {_by_class(counts)}"
    if counts == list(expected):
        return Check(what, "ok", note)
    return Check(what, "differs", f"{note}; expected {sum(expected):,}, {_by_class(list(expected))}")


def _by_class(counts: list[int]) -> str:
    return f"{counts[0]:,} of each class" if len(set(counts)) == 1 else f"by class {' '.join(map(str, counts))}"


def _summed(what: str, path: Path, expected: set[str], content: str | None) -> Check:
    """Of a packed file that is not the published one, its ``content`` may be."""
    own = file_md5(path)
    if own in expected:
        return Check(what, "ok", f"MD5 {own}")
    if path.suffix == ".gz" and content is not None and _md5(gzip.decompress(path.read_bytes())) == content:
        return Check(what, "ok", f"packed anew, content MD5 {content}")
    if expected:
        return Check(what, "differs", f"MD5 {own}, expected {' or '.join(sorted(expected))}")
    return Check(what, "not checked", f"MD5 {own}, none is published")


def file_md5(path: Path) -> str:
    """The checksum that data sets are published with; it tells damage, not malice."""
    return _md5(path.read_bytes())


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def record_path(name: str, root: Path) -> Path:
    """Where ``incofl data fetch`` leaves the checksums of what it wrote."""
    return root / f"{name}.fetched.json"


def _recorded(name: str, root: Path) -> dict[str, str]:
    path = record_path(name, root)
    if not path.is_file():
        return {}
    try:
        recorded: dict[str, str] = json.loads(path.read_text())["md5"]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path}: damaged record of what was fetched; delete it, or fetch the data set again") from None
    return recorded
