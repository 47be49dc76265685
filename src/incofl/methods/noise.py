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
class NoiseOptions:
    """How much Gaussian noise is added, as a share of the standard deviation of each tensor.

    Attributes:
        uploads: to the update that every client sends, whatever the method; 0: none.
        deep: to the aggregated update of the deep layers, by methods called ``NAME+noise``.
    """

    uploads: Annotated[float, Ge(0)] = 0.0
    deep: Annotated[float, Ge(0)] = 1.0


@dataclass(frozen=True)
class UploadNoise:
    """Noise on the update that a client sends: a transform of uploads. Buffers and extra uploads stay as they are."""

    options: NoiseOptions = field(default_factory=NoiseOptions)

    def __call__(self, upload: Upload, context: Context) -> Upload:
        """The upload with a disturbed update, in the memory of the given one."""
        rng = torch_rng(context.seed, Purpose.UPLOAD_NOISE, context.round, upload.client)
        for name in sorted(upload.update) if self.options.uploads else ():
            add_noise_(upload.update[name], self.options.uploads, rng)
        return upload


@dataclass(frozen=True)
class DeepNoise(Stateless):
    """Noise where InCo would mix: a transform of the aggregated update of the deep layers."""

    options: NoiseOptions = field(default_factory=NoiseOptions)

    name = "noise"

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        """Disturbs the update in place and records the norms of the update and of the noise."""
        rng = torch_rng(context.seed, Purpose.DEEP_NOISE, context.round)
        record = Record()
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
