"""A picture of a data set: examples of each class, and who holds how many of which class."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from incofl.data.dataset import Data
from incofl.data.pipeline import ImagePipeline

MOST_CLIENTS = 100  # as many fit side by side
NUMBERED = 25  # up to as many clients, every cell has room for its number
SAMPLES = 8
ROW = 0.42  # inches: the height of a class
COLOUR = "#0072B2"  # of Okabe and Ito: distinguishable with any colour vision, like the shades of one hue


def draw(data: Data, partition: Sequence[Tensor], names: Sequence[str], title: str) -> Figure:
    """Draws samples on the left and clients on the right, a row for each class; above them, examples per client.

    Examples without one class each, such as texts in which the next token is predicted, have the upper part only.
    """
    shown, classes = partition[:MOST_CLIENTS], data.classes or 0
    classified = data.train.y.dim() == 1
    pictured = classified and isinstance(data.pipeline, ImagePipeline)
    heights = [1.0, ROW * classes][: 1 + classified]
    widths = [SAMPLES * ROW, float(np.clip(len(shown) * ROW, 5.0, 10.0))][not pictured :]
    figure = Figure(figsize=(sum(widths) + 1.8, sum(heights) + 1.2), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(len(heights), len(widths), squeeze=False, height_ratios=heights, width_ratios=widths)
    sizes, last, samples = grid[0, -1], grid[-1, -1], grid[-1, 0]
    sizes.bar(range(len(shown)), [len(own) for own in shown], color=COLOUR, width=0.8, zorder=2)
    sizes.set(ylabel="examples", xlim=(-0.5, len(shown) - 0.5), xticks=[])
    sizes.spines[["top", "right"]].set_visible(False)
    sizes.grid(axis="y", alpha=0.3)
    if classified:
        counts = np.stack([torch.bincount(data.train.y[own], minlength=classes).numpy() for own in shown], 1)
        shades = last.imshow(counts, cmap="Blues", vmin=0, vmax=max(1, counts.max()), aspect="auto")
        figure.colorbar(shades, ax=last, label="examples of the class", pad=0.01)
        for label, client in np.argwhere(counts) if len(shown) <= NUMBERED else ():
            colour = "white" if counts[label, client] > 0.6 * counts.max() else "black"
            last.text(client, label, str(counts[label, client]), ha="center", va="center", fontsize=6.5, color=colour)
        last.set(yticks=[] if pictured else range(classes), yticklabels=[] if pictured else names)
    if pictured:
        grid[0, 0].set_axis_off()
        samples.imshow(mosaic(data), extent=(0, SAMPLES, classes, 0), aspect="auto", interpolation="nearest")
        samples.set(xticks=[], xlabel="training examples", yticks=np.arange(classes) + 0.5, yticklabels=names)
        samples.spines[:].set_visible(False)
    part = "" if len(shown) == len(partition) else f" (the first {len(shown)} of {len(partition):,})"
    last.set(xlabel=f"client{part}", xticks=range(0, len(shown), 1 if len(shown) <= NUMBERED else 10))
    for axes in grid.flat:
        axes.tick_params(labelsize=8)
    return figure


def mosaic(data: Data) -> np.ndarray:
    """Puts the first examples of each class side by side, a row for each class, with white lines between them."""
    assert isinstance(data.pipeline, ImagePipeline)
    classes, side = data.classes or 0, data.train.x.shape[2]
    tile = side + max(1, side // 16)
    tiles = torch.ones(classes, SAMPLES, 3, tile, tile)
    for label in range(classes):
        own = data.train.x[data.train.y == label][:SAMPLES]
        tiles[label, : len(own), :, :side, :side] = own / data.pipeline.maximum  # grey in all channels
    return tiles.permute(0, 3, 1, 4, 2).reshape(classes * tile, SAMPLES * tile, 3).numpy()
