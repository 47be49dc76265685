"""Gaussian noise: on uploads, to test how robust a method is, and on deep layers, as a baseline for InCo.

Both are measured in standard deviations of what they disturb, over the elements of a tensor that moved, as in the paper
("noise with standard deviations following the gradients"); its code for them is not published.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch
from annotated_types import Ge

from incofl.client import Upload
from incofl.options import options
from incofl.seeds import Purpose, torch_rng
from incofl.tensors import Tensors, norm
from incofl.transform import Context, Record, Stateless


@options("noise")
class UploadNoise:
    """Gaussian noise, as a share of the standard deviation of each tensor; buffers and extra uploads get none."""

    uploads: Annotated[float, Ge(0)] = 0.0  # to the update that every client sends, whatever the method; 0: none
    deep: Annotated[float, Ge(0)] = 1.0  # to the aggregated update of the deep layers, by methods called ``NAME+noise``

    @property
    def idle(self) -> bool:
        """Whether uploads stay as they are, so that nobody need look at them."""
        return not self.uploads

    def __call__(self, upload: Upload, context: Context) -> Upload:
        rng = torch_rng(context.seed, Purpose.UPLOAD_NOISE, context.round, upload.client)
        for name in sorted(upload.update) if self.uploads else ():
            add_noise_(upload.update[name], self.uploads, rng)
        return upload


@dataclass(frozen=True)
class DeepNoise(Stateless):
    """Noise on the aggregated update of the layers that InCo would mix; records the norms of both."""

    options: UploadNoise = field(default_factory=UploadNoise)
    name = "noise"
    needs_shared_model = True

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        rng, record = torch_rng(context.seed, Purpose.DEEP_NOISE, context.round), Record()
        for name in sorted(context.layout.shallow.keys() & update.keys()):
            before = norm(update[name])
            record[name] = {"norm_deep": before, "norm_change": add_noise_(update[name], self.options.deep, rng)}
        return update, state, record


def add_noise_(tensor: torch.Tensor, share: float, rng: torch.Generator) -> float:
    """Adds noise with ``share`` of the standard deviation of what moved, in place; returns its Frobenius norm.

    What is exactly zero did not move and gets no noise: of a 3x3 kernel on 1x1 feature maps only the centre is trained.
    """
    moved, wide = tensor != 0, tensor.to(torch.float64, copy=True)
    count = max(int(moved.sum()), 1)
    mean = float(wide.reshape(len(wide), -1).sum(1).sum()) / count  # row by row first, as in norm
    deviation = norm(wide.sub_(mean).mul_(moved)) / math.sqrt(count)
    noise = torch.randn(tensor.shape, generator=rng).to(tensor).mul_(share * deviation).mul_(moved)
    tensor.add_(noise)
    return norm(noise)
