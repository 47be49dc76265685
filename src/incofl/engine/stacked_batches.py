"""The batches of clients that train side by side: step by step, each as in its own turn, padded to one size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from incofl.client import Batch
from incofl.data.pipeline import as_target, local_batches, local_indices
from incofl.engine.federation import Federation, Job
from incofl.seeds import Purpose, torch_rng
from incofl.task import IGNORED, TASKS, Task
from incofl.tensors import Inputs, map_inputs


class Declined(Exception):
    """Some clients cannot train side by side; the message says why."""


@dataclass
class Step:
    """A batch of each of the first k clients."""

    x: Inputs  # (k, B, ...)
    y: Tensor
    sizes: list[int]  # of the batches, without padding
    counts: Tensor  # what each loss is the mean of

    @property
    def mask(self) -> Tensor | None:
        """Which examples are no padding, (k, B); ``None``: all."""
        length = self.y.shape[1]
        return None if min(self.sizes) == length else torch.arange(length) < torch.tensor(self.sizes)[:, None]


def steps_of(f: Federation, jobs: Sequence[Job], parts: Sequence[Tensor]) -> Iterator[Step]:
    """The batches of all clients, step by step, each as in its own turn."""
    rngs = [torch_rng(f.seed, Purpose.TRAINING, job.round, job.client) for job in jobs]
    pipeline, examples = f.data.pipeline, f.data.train
    if pipeline.draws:
        turns = [local_batches(examples, part, pipeline, f.local, rng) for part, rng in zip(parts, rngs, strict=True)]
        while batches := [batch for turn in turns if (batch := next(turn, None)) is not None]:
            sizes = [len(y) for _, y in batches]
            full = [padded_batch(batch, max(sizes)) for batch in batches]
            yield step_of(f.task, stack_inputs([x for x, _ in full]), torch.stack([y for _, y in full]), sizes)
            turns = turns[: len(batches)]
        return
    orders = [list(local_indices(part, f.local, rng)) for part, rng in zip(parts, rngs, strict=True)]
    for number in range(max(map(len, orders))):
        chosen = [order[number] for order in orders if len(order) > number]
        sizes = list(map(len, chosen))
        length = max(sizes)
        if min(sizes) < length:
            chosen = [functional.pad(c, (0, length - len(c)), value=int(c[0])) for c in chosen]
        picked = examples.pick(torch.cat(chosen))

        def unflat(tensor: Tensor, shape: tuple[int, int] = (len(chosen), length)) -> Tensor:
            return tensor.view(*shape, *tensor.shape[1:])

        x: Inputs = map_inputs(unflat, pipeline.test(picked.x))
        yield step_of(f.task, x, unflat(as_target(picked.y)), sizes)


def padded_batch(batch: Batch, length: int) -> Batch:
    """A batch with its first example again in place of those that it lacks."""
    rows = torch.arange(length)
    rows[rows >= len(batch[1])] = 0
    return map_inputs(lambda tensor: tensor[rows], batch[0]), batch[1][rows]


def step_of(task: Task, x: Inputs, y: Tensor, sizes: list[int]) -> Step:
    """A step, with padding that counts in no loss."""
    step = Step(x, y, sizes, torch.tensor(sizes, dtype=torch.get_default_dtype()))
    if (mask := step.mask) is not None and task not in TASKS.values():
        raise Declined("batches of a task of your own have unequal sizes")
    if task.count is len:
        return step
    if mask is not None:
        step.y = y.masked_fill(~mask.view(*mask.shape, *[1] * (y.dim() - 2)), IGNORED)
    step.counts = (
        torch.tensor([task.count(own) for own in step.y])
        if task not in TASKS.values()
        else ((step.y != IGNORED).flatten(1).sum(1))
    )
    if not bool((step.counts > 0).all()):
        raise Declined("a batch has nothing to learn from")
    return step


def stack_inputs(inputs: Sequence[Any]) -> Inputs:
    """Inputs of several clients in one."""
    first = inputs[0]
    if isinstance(first, dict):
        return {name: torch.stack([x[name] for x in inputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(torch.stack(column) for column in zip(*inputs, strict=True))
    return torch.stack(list(inputs))


def count_labels(f: Federation, parts: Sequence[Tensor]) -> Tensor | None:
    """Number of each client's examples of each class; ``None`` for tasks without classes."""
    if not f.task.classes or f.data.classes is None:
        return None
    held = [f.data.train.y[part].flatten() for part in parts] if f.data.train.y.dim() > 1 else None
    y = f.data.train.y[torch.cat(list(parts))] if held is None else torch.cat(held)
    lengths = torch.tensor([len(part) for part in (held or parts)])
    owner = torch.repeat_interleave(torch.arange(len(parts)), lengths)
    known = y >= 0
    return torch.bincount((owner * f.data.classes + y)[known], minlength=len(parts) * f.data.classes).view(
        len(parts), -1
    )
