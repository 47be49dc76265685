"""How stored examples become a model's input, a batch at a time: the paper's pipelines as tensor code."""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

from incofl.data.source import Shape, View


@dataclass(frozen=True)
class ImagePipeline:
    """Normalisation, and the augmentation of training batches.

    Attributes:
        maximum: the stored value that means white.
        mean: per channel, of values in [0, 1]; empty: no normalisation.
        std: per channel.
        resize: side to which images are resized bilinearly.
        pad: random crop after padding with black by so many pixels.
        flip: random horizontal flip.
        cutout: side of a square set to the channel mean, at a random centre, clipped at the border.
        crop: cut out a random part of each training image and resize that (``resize`` says to which side).
        channels: repeat grey images in so many channels.
    """

    maximum: int = 255
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: int | None = None
    pad: int = 0
    flip: bool = False
    cutout: int = 0
    crop: bool = False
    channels: int | None = None

    def test(self, x: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) to float input."""
        out = x.to(torch.get_default_dtype()).div_(self.maximum)
        if self.resize is not None and out.shape[-2:] != (self.resize, self.resize):
            out = functional.interpolate(out, size=self.resize, mode="bilinear", align_corners=False)
        return self._finish(out)

    def train(self, x: Tensor, generator: Generator) -> Tensor:
        """As ``test``, with every image augmented by its own random numbers."""
        if self.pad:
            x = random_crop(x, self.pad, generator)
        if self.flip:
            mirrored = torch.rand(len(x), generator=generator) < 0.5
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)
        if self.crop:
            assert self.resize is not None
            part = x.to(torch.get_default_dtype()).div_(self.maximum)
            out = self._finish(random_resized_crop(part, self.resize, generator))
        else:
            out = self.test(x)
        return cutout(out, self.cutout, generator) if self.cutout else out

    def _finish(self, x: Tensor) -> Tensor:
        if self.mean:
            x = x.sub_(torch.tensor(self.mean).view(-1, 1, 1)).div_(torch.tensor(self.std).view(-1, 1, 1))
        return x if self.channels is None else x.expand(-1, self.channels, -1, -1)


@dataclass(frozen=True)
class ImageViews:
    """Images as they are, or at another side: the pipelines of the paper's ResNets and of its ViTs.

    Attributes:
        shape: of an image as it is.
        native: how it reaches a model then.
        large: how it does at another side, which takes the place of ``resize``.
    """

    shape: Shape
    native: ImagePipeline
    large: ImagePipeline

    def __call__(self, side: int | None) -> View:
        """The view at a side in pixels."""
        if side is None or side == self.shape[1]:
            return View(self.shape, self.native)
        channels = self.large.channels or self.shape[0]
        return View((channels, side, side), dataclasses.replace(self.large, resize=side))


@dataclass(frozen=True)
class Tokens:
    """Texts reach a model as whole numbers, as they are."""

    def test(self, x: Tensor) -> Tensor:
        """Tokens (B, length)."""
        return x.long()

    def train(self, x: Tensor, generator: Generator) -> Tensor:
        """The same."""
        return x.long()


@dataclass(frozen=True)
class Texts:
    """Texts of one length; there is one way to see them."""

    length: int

    def __call__(self, side: int | None) -> View:
        """The view; a side is a matter of images."""
        return View((self.length,), Tokens())


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
    height, width = x.shape[-2:]
    cy = torch.randint(height, (len(x), 1), generator=generator)
    cx = torch.randint(width, (len(x), 1), generator=generator)
    rows, columns = torch.arange(height), torch.arange(width)
    inside_rows = (rows >= cy - side // 2) & (rows < cy + side // 2)
    inside_columns = (columns >= cx - side // 2) & (columns < cx + side // 2)
    square = inside_rows.unsqueeze(2) & inside_columns.unsqueeze(1)  # (B, H, W)
    return x.masked_fill_(square.unsqueeze(1), 0.0)
