"""Models of texts: stacked LSTMs, and a small transformer. Both are a residual stream through equal blocks.

So a client that holds only the first blocks has a network of its own, and width splitting narrows one stream. Token 0
is padding where a text has one class, and does not change its logits. Where every position has a class of its own, a
position sees itself and what is before it.
"""

from torch import Tensor, nn

from incofl.layout import Axes, Axis, Layout
from incofl.models.transformer import MLP_RATIO, Block, block_axes

PADDING = 0


class LstmBlock(nn.Module):
    """x + LSTM(x), from the first position to the last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The hidden states added to the input."""
        out: Tensor = x + self.lstm(x)[0]
        return out


class TextModel(nn.Module):
    """What both have in common: features of positions or of texts, then a linear head."""

    sequence: bool
    head: nn.Linear

    def positions(self, x: Tensor) -> Tensor:
        """The feature vector of every position, (B, length, dim)."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """Before the head: of every position, or the mean over those that are no padding."""
        out = self.positions(x)
        if self.sequence:
            return out
        held = (x != PADDING).unsqueeze(2)
        return out.where(held, 0).sum(1) / held.sum(1).clamp(min=1)  # of an empty text, zeros

    def forward(self, x: Tensor) -> Tensor:
        """Class logits of tokens (B, length): (B, classes), or (B, classes, length)."""
        logits: Tensor = self.head(self.features(x))
        return logits.transpose(1, 2) if self.sequence else logits


class StackedLstm(TextModel):
    """An embedding, LSTM layers that add to it, a linear head."""

    def __init__(self, depth: int, dim: int, vocabulary: int, classes: int, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.Sequential(*[LstmBlock(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def positions(self, x: Tensor) -> Tensor:
        """The embedding and all hidden states, added up."""
        out: Tensor = self.layers(self.embedding(x))
        return out


class TextTransformer(TextModel):
    """Embedding and learned positions, pre-norm blocks, a final norm, a linear head."""

    def __init__(
        self, depth: int, dim: int, heads: int, vocabulary: int, length: int, classes: int, sequence: bool
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dim // heads, MLP_RATIO * dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)  # as GPT-2: small beside what the blocks add

    def positions(self, x: Tensor) -> Tensor:
        """The normalised stream."""
        out: Tensor = self.embedding(x) + self.position.weight[: x.shape[1]]
        mask = None if self.sequence else (x != PADDING)[:, None, None, :]
        for block in self.blocks:
            out = block(out, mask, causal=self.sequence)
        return self.norm(out)  # type: ignore[no-any-return]


def lstm_layout(model: StackedLstm) -> Layout:
    """One stream, which embedding and hidden states are; gates are four copies of it, one after the other.

    The shallow counterparts of a layer's matrices are those of the first layer.
    """
    dim = model.head.in_features
    stream, gates = Axis("stream", dim), Axis("stream", dim, copies=4)
    axes = _ends(model, stream)
    layers = [f"layers.{number}" for number in range(len(model.layers))]
    shallow: dict[str, str] = {}
    for layer in layers:
        for side in ("ih", "hh"):
            axes[f"{layer}.lstm.weight_{side}_l0"] = (gates, stream)
            axes[f"{layer}.lstm.bias_{side}_l0"] = (gates,)
            if layer != layers[0]:
                shallow[f"{layer}.lstm.weight_{side}_l0"] = f"{layers[0]}.lstm.weight_{side}_l0"
    return Layout.of(model, axes, [layers], shallow)


def transformer_layout(model: TextTransformer) -> Layout:
    """One stream through all blocks."""
    stream = Axis("stream", model.head.in_features)
    axes = _ends(model, stream) | {"position.weight": (None, stream), "norm.weight": (stream,), "norm.bias": (stream,)}
    blocks = {f"blocks.{name}": block for name, block in model.blocks.named_children()}
    of_blocks, shallow = block_axes(blocks.items(), stream)
    return Layout.of(model, axes | of_blocks, [blocks], shallow)


def _ends(model: TextModel, stream: Axis) -> dict[str, Axes]:
    """The axes of embedding and head; the rows of tokens are never left out."""
    classes = Axis("classes", model.head.out_features, fixed=True)
    return {"embedding.weight": (None, stream), "head.weight": (classes, stream), "head.bias": (classes,)}
