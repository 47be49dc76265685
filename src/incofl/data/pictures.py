"""A picture of a data set: examples of each class, and who holds how many of which class."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from incofl.data.dataset import Data
from incofl.data.pipeline import ImagePipeline

MOST_CLIENTS = 100  # as many fit side by side
NUMBERED = 25  # up to as many clients, every cell has room for its number
SAMPLES = 8
ROW = 0.42  # inches: the height of a class
GAP = 0.35
COLOUR = "#0072B2"  # of Okabe and Ito: distinguishable with any colour vision, like the shades of one hue


def draw(data: Data, partition: Sequence[Tensor], names: Sequence[str], title: str) -> Figure:
    """Samples on the left and clients on the right, a row for each class; above them, examples per client.

    Examples without one class each, such as texts whose next tokens are to be told, have the upper part only.
    """
    shown = partition[:MOST_CLIENTS]
    classified = data.train.y.dim() == 1
    pictured = classified and isinstance(data.pipeline, ImagePipeline)
    height = ROW * data.classes if classified else 0.0
    left = 1.1 + (SAMPLES * ROW + GAP if pictured else 0)
    width = float(np.clip(len(shown) * ROW, 5.0, 10.0))
    size = (left + width + 0.9, 0.6 + height + 1.75)
    figure = Figure(figsize=size, facecolor="white")

    def place(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        """From inches to shares of the figure."""
        return x / size[0], y / size[1], w / size[0], h / size[1]

    figure.text(0.1 / size[0], 1 - 0.2 / size[1], title, va="top", fontsize=11)
    if pictured:
        axes = figure.add_axes(place(1.1, 0.6, SAMPLES * ROW, height))
        axes.imshow(mosaic(data), extent=(0, SAMPLES, data.classes, 0), aspect="auto", interpolation="nearest")
        axes.set_xticks([])
        axes.set_xlabel("training examples", fontsize=9)
        _class_labels(axes, names, 0.5)
    if classified:
        counts = np.stack([torch.bincount(data.train.y[own], minlength=data.classes).numpy() for own in shown], 1)
        axes = figure.add_axes(place(left, 0.6, width, height))
        shades = axes.imshow(counts, cmap="Blues", vmin=0, vmax=max(1, counts.max()), aspect="auto")
        _client_labels(axes, len(shown), len(partition))
        _class_labels(axes, [""] * data.classes if pictured else names, 0)
        if len(shown) <= NUMBERED:
            for label, client in np.argwhere(counts):
                count = counts[label, client]
                colour = "white" if count > 0.6 * counts.max() else "black"
                axes.text(client, label, str(count), ha="center", va="center", fontsize=6.5, color=colour)
        bar = figure.colorbar(shades, cax=figure.add_axes(place(left + width + 0.12, 0.6, 0.12, height)))
        bar.set_label("examples of the class", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    axes = figure.add_axes(place(left, 0.6 + height + (0.12 if classified else 0), width, 1.0))
    axes.bar(range(len(shown)), [len(own) for own in shown], color=COLOUR, width=0.8)
    axes.set_xlim(-0.5, len(shown) - 0.5)
    axes.set_ylabel("examples", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if classified:
        axes.set_xticks([])
    else:
        _client_labels(axes, len(shown), len(partition))
    return figure


def mosaic(data: Data) -> np.ndarray:
    """The first examples of each class side by side, a row for each class, with white lines between them."""
    assert isinstance(data.pipeline, ImagePipeline)
    channels, side = data.train.x.shape[1], data.train.x.shape[2]
    tile = side + max(1, side // 16)
    result = np.ones((data.classes * tile, SAMPLES * tile, 3), dtype=np.float32)
    for label in range(data.classes):
        for column, at in enumerate(torch.nonzero(data.train.y == label).flatten()[:SAMPLES].tolist()):
            image = data.train.x[at].permute(1, 2, 0).expand(side, side, 3 if channels == 1 else channels)
            place = np.s_[label * tile : label * tile + side, column * tile : column * tile + side]
            result[place] = image.numpy() / data.pipeline.maximum
    return result


def _class_labels(axes: Axes, names: Sequence[str], middle: float) -> None:
    axes.set_yticks(np.arange(len(names)) + middle, names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def _client_labels(axes: Axes, shown: int, clients: int) -> None:
    axes.set_xticks(range(0, shown, 1 if shown <= NUMBERED else 10))
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("client" if shown == clients else f"client (the first {shown} of {clients:,})", fontsize=9)
