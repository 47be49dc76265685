"""The block that all transformers here are made of, with timm's parameter names, and its axes."""

from torch import Tensor, nn
from torch.nn import functional

from incofl.layout import Axes, Axis, Layout

MLP_RATIO = 4  # hidden channels of a perceptron for each channel of the stream


class Attention(nn.Module):
    """Attention of every token to others; the number of heads follows from the weights, so heads can be cut."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Computes softmax(q k' / sqrt(head_dim)) v in each head, and projects all heads.

        Tokens attend to all, to those of a mask (B, 1, 1, length), or if ``causal`` to themselves and those before.
        """
        qkv = self.qkv(x).unflatten(2, (3, -1, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, head, token, channel)
        heads = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.proj(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A perceptron with one hidden layer, the same for every token."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Computes W2 gelu(W1 x)."""
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention and perceptron, each on the normalised stream and added to it."""

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, heads, head_dim)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Adds both to the stream."""
        x = x + self.attn(self.norm1(x), mask, causal)
        return x + self.mlp(self.norm2(x))


def transformer_layout(model: nn.Module, stream: Axis, axes: dict[str, Axes]) -> Layout:
    """The layout of a model with one stream through ``blocks``, ``norm`` and ``head``.

    Each block has axes of its own for the heads and for the perceptron. The counterpart of the second norm's scale is
    that of the first norm, as in the paper's released code for ViTs. ``axes`` are those of all other layers.
    """
    classes = Axis("classes", len(model.get_parameter("head.bias")), fixed=True)
    axes = axes | {"norm": (stream,), "head": (classes, stream)}
    blocks = {f"blocks.{name}": block for name, block in model.get_submodule("blocks").named_children()}
    for name, block in blocks.items():
        assert isinstance(block, Block)
        unit = block.attn.head_dim
        heads = Axis(f"{name}.heads", block.attn.proj.in_features // unit, unit=unit)
        stacked = Axis(heads.name, heads.size, copies=3, unit=unit)  # queries, keys and values
        hidden = Axis(f"{name}.mlp", block.mlp.fc1.out_features)
        axes |= {f"{name}.attn.qkv": (stacked, stream), f"{name}.attn.proj": (stream, heads)}
        axes |= {f"{name}.mlp.fc1": (hidden, stream), f"{name}.mlp.fc2": (stream, hidden)}
        axes |= {f"{name}.norm1": (stream,), f"{name}.norm2": (stream,)}
    shallow = {f"{name}.norm2.weight": f"{name}.norm1.weight" for name in blocks}
    return Layout.of(model, axes, [blocks], shallow)
