"""Data sets as tensors, their partition over clients, and batches."""

import dataclasses
import tomllib
from pathlib import Path

from incofl.data.dataset import Data, Examples, Pipeline, as_examples
from incofl.data.images import IMAGES
from incofl.data.partition import VirtualPartition, make_partition, natural_partition
from incofl.data.pipeline import EVAL_BATCH, ImagePipeline, Tokens, eval_batches, local_batches
from incofl.data.source import Source, source_of
from incofl.data.texts import TEXTS
from incofl.errors import DataError, nearest

__all__ = [
    "DATASETS",
    "EVAL_BATCH",
    "Data",
    "Examples",
    "ImagePipeline",
    "Pipeline",
    "Source",
    "Tokens",
    "VirtualPartition",
    "as_examples",
    "eval_batches",
    "find_source",
    "local_batches",
    "make_partition",
    "natural_partition",
    "source_of",
]

_PUBLISHED = tomllib.loads(Path(__file__).with_name("manifests.toml").read_text(encoding="utf-8"))
DATASETS = {source.name: dataclasses.replace(source, **_PUBLISHED[source.name]) for source in (*IMAGES, *TEXTS)}


def find_source(name: str) -> Source:
    """Returns the data set of that name; an unknown one is refused with the nearest name."""
    if name not in DATASETS:
        raise DataError(f"data.name: got {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]
