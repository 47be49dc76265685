"""How stored examples become a model's input, a batch at a time: the paper's pipelines as tensor code."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

from incofl.client import Batch, LocalSettings
from incofl.data.dataset import Examples, Pipeline
from incofl.tensors import Inputs, map_inputs

EVAL_BATCH = 512


@dataclass(frozen=True)
class ImagePipeline(Pipeline):
    """Normalisation, and the augmentation of training batches; images are stored as bytes (B, C, H, W)."""

    maximum: int = 255  # the stored value that means white
    mean: tuple[float, ...] = ()  # per channel, of values in [0, 1]; empty: no normalisation
    std: tuple[float, ...] = ()  # per channel
    resize: int | None = None  # side to which images are resized bilinearly
    pad: int = 0  # random crop after padding with black by this number of pixels
    flip: bool = False  # random horizontal flip
    cutout: int = 0  # side of a square set to the channel mean, at a random centre, clipped at the border
    crop: bool = False  # cut out a random part of each training image and resize that (to the side ``resize``)
    channels: int | None = None  # repeat grey images in this number of channels

    def test(self, x: Tensor) -> Tensor:
        out = x.to(torch.get_default_dtype()).div_(self.maximum)
        if self.resize is not None and out.shape[-2:] != (self.resize, self.resize):
            out = functional.interpolate(out, size=self.resize, mode="bilinear", align_corners=False)
        return self._finish(out)

    @property
    def formula(self) -> str:
        steps = f"`examples / {self.maximum}`"
        if self.resize is not None:
            steps += f", resized to {self.resize} x {self.resize} pixels (bilinear)"
        if self.mean:
            steps += f", then `(x - mean) / std` of each channel, mean {list(self.mean)}, std {list(self.std)}"
        return steps if self.channels is None else f"{steps}, repeated in {self.channels} channels"

    @property
    def draws(self) -> bool:
        return bool(self.pad or self.flip or self.crop or self.cutout)

    def train(self, x: Tensor, generator: Generator) -> Tensor:
        if self.pad:
            x = random_crop(x, self.pad, generator)
        if self.flip:
            mirrored = torch.rand(len(x), generator=generator) < 0.5
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)
        if self.crop:
            whole = x.to(torch.get_default_dtype()).div_(self.maximum)
            out = self._finish(random_resized_crop(whole, self.resize or x.shape[-1], generator))
        else:
            out = self.test(x)
        return cutout(out, self.cutout, generator) if self.cutout else out

    def _finish(self, x: Tensor) -> Tensor:
        if self.mean:
            x = x.sub_(torch.tensor(self.mean).view(-1, 1, 1)).div_(torch.tensor(self.std).view(-1, 1, 1))
        return x if self.channels is None else x.expand(-1, self.channels, -1, -1)


@dataclass(frozen=True)
class SignalPipeline(Pipeline):
    """Normalisation of signals (B, C, T), each by its own mean and standard deviation."""

    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]  # per channel

    @property
    def formula(self) -> str:
        return f"`(examples - mean) / std` of each channel, mean {list(self.mean)}, std {list(self.std)}"

    def test(self, x: Tensor) -> Tensor:
        out = x.to(torch.get_default_dtype()) - torch.tensor(self.mean).view(-1, 1)
        return out.div_(torch.tensor(self.std).view(-1, 1))


@dataclass(frozen=True)
class Tokens(Pipeline):
    """Texts reach a model as whole numbers."""

    formula = "numbers of tokens, as they are"

    def test(self, x: Inputs) -> Inputs:
        return map_inputs(lambda tokens: tokens.long(), x)


def local_batches(
    examples: Examples, indices: Tensor, pipeline: Pipeline, settings: LocalSettings, generator: Generator
) -> Iterator[Batch]:
    """Yields all batches of a client's turn, every epoch in a new order, augmented."""
    for batch in local_indices(indices, settings, generator):
        chosen = examples.pick(batch)
        yield pipeline.train(chosen.x, generator), as_target(chosen.y)


def local_indices(indices: Tensor, settings: LocalSettings, generator: Generator) -> Iterator[Tensor]:
    """Yields which examples are in each batch of a client's turn."""
    size = settings.batch_size
    for _ in range(settings.epochs):
        order = indices[torch.randperm(len(indices), generator=generator)]
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            # A first batch is kept, however small; a single example is not: batch norm finds no variance in it.
            if len(batch) > 1 and not (settings.drop_last and start > 0 and len(batch) < size):
                yield batch


def eval_batches(examples: Examples, pipeline: Pipeline, size: int = EVAL_BATCH) -> Iterator[Batch]:
    """Yields the whole test set in order."""
    for start in range(0, len(examples), size):
        part = examples.pick(slice(start, start + size))
        yield pipeline.test(part.x), as_target(part.y)


def as_target(y: Tensor) -> Tensor:
    """Targets as losses want them: classes are whole numbers."""
    return y if y.is_floating_point() else y.long()


def random_crop(x: Tensor, pad: int, generator: Generator) -> Tensor:
    """Pads every image with zeros and cuts its original size out at a random place."""
    height, width = x.shape[-2:]
    windows = functional.pad(x, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
    # windows: (B, C, 2 pad + 1, 2 pad + 1, H, W), a view; only the chosen windows are copied.
    top, left = torch.randint(2 * pad + 1, (2, len(x)), generator=generator)
    return windows[torch.arange(len(x)), :, top, left]


def random_resized_crop(x: Tensor, side: int, generator: Generator) -> Tensor:
    """Cuts a random part out of every image, 8 to 100 % of its area and 3:4 to 4:3 in shape, at this side."""
    batch, channels = x.shape[:2]
    area, ratio, across, down = torch.rand(4, batch, generator=generator)
    area, ratio = 0.08 + 0.92 * area, ((2 * ratio - 1) * math.log(4 / 3)).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)  # as shares of the sides
    # In coordinates from -1 to 1, a part of width w is centred anywhere within 1 - w of the middle.
    theta = torch.zeros(batch, 2, 3)
    theta[:, 0, 0], theta[:, 0, 2] = width, (1 - width) * (2 * across - 1)
    theta[:, 1, 1], theta[:, 1, 2] = height, (1 - height) * (2 * down - 1)
    grid = functional.affine_grid(theta.to(x.dtype), [batch, channels, side, side], align_corners=False)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def cutout(x: Tensor, side: int, generator: Generator) -> Tensor:
    """Sets a square of each normalised image to 0, its channel mean; the centre may lie at the border."""

    def band(length: int) -> Tensor:
        centre, place = torch.randint(length, (len(x), 1), generator=generator), torch.arange(length)
        return (place >= centre - side // 2) & (place < centre + side // 2)  # (B, length)

    rows, columns = band(x.shape[-2]), band(x.shape[-1])
    return x.masked_fill_((rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1), 0.0)
