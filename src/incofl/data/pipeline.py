"""How stored images become a model's input, a batch at a time: the paper's pipelines as tensor code."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Pipeline:
    """Normalisation, and the augmentation of training batches.

    Attributes:
        maximum: the stored value that means white.
        mean: per channel, of values in [0, 1]; empty: no normalisation.
        std: per channel.
        resize: side to which images are resized bilinearly.
        pad: random crop after padding with black by so many pixels.
        flip: random horizontal flip.
        cutout: side of a square set to the channel mean, at a random centre, clipped at the border.
    """

    maximum: int = 255
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: int | None = None
    pad: int = 0
    flip: bool = False
    cutout: int = 0

    def test(self, x: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) to float input."""
        out = x.to(torch.get_default_dtype()).div_(self.maximum)
        if self.resize is not None:
            out = functional.interpolate(out, size=self.resize, mode="bilinear", align_corners=False)
        if self.mean:
            out.sub_(torch.tensor(self.mean).view(-1, 1, 1)).div_(torch.tensor(self.std).view(-1, 1, 1))
        return out

    def train(self, x: Tensor, generator: Generator) -> Tensor:
        """As ``test``, with every image augmented by its own random numbers."""
        if self.pad:
            x = random_crop(x, self.pad, generator)
        if self.flip:
            mirrored = torch.rand(len(x), generator=generator) < 0.5
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)
        out = self.test(x)
        return cutout(out, self.cutout, generator) if self.cutout else out


def random_crop(x: Tensor, pad: int, generator: Generator) -> Tensor:
    """Pads every image with zeros and cuts its original size out at a random place."""
    height, width = x.shape[-2:]
    windows = functional.pad(x, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
    # windows: (B, C, 2 pad + 1, 2 pad + 1, H, W), a view; only the chosen windows are copied.
    top, left = torch.randint(2 * pad + 1, (2, len(x)), generator=generator)
    return windows[torch.arange(len(x)), :, top, left]


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
