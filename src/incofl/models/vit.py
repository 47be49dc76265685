"""Vision transformers (Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021), as in the InCo paper.

Parameter names equal timm's, so its checkpoints load. All blocks have one shape: layer splitting keeps the first ones,
width splitting whole heads and single channels of the stream and of each perceptron.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from incofl.errors import ConfigError
from incofl.layout import Axes, Axis, Layout

MLP_RATIO = 4
NORM_EPS = 1e-6  # timm's


class Attention(nn.Module):
    """Attention of every token to all; how many heads there are follows from the weights, so that heads can be cut."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """softmax(q k' / sqrt(head_dim)) v in each head, and what the heads say together."""
        q, k, v = (
            self.qkv(x).unflatten(2, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        )  # (batch, head, token, channel)
        heads = functional.scaled_dot_product_attention(q, k, v)
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

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, heads, head_dim)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = Mlp(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The stream with both added."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchEmbed(nn.Module):
    """Cuts images into square patches and makes a token of each."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, patches, dim)."""
        tokens: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return tokens


class VisionTransformer(nn.Module):
    """Tokens of patches and a class token, positions added, equal blocks, a linear head on the class token.

    Args:
        shape: channels, height and width of an image.
        classes: how many.
        patch: side of a patch in pixels.
        dim: width of the residual stream.
        depth: blocks.
        heads: of each attention.
        head_dim: channels of a head; left out, the heads share the stream.
        hidden: of each perceptron; left out, four times the stream.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (3, 224, 224),
        classes: int = 10,
        patch: int = 16,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        head_dim: int | None = None,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.grid = (height // patch, width // patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + math.prod(self.grid), dim))
        self.patch_embed = PatchEmbed(channels, patch, dim)
        self.blocks = nn.Sequential(
            *[Block(dim, heads, head_dim or dim // heads, hidden or MLP_RATIO * dim) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, classes)
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def features(self, x: Tensor) -> Tensor:
        """The class token after the last block, before the head."""
        tokens = self.patch_embed(x)
        stream = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1) + self.pos_embed
        out: Tensor = self.norm(self.blocks(stream))[:, 0]
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        logits: Tensor = self.head(self.features(x))
        return logits


def default_patch(shape: tuple[int, ...]) -> int:
    """16 for large images; for small ones an eighth of their side, or what comes next below and divides it."""
    side = math.gcd(*shape[1:])
    return 16 if side >= 128 else max(patch for patch in _divisors(side) if patch <= max(1, side // 8))


def check_sizes(shape: tuple[int, ...], patch: int, dim: int, heads: int) -> None:
    """Refuses patches that do not fill an image and heads that do not share a stream."""
    if dim % heads:
        raise ConfigError(f"model.dim: got {dim}, expected a multiple of model.heads = {heads}")
    side = math.gcd(*shape[1:])
    if side % patch:
        fitting = ", ".join(map(str, _divisors(side)))
        raise ConfigError(
            f"model.patch: got {patch} for images of {shape[1]} x {shape[2]}, expected what divides them: {fitting}; "
            "or another data.side"
        )


def _divisors(side: int) -> list[int]:
    return [patch for patch in range(1, side + 1) if side % patch == 0]


def vit_layout(model: VisionTransformer) -> Layout:
    """Axes: one residual stream; in each block the heads, three times in the queries, keys and values, and the MLP.

    The shallow counterpart of the second norm's scale is that of the first norm of the same block, in every block, as
    in the paper's released code.
    """
    stream = Axis("stream", model.norm.weight.shape[0])
    classes = Axis("classes", model.head.out_features, fixed=True)
    axes: dict[str, Axes] = {
        "cls_token": (None, None, stream),
        "pos_embed": (None, None, stream),
        "patch_embed.proj.weight": (stream, None, None, None),
        "patch_embed.proj.bias": (stream,),
        "norm.weight": (stream,),
        "norm.bias": (stream,),
        "head.weight": (classes, stream),
        "head.bias": (classes,),
    }
    shallow: dict[str, str] = {}

    def linear(name: str, outputs: Axis, inputs: Axis) -> None:
        axes[f"{name}.weight"], axes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    for name, block in model.blocks.named_children():
        assert isinstance(block, Block)
        prefix, head_dim = f"blocks.{name}", block.attn.head_dim
        size = block.attn.proj.in_features // head_dim
        heads = Axis(f"{prefix}.heads", size, unit=head_dim)
        hidden = Axis(f"{prefix}.mlp", block.mlp.fc1.out_features)
        for norm in ("norm1", "norm2"):
            axes[f"{prefix}.{norm}.weight"] = axes[f"{prefix}.{norm}.bias"] = (stream,)
        linear(f"{prefix}.attn.qkv", Axis(heads.name, size, copies=3, unit=head_dim), stream)
        linear(f"{prefix}.attn.proj", stream, heads)
        linear(f"{prefix}.mlp.fc1", hidden, stream)
        linear(f"{prefix}.mlp.fc2", stream, hidden)
        shallow[f"{prefix}.norm2.weight"] = f"{prefix}.norm1.weight"
    return Layout.of(model, axes, [[f"blocks.{b}" for b in range(len(model.blocks))]], shallow)
