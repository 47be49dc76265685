"""What a data set is: labelled examples as tensors, and the way they reach a model."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Generator, Tensor

from incofl.data.manifests import Published

# Of one example as a model gets it: channels, height and width of an image; the length of a text.
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Examples:
    """Labelled examples.

    Attributes:
        x: images as uint8 (examples, channels, height, width), or texts as tokens (examples, length).
        y: a class per example, or one per position (examples, length) where the next token is to be told; of any
            whole-number type.
        groups: who made each example (a speaking role), for data sets that know; from 0 on.
    """

    x: Tensor
    y: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def pick(self, indices: Tensor | slice) -> "Examples":
        """Some of them."""
        return Examples(self.x[indices], self.y[indices], None if self.groups is None else self.groups[indices])


class Pipeline(Protocol):
    """How stored examples become a model's input, a batch at a time."""

    def test(self, x: Tensor) -> Tensor:
        """A batch as it is evaluated."""
        ...

    def train(self, x: Tensor, generator: Generator) -> Tensor:
        """A batch for training, augmented by random numbers of its own."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A data set in memory and the way its examples reach a model."""

    name: str
    train: Examples
    test: Examples
    classes: int
    pipeline: Pipeline

    def fingerprint(self) -> str:
        """A digest of the training data, so that a run is never resumed on other data."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (self.train.x, self.train.y):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class View:
    """How a model sees the examples of a data set: the shape of one, and the pipeline that gives it."""

    shape: Shape
    pipeline: Pipeline


@dataclass(frozen=True)
class Source:
    """What is known of a data set before its files are read.

    Attributes:
        summary: one line for ``incofl list datasets``.
        classes: how many.
        view: how a model sees it; for images at a side in pixels, or as they are (``None``).
        load: reads training and test examples from the folder ``data.root``.
        vocabulary: of texts, how many tokens there are; 0: not a text.
        model: the model that suits it when the config does not say.
        width: its width, likewise.
        stem: of ResNets, likewise.
        sequence: whether every position of a text has a class of its own: the token that follows.
        natural: whether its examples say who made them, so that it comes in parts of its own.
        published: what its files are checked against.
        decode: of texts, an example as it is read.
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
    published: Published = field(default_factory=Published)
    decode: Callable[[Tensor], str] | None = None
