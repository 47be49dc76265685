"""Data sets as tensors, their partition over clients, and batches."""

import tomllib
from pathlib import Path
from typing import Any

from incofl.data.dataset import Data, Examples, Pipeline, as_examples
from incofl.data.pipeline import ImagePipeline, SignalPipeline, Tokens
from incofl.data.source import Source, source_of
from incofl.errors import DataError, nearest

__all__ = ["DATASETS", "Data", "Examples", "Source", "as_examples", "find_source", "source_of"]


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def _declared(name: str, table: dict[str, Any]) -> Source:
    """The data set that a table of the manifests declares."""
    made: dict[str, Any] = {"pipeline": Tokens() if "vocabulary" in table else Pipeline()}
    kind = ImagePipeline if len(table["shape"]) == 3 else SignalPipeline
    made |= {key: kind(**_tuples(table[key])) for key in ("pipeline", "large") if key in table}
    return Source(name, **_tuples(table) | made)


_MANIFESTS = tomllib.loads(Path(__file__).with_name("manifests.toml").read_text(encoding="utf-8"))
DATASETS = {name: _declared(name, table) for name, table in _MANIFESTS.items()}


def find_source(name: str) -> Source:
    """Returns the data set of that name; an unknown one is refused with the nearest name."""
    if name not in DATASETS:
        raise DataError(f"data.name: got {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]
