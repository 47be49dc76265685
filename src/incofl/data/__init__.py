"""Data sets as tensors, their partition over clients, and batches."""

from incofl.data.batches import eval_batches, local_batches
from incofl.data.images import DATASETS, Dataset, Images, find_source, load_dataset
from incofl.data.partition import VirtualPartition, make_partition
from incofl.data.pipeline import Pipeline

__all__ = [
    "DATASETS",
    "Dataset",
    "Images",
    "Pipeline",
    "VirtualPartition",
    "eval_batches",
    "find_source",
    "load_dataset",
    "local_batches",
    "make_partition",
]
