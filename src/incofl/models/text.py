"""Models of texts: stacked LSTMs, and a small transformer. Both are a residual stream through equal blocks.

So a client that holds only the first blocks has a network of its own, and width splitting narrows one stream. Token 0
is padding where a text has one class, and does not change its logits. Where every position has a class of its own, a
position sees itself and what is before it.
"""

from torch import Tensor, nn
from torch.nn import functional

from incofl.layout import Axes, Axis, Layout

PADDING = 0
MLP_RATIO = 4  # inner width of a transformer block, of that of the stream


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


class Attention(nn.Module):
    """Self-attention; how many heads there are follows from the weights, so that it can be narrowed by heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attends to the positions of a mask (B, 1, 1, length), or without one to those before."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, -1, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        attended: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return attended


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        """W2 gelu(W1 x)."""
        out: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return out


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each with a norm before it and a residual around it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, MLP_RATIO * dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The stream with both branches added."""
        x = x + self.attn(self.norm1(x), mask)
        out: Tensor = x + self.mlp(self.norm2(x))
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
        self.blocks = nn.ModuleList(TransformerBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)  # as GPT-2: small beside what the blocks add

    def positions(self, x: Tensor) -> Tensor:
        """The normalised stream."""
        out: Tensor = self.embedding(x) + self.position.weight[: x.shape[1]]
        mask = None if self.sequence else (x != PADDING)[:, None, None, :]
        for block in self.blocks:
            out = block(out, mask)
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
    """One stream, and in each block heads and inner channels of its own.

    In each block the first norm is the shallow counterpart of the second, as in the paper's released code for ViTs.
    """
    stream = Axis("stream", model.head.in_features)
    axes = _ends(model, stream) | {"position.weight": (None, stream), "norm.weight": (stream,), "norm.bias": (stream,)}
    blocks = [f"blocks.{number}" for number in range(len(model.blocks))]
    shallow: dict[str, str] = {}
    for name in blocks:
        block = model.get_submodule(name)
        assert isinstance(block, TransformerBlock)
        unit = block.attn.head_dim
        heads = Axis(f"{name}.heads", stream.size // unit, unit=unit)
        three = Axis(heads.name, heads.size, copies=3, unit=unit)  # queries, keys, values
        inner = Axis(f"{name}.mlp", block.mlp.fc1.out_features)
        for part, outputs, inputs in (
            ("attn.qkv", three, stream),
            ("attn.proj", stream, heads),
            ("mlp.fc1", inner, stream),
            ("mlp.fc2", stream, inner),
        ):
            axes |= {f"{name}.{part}.weight": (outputs, inputs), f"{name}.{part}.bias": (outputs,)}
        for norm in ("norm1", "norm2"):
            axes |= {f"{name}.{norm}.weight": (stream,), f"{name}.{norm}.bias": (stream,)}
        shallow[f"{name}.norm2.weight"] = f"{name}.norm1.weight"
    return Layout.of(model, axes, [blocks], shallow)


def _ends(model: TextModel, stream: Axis) -> dict[str, Axes]:
    """The axes of embedding and head; the rows of tokens are never left out."""
    classes = Axis("classes", model.head.out_features, fixed=True)
    return {"embedding.weight": (None, stream), "head.weight": (classes, stream), "head.bias": (classes,)}
