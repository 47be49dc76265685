"""Data sets as tensors, their partition over clients, and batches."""

from incofl.data.dataset import Data, Examples, Pipeline, as_examples
from incofl.data.partition import VirtualPartition, make_partition, natural_partition
from incofl.data.pipeline import EVAL_BATCH, ImagePipeline, Tokens, eval_batches, local_batches
from incofl.data.source import Source, source_of
from incofl.data.sources import DATASETS, find_source

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
