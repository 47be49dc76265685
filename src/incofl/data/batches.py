"""Batches of a client: permutations of its indices into the one tensor that holds the data set."""

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from incofl.client import Batch, LocalSettings
from incofl.data.dataset import Examples, Pipeline

EVAL_BATCH = 512


def local_batches(
    examples: Examples, indices: Tensor, pipeline: Pipeline, settings: LocalSettings, generator: Generator
) -> Iterator[Batch]:
    """All batches of a client's turn, every epoch in a new order, augmented.

    With ``drop_last`` the last, partial batch is left out unless it is the only one. A last batch of a single example
    is always left out: batch normalisation has no variance of one example.
    """
    size = settings.batch_size
    for _ in range(settings.epochs):
        order = indices[torch.randperm(len(indices), generator=generator)]
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            if len(batch) == 1 or (settings.drop_last and start > 0 and len(batch) < size):
                continue
            chosen = examples.pick(batch)
            yield pipeline.train(chosen.x, generator), as_target(chosen.y)


def eval_batches(examples: Examples, pipeline: Pipeline, size: int = EVAL_BATCH) -> Iterator[Batch]:
    """The whole test set in order."""
    for start in range(0, len(examples), size):
        part = examples.pick(slice(start, start + size))
        yield pipeline.test(part.x), as_target(part.y)


def as_target(y: Tensor) -> Tensor:
    """Targets as losses take them: whole numbers as int64, others as they are."""
    return y if y.is_floating_point() else y.long()
