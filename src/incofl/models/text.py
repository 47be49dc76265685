"""Models of texts: stacked LSTMs, and a small transformer. Both are a residual stream through equal blocks.

A client that holds only the first blocks has a complete network, and width splitting narrows one stream. Token 0 is
padding where a text has one class, and does not change its logits. Where every position has a class of its own, a
position sees itself and what is before it.
"""

from torch import Tensor, nn

from incofl.layout import Axes, Axis, Layout
from incofl.models.vit import MLP_RATIO, Block, transformer_layout

PADDING = 0


class LstmBlock(nn.Module):
    """x + LSTM(x), from the first position to the last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class TextModel(nn.Module):
    """What both models have in common: feature vectors of all positions, then a linear head."""

    sequence: bool
    head: nn.Linear

    def positions(self, x: Tensor) -> Tensor:
        """Returns the feature vector of every position, (B, length, dim)."""
        raise NotImplementedError

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

    def __init__(self, depth: int, dim: int, vocabulary: int, classes: int, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.Sequential(*[LstmBlock(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def positions(self, x: Tensor) -> Tensor:
        return self.layers(self.embedding(x))


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
            nn.init.normal_(table.weight, std=0.02)  # as GPT-2: small compared with what the blocks add

    def positions(self, x: Tensor) -> Tensor:
        out: Tensor = self.embedding(x) + self.position.weight[: x.shape[1]]
        mask = None if self.sequence else (x != PADDING)[:, None, None, :]
        for block in self.blocks:
            out = block(out, mask, causal=self.sequence)
        return self.norm(out)


def lstm_layout(model: StackedLstm) -> Layout:
    """One stream, which embedding and hidden states are; gates are four copies of it, one after the other.

    The shallow counterparts of a layer's matrices are those of the first layer.
    """
    dim = model.head.in_features
    stream, gates = Axis("stream", dim), Axis("stream", dim, copies=4)
    blocks = [f"layers.{number}" for number in range(len(model.layers))]
    layers: dict[str, Axes] = {f"{block}.lstm": (gates, stream) for block in blocks}
    layers |= {"embedding": (None, stream), "head": (Axis("classes", model.head.out_features, fixed=True), stream)}
    matrices = ("lstm.weight_ih_l0", "lstm.weight_hh_l0")
    shallow = {f"{block}.{name}": f"{blocks[0]}.{name}" for block in blocks[1:] for name in matrices}
    return Layout.of(model, layers, [blocks], shallow)


def text_transformer_layout(model: TextTransformer) -> Layout:
    """One stream through all blocks; the rows of tokens and positions are always whole."""
    stream = Axis("stream", model.head.in_features)
    return transformer_layout(model, stream, {"embedding": (None, stream), "position": (None, stream)})
