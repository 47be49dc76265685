"""Small models that are a residual stream through equal blocks: a perceptron, stacked LSTMs, a text transformer.

A client that holds only the first blocks has a complete network, and width splitting narrows one stream. In texts,
token 0 is padding where a text has one class, and does not change its logits. Where every position has a class of its
own, a position sees itself and what is before it.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from incofl.errors import ConfigError
from incofl.layout import Axes, Axis, Layout
from incofl.models.vit import MLP_RATIO, Block, Shape, transformer_layout

PADDING = 0
NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class ResidualBlock(nn.Module):
    """x + W2 relu(W1 norm(x))."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(width)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(functional.relu(self.fc1(self.norm(x))))


class ResidualMlp(nn.Module):
    """A linear stem on the flattened image, equal residual blocks, a linear head; layer norm keeps no statistics."""

    def __init__(
        self, shape: Shape, classes: int, width: float = 1.0, norm: Literal["batch", "layer"] = "batch"
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ConfigError(f"model.options.norm: got {norm!r}, expected one of {', '.join(NORMS)}")
        hidden = math.ceil(32 * width)
        self.stem = nn.Linear(math.prod(shape), hidden)
        self.blocks = nn.Sequential(*[ResidualBlock(hidden, NORMS[norm]) for _ in range(6)])
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x.flatten(1))))

    def layout(self) -> Layout:
        """One stream, and an inner width per block."""
        stream = Axis("stream", self.stem.out_features)
        layers: dict[str, Axes] = {"stem": (stream, None)}
        blocks = [f"blocks.{number}" for number in range(len(self.blocks))]
        for block in blocks:
            inner = Axis(f"{block}.inner", stream.size)
            layers |= {f"{block}.norm": (stream,), f"{block}.fc1": (inner, stream), f"{block}.fc2": (stream, inner)}
        closing = dict.fromkeys([f"{block}.fc2.{key}" for block in blocks for key in ("weight", "bias")], slice(None))
        return _layout(self, stream, layers, blocks, closing)


class LstmBlock(nn.Module):
    """x + LSTM(x), from the first position to the last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class TextModel(nn.Module, ABC):
    """What models of texts have in common: feature vectors of all positions, then a linear head."""

    sequence: bool
    head: nn.Linear

    @abstractmethod
    def positions(self, x: Tensor) -> Tensor:
        """Returns the feature vector of every position, (B, length, dim)."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns class logits of tokens (B, length): of every position (B, classes, length), or (B, classes).

        The features of a text are the mean over the positions without padding; zeros for an empty text.
        """
        out = self.positions(x)
        if self.sequence:
            return self.head(out).transpose(1, 2)
        held = (x != PADDING).unsqueeze(2)
        return self.head(out.where(held, 0).sum(1) / held.sum(1).clamp(min=1))


class StackedLstm(TextModel):
    """An embedding, LSTM layers that add to it, a linear head."""

    def __init__(
        self, vocabulary: int, classes: int, sequence: bool, width: float = 1.0, depth: int = 4, dim: int = 128
    ) -> None:
        super().__init__()
        self.sequence, dim = sequence, math.ceil(width * dim)
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.Sequential(*[LstmBlock(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def positions(self, x: Tensor) -> Tensor:
        return self.layers(self.embedding(x))

    def layout(self) -> Layout:
        """One stream, which embedding and hidden states are; gates are four copies of it, one after the other."""
        stream = Axis("stream", self.head.in_features)
        gates = Axis("stream", stream.size, copies=4)
        blocks = [f"layers.{number}" for number in range(len(self.layers))]
        layers: dict[str, Axes] = {f"{block}.lstm": (gates, stream) for block in blocks}
        added = slice(2 * stream.size, 3 * stream.size)  # of the gates (i, f, g, o), what an LSTM adds to its state
        keys = [f"{matrix}_{side}_l0" for matrix in ("weight", "bias") for side in ("ih", "hh")]
        closing = {f"{block}.lstm.{key}": added for block in blocks for key in keys}
        return _layout(self, stream, layers | {"embedding": (None, stream)}, blocks, closing)


class TextTransformer(TextModel):
    """Embedding and learned positions, pre-norm blocks, a final norm, a linear head."""

    def __init__(
        self,
        shape: Shape,
        vocabulary: int,
        classes: int,
        sequence: bool,
        width: float = 1.0,
        depth: int = 6,
        dim: int = 128,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.sequence, dim, (length,) = sequence, math.ceil(width * dim), shape
        if dim % heads:
            raise ConfigError(f"model.heads: got {heads}, expected a divisor of the model's width, {dim}")
        self.embedding = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dim // heads, MLP_RATIO * dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)  # as GPT-2: small compared with what the blocks add

    def positions(self, x: Tensor) -> Tensor:
        out: Tensor = self.embedding(x) + self.position.weight[: x.shape[1]]
        mask = None if self.sequence else (x != PADDING)[:, None, None, :]
        for block in self.blocks:
            out = block(out, mask, causal=self.sequence)
        return self.norm(out)

    def layout(self) -> Layout:
        """One stream through all blocks; the rows of tokens and positions are always whole."""
        stream = Axis("stream", self.head.in_features)
        return transformer_layout(self, stream, {"embedding": (None, stream), "position": (None, stream)})


def _layout(
    model: nn.Module, stream: Axis, layers: dict[str, Axes], blocks: list[str], closing: dict[str, slice]
) -> Layout:
    """Adds the head; the shallow counterparts of a block's matrices are those of the first block."""
    classes = Axis("classes", len(model.get_parameter("head.bias")), fixed=True)
    layout = Layout.of(model, layers | {"head": (classes, stream)}, [blocks], {}, closing=closing)
    return dataclasses.replace(layout, shallow=layout.across_blocks)
