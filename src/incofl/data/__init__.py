"""Data sets as tensors, their partition over clients, and batches."""

import dataclasses
import tomllib
from pathlib import Path

from incofl.data.dataset import Data, Examples, as_examples
from incofl.data.images import IMAGES
from incofl.data.signals import SIGNALS
from incofl.data.source import Source, source_of
from incofl.data.texts import TEXTS
from incofl.errors import DataError, nearest

__all__ = ["DATASETS", "Data", "Examples", "Source", "as_examples", "find_source", "source_of"]

_PUBLISHED = tomllib.loads(Path(__file__).with_name("manifests.toml").read_text(encoding="utf-8"))
_SOURCES = (*IMAGES, *TEXTS, *SIGNALS)
DATASETS = {source.name: dataclasses.replace(source, **_PUBLISHED[source.name]) for source in _SOURCES}


def find_source(name: str) -> Source:
    """Returns the data set of that name; an unknown one is refused with the nearest name."""
    if name not in DATASETS:
        raise DataError(f"data.name: got {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]
