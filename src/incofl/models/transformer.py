"""The block that all transformers here are made of, with timm's parameter names, and its axes."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional

from incofl.layout import Axes, Axis

MLP_RATIO = 4  # hidden channels of a perceptron, for each of the stream


class Attention(nn.Module):
    """Attention of every token to others; how many heads there are follows from the weights, so heads can be cut."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """softmax(q k' / sqrt(head_dim)) v in each head, and what the heads say together.

        Tokens attend to all, to those of a mask (B, 1, 1, length), or, ``causal``, to themselves and those before.
        """
        qkv = self.qkv(x).unflatten(2, (3, -1, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, head, token, channel)
        heads = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        out: Tensor = self.proj(heads.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """A perceptron with one hidden layer, the same for every token."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """W2 gelu(W1 x)."""
        out: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """Attention and perceptron, each on the normalised stream and added to it."""

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, heads, head_dim)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """The stream with both added."""
        x = x + self.attn(self.norm1(x), mask, causal)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def block_axes(blocks: Iterable[tuple[str, nn.Module]], stream: Axis) -> tuple[dict[str, Axes], dict[str, str]]:
    """The axes of named blocks, and the shallow counterparts in them.

    In each block the heads, three times in queries, keys and values, and the channels of the perceptron. The
    counterpart of the second norm's scale is that of the first norm, as in the paper's released code for ViTs.
    """
    axes: dict[str, Axes] = {}
    shallow: dict[str, str] = {}
    for name, block in blocks:
        assert isinstance(block, Block)
        unit = block.attn.head_dim
        heads = Axis(f"{name}.heads", block.attn.proj.in_features // unit, unit=unit)
        stacked = Axis(heads.name, heads.size, copies=3, unit=unit)
        hidden = Axis(f"{name}.mlp", block.mlp.fc1.out_features)
        for layer, outputs, inputs in (
            ("attn.qkv", stacked, stream),
            ("attn.proj", stream, heads),
            ("mlp.fc1", hidden, stream),
            ("mlp.fc2", stream, hidden),
        ):
            axes |= {f"{name}.{layer}.weight": (outputs, inputs), f"{name}.{layer}.bias": (outputs,)}
        for norm in ("norm1", "norm2"):
            axes |= {f"{name}.{norm}.weight": (stream,), f"{name}.{norm}.bias": (stream,)}
        shallow[f"{name}.norm2.weight"] = f"{name}.norm1.weight"
    return axes, shallow
