"""Data sets as tensors, their partition over clients, and batches."""

from incofl.data.batches import EVAL_BATCH, eval_batches, local_batches
from incofl.data.dataset import AsStored, Data, Examples, Pipeline, as_examples
from incofl.data.partition import VirtualPartition, make_partition, natural_partition
from incofl.data.pipeline import ImagePipeline, ImageViews, Texts, Tokens
from incofl.data.source import Shape, Source, View, source_of
from incofl.data.sources import DATASETS, find_source

__all__ = [
    "DATASETS",
    "EVAL_BATCH",
    "AsStored",
    "Data",
    "Examples",
    "ImagePipeline",
    "ImageViews",
    "Pipeline",
    "Shape",
    "Source",
    "Texts",
    "Tokens",
    "View",
    "VirtualPartition",
    "as_examples",
    "eval_batches",
    "find_source",
    "local_batches",
    "make_partition",
    "natural_partition",
    "source_of",
]
