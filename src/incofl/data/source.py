"""What is known of a data set before its files are read."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from incofl.data.cache import Pair, read_cache
from incofl.data.dataset import Data, Pipeline, explained
from incofl.data.pipeline import ImagePipeline
from incofl.data.tokenizers import find_tokenizer
from incofl.errors import DataError
from incofl.imports import load_attribute

Reader = Callable[["Source", Path], Pair]  # of the original files, given the first one that is found


@dataclass(frozen=True)
class Source:
    """What is known of a data set before its files are read; those of the table are in manifests.toml."""

    name: str
    shape: Any  # of an example as a model gets it: (channels, height, width), (channels, steps), (length,); or of each
    pipeline: Pipeline
    read: str = ""  # the module of this package and the name of its ``Reader``; empty: embedded here
    classes: int = 10
    large: ImagePipeline | None = None  # the pipeline of its images at another side
    vocabulary: int = 0  # number of tokens, for texts; 0: not a text
    model: str = "resnet26"  # the model that suits it, with its width and, for a ResNet, its stem
    width: float = 1.0
    stem: Literal["imagenet", "small"] = "imagenet"
    sequence: bool = False  # whether every position of a text has a class of its own: the token that follows
    tokenizer: str = ""  # a file of words, or the tokenizer of a folder or of the Hub; empty: its most frequent words
    labelled: bool = True  # whether every example has one class, by which a partition can be skewed
    cached: bool = True  # whether the cached copy has it as it is read here
    clients: int | None = None  # number of natural clients, if its examples say who made them; 0: not known before

    # What is published of it; all of it may be unknown.
    summary: str = ""  # one line for lists of data sets
    files: Sequence[str] = ()  # patterns of its original files under data.root; none: it is embedded
    names: Sequence[str] = ()  # names of the classes; none: numbers
    train_counts: Sequence[int] = ()  # training examples of each class
    test_counts: Sequence[int] = ()  # test examples of each class
    hub: Mapping[str, Any] = field(default_factory=dict)  # repository on the Hugging Face Hub, column, splits, revision
    checksums: Mapping[str, str] = field(default_factory=dict)  # MD5 by file name

    @property
    def partition(self) -> Literal["natural", "dirichlet", "iid"]:
        """The partition that suits it."""
        return "natural" if self.clients is not None else "dirichlet" if self.labelled else "iid"

    def view(self, side: int | None) -> "Source":
        """The data set with images of this side in pixels; ``None``: as they are."""
        if side is None or tuple(self.shape)[1:] == (side, side):
            return self
        if self.large is None:
            raise DataError(f"data.side: got {side}, expected none: resize your own data before, they are {self.shape}")
        shape = (self.large.channels or self.shape[0], side, side)
        return dataclasses.replace(self, shape=shape, pipeline=dataclasses.replace(self.large, resize=side))

    def read_as(self, tokenizer: str | None, length: int | None, target: Literal["label", "next"]) -> "Source":
        """The data set with other tokens, with more or fewer of them, or with the next token as the class of each."""
        asked = {"tokenizer": tokenizer, "length": length, "target": None if target == "label" else target}
        changed = {key: value for key, value in asked.items() if value is not None}
        if not changed:
            return self
        if not self.vocabulary or not self.read or self.sequence:
            key, value = next(iter(changed.items()))
            raise DataError(f"data.{key}: got {value!r}, expected none: {self.name} has no texts of words")
        size = find_tokenizer(tokenizer).size if tokenizer else self.vocabulary
        made = dataclasses.replace(
            self, vocabulary=size, shape=(length or self.shape[0],), tokenizer=tokenizer or "", cached=False
        )
        if target == "label":
            return made
        return dataclasses.replace(made, classes=size, sequence=True, labelled=False, names=())

    @property
    def inputs(self) -> dict[str, Tensor] | None:
        """One example without values, where it is more than a tensor of the shape."""
        if not self.tokenizer or self.sequence or not find_tokenizer(self.tokenizer).masked:
            return None
        one = torch.empty(self.shape, dtype=torch.long, device="meta")
        return {"input_ids": one, "attention_mask": one}

    def found(self, root: Path) -> list[Path]:
        """Those of its files that exist, the cached copy first."""
        patterns = [*([f"{self.name}.safetensors"] if self.cached else []), *self.files]
        return [path for pattern in patterns for path in sorted(root.glob(pattern))]

    def load(self, root: Path) -> Pair:
        """Reads training and test examples: the cached copy where there is one, and the original files elsewhere."""
        if not self.read:
            return read_cache(Path(__file__).with_name(f"{self.name}.safetensors"), self.classes)
        if not (found := self.found(root)):
            fetch = f", or: incofl data fetch {self.name}" if self.hub and self.cached else ""
            raise DataError(
                f"{self.name}: no {' or '.join(self.files)} in {root.absolute()}; set data.root to the folder that "
                f"holds it{fetch}"
            )
        if found[0].suffix == ".safetensors":
            return read_cache(found[0], self.classes)
        read: Reader = load_attribute(f"incofl.data.{self.read}", self.name)
        with explained(f"{found[0]}: not readable as {self.name}"):
            return read(self, found[0])

    def original(self, root: Path) -> Path:
        """The first of its original files."""
        made = dataclasses.replace(self, cached=False)
        if not (found := made.found(root)):
            raise DataError(f"{self.name}: no {' or '.join(self.files)} in {root.absolute()}, which is read for this")
        return found[0]


def source_of(data: Data) -> Source:
    """What is known of data that are in memory."""
    image = isinstance(data.train.x, Tensor) and len(data.train.shape) == 3
    return Source(
        data.name,
        data.train.shape,
        data.pipeline,
        classes=data.classes or 0,
        vocabulary=data.vocabulary,
        model="resnet26" if image else "",
        width=0.25,
        stem="small",
        sequence=data.sequence,
        labelled=data.train.y.dim() == 1 and not data.train.y.is_floating_point(),
        clients=data.natural_clients,
    )
