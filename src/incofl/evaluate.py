"""The evaluation of a model, and its batch-norm statistics as they are measured before one."""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from incofl.client import Batch, Computing, changing_buffers
from incofl.layout import frozen_norms
from incofl.task import CLASSIFICATION, Score, Task
from incofl.tensors import Inputs, Tensors, call


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    state: Tensors,
    batches: Iterable[Batch],
    task: Task = CLASSIFICATION,
    computing: Computing = nullcontext,
) -> Score:
    """The totals of the task's metrics over all examples; no partial batch is dropped."""
    model.load_state_dict(state)
    model.eval()
    score = Score()
    for x, y in batches:
        with computing():
            output = call(model, x)
        score += task.score(tree_map_only(Tensor, _without_bf16, output), y)
    return score


@torch.no_grad()
def measure_buffers(
    model: nn.Module, state: Tensors, batches: Iterable[Inputs], computing: Computing = nullcontext
) -> Tensors:
    """Batch-norm statistics of a model as it is evaluated: plain means over the batches."""
    model.load_state_dict(state)
    model.eval()
    fixed, kind = frozen_norms(model).values(), nn.modules.batchnorm._BatchNorm
    momenta = {m: m.momentum for m in model.modules() if isinstance(m, kind) and m not in fixed}
    for norm in momenta:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for x in batches:
        with computing():
            call(model, x)
    for norm, momentum in momenta.items():
        norm.momentum = momentum
    return {name: buffer.cpu().clone() for name, buffer in changing_buffers(model, state).items()}


def _without_bf16(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x  # which numpy, in somebody's metric, does not know
