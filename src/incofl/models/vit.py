"""Vision transformers (Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021), as in the InCo paper.

Parameter names equal timm's, so its checkpoints load. All blocks have one shape: layer splitting keeps the first ones,
width splitting whole heads and single channels of the stream and of each perceptron.
"""

import math

import torch
from torch import Tensor, nn

from incofl.errors import ConfigError
from incofl.layout import Axis, Layout
from incofl.models.transformer import MLP_RATIO, Block, transformer_layout

NORM_EPS = 1e-6  # timm's


class PatchEmbed(nn.Module):
    """Cuts images into square patches and makes a token of each."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, patches, dim)."""
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """Tokens of patches and a class token, positions added, equal blocks, a linear head on the class token.

    Unless ``head_dim`` and ``hidden`` say otherwise, the heads share the stream and perceptrons are four times as wide.
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
            *[Block(dim, heads, head_dim or dim // heads, hidden or MLP_RATIO * dim, NORM_EPS) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, classes)
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns class logits."""
        tokens = self.patch_embed(x)
        stream = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(stream))[:, 0])


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
    """One residual stream through all blocks."""
    stream = Axis("stream", model.head.in_features)
    token = (None, None, stream)
    return transformer_layout(
        model, stream, {"cls_token": token, "pos_embed": token, "patch_embed.proj": (stream, None)}
    )
