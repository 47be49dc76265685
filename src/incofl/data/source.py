"""What is known of a data set before its files are read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from incofl.data.dataset import Data, Examples, Pipeline
from incofl.data.manifests import Published
from incofl.errors import DataError

# Shape of one example as a model gets it: channels, height and width of an image; the length of a text.
Shape = tuple[int, ...]


@dataclass(frozen=True)
class View:
    """How a model sees the examples of a data set: the shape of one, and the pipeline that makes it."""

    shape: Shape
    pipeline: Pipeline


@dataclass(frozen=True)
class Source:
    """What is known of a data set before its files are read.

    Attributes:
        summary: one line for ``incofl list datasets``.
        classes: number of classes.
        view: how a model sees it; for images at a side in pixels, or as they are (``None``).
        load: reads training and test examples from the folder ``data.root``.
        vocabulary: number of tokens, for texts; 0: not a text.
        model: the model that suits it when the config does not say.
        width: the width of that model.
        stem: the stem of a ResNet that suits it.
        sequence: whether every position of a text has a class of its own: the token that follows.
        natural: whether its examples say who made them, so that it has natural clients.
        labelled: whether every example has one class, by which a partition can be skewed.
        clients: number of its natural clients, if known.
        published: what its files are checked against.
        decode: for texts, an example as people read it.
    """

    summary: str
    classes: int
    view: Callable[[int | None], View]
    load: Callable[[Path], tuple[Examples, Examples]]
    vocabulary: int = 0
    model: str = "resnet26"
    width: float = 1.0
    stem: Literal["imagenet", "small"] = "imagenet"
    sequence: bool = False
    natural: bool = False
    labelled: bool = True
    clients: int | None = None
    published: Published = field(default_factory=Published)
    decode: Callable[[Tensor], str] | None = None

    @property
    def partition(self) -> Literal["natural", "dirichlet", "iid"]:
        """The partition that suits it."""
        return "natural" if self.natural else "dirichlet" if self.labelled else "iid"


def source_of(data: Data) -> Source:
    """What is known of data that are in memory."""
    image = isinstance(data.shape, tuple) and len(data.shape) == 3

    def view(side: int | None) -> View:
        if side is not None and not (image and data.shape[1:] == (side, side)):
            raise DataError(f"data.side: got {side}, expected none: resize your own data before, they are {data.shape}")
        return View(data.shape, data.pipeline)

    return Source(
        summary="your own data",
        classes=data.classes or 0,
        view=view,
        load=lambda root: (data.train, data.test),
        vocabulary=data.vocabulary,
        model="resnet26" if image else "",
        width=0.25,
        stem="small",
        sequence=data.sequence,
        natural=data.natural_clients is not None,
        labelled=data.train.y.dim() == 1 and not data.train.y.is_floating_point(),
        clients=data.natural_clients,
    )
