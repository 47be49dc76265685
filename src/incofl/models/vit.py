"""Vision transformers (Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021), as in the InCo paper.

Parameter names equal timm's, so its checkpoints load. All blocks have one shape: layer splitting keeps the first ones,
width splitting whole heads and single channels of the stream and of each perceptron.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from incofl.errors import ConfigError
from incofl.layout import Axes, Axis, Layout

MLP_RATIO = 4  # hidden channels of a perceptron for each channel of the stream
NORM_EPS = 1e-6  # timm's
Shape = tuple[int, ...]


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


class Block(nn.Module):
    """Attention and perceptron, each on the normalised stream and added to it."""

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, heads, head_dim)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = nn.Sequential(OrderedDict(fc1=nn.Linear(dim, hidden), act=nn.GELU(), fc2=nn.Linear(hidden, dim)))

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = x + self.attn(self.norm1(x), mask, causal)
        return x + self.mlp(self.norm2(x))


class SharedExit(nn.Module):
    """One classifier for all exits: a token of its own attends to the class tokens of the exits so far.

    Sizes are those of ReeFL: heads of 2 channels, a narrow perceptron.
    """

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.block = Block(dim, 8, 2, math.ceil(1.35 * dim), NORM_EPS)
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, classes)
        _initialise(self)
        nn.init.trunc_normal_(self.token, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        return self.head(self.norm(self.block(stream)[:, 0]))


class ExitPosition(nn.Module):
    """What an exit adds to its class token, so that the shared classifier can tell the exits apart."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, dim))
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, token: Tensor) -> Tensor:
        return token + self.position


class VisionTransformer(nn.Module):
    """Tokens of patches and a class token, positions added, equal blocks, a linear head on the class token.

    The heads share the stream, and perceptrons are four times as wide. A model of another ``width`` has more heads, or
    fewer.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        width: float = 1.0,
        depth: int = 12,
        dim: int = 384,
        heads: int = 6,
        patch: int = 0,
    ) -> None:
        super().__init__()
        channels, *sides = shape
        patch = patch or default_patch(shape)
        check_sizes(shape, patch, dim, heads)
        head_dim, heads = dim // heads, math.ceil(width * heads)
        dim = heads * head_dim
        self.grid = (sides[0] // patch, sides[1] // patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + math.prod(self.grid), dim))
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Conv2d(channels, dim, patch, stride=patch)))
        sizes = dim, heads, head_dim, MLP_RATIO * dim
        self.blocks = nn.Sequential(*[Block(*sizes, NORM_EPS) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, classes)
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        _initialise(self)
        self.exit_positions: tuple[int, ...] = ()  # after how many blocks, if a classifier is shared by exits

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        stream = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.pos_embed
        if self.exit_positions:
            return self._from_exits(stream)
        return self.head(self.norm(self.blocks(stream))[:, 0])

    def _from_exits(self, stream: Tensor) -> Tensor | list[Tensor]:
        """The logits of all exits that are held in training, of the last one in evaluation."""
        seen: list[Tensor] = []
        places = dict(zip(self.exit_positions, self.exits, strict=True))
        for number, block in enumerate(self.blocks, start=1):
            stream = block(stream)
            if (place := places.get(number)) is not None and not isinstance(place, nn.Identity):
                seen.append(place(stream[:, 0]))
        last = [len(seen)] if not self.training else range(1, 1 + len(seen))
        logits = [self.shared(torch.stack(seen[:number], dim=1)) for number in last]
        return logits if self.training else logits[0]

    def add_shared_exit(self, positions: tuple[int, ...]) -> Layout:
        """Replaces norm and head by one classifier that exits after some blocks share, and returns the new layout."""
        old, dim = self.layout(), self.head.in_features
        classes = old.named_axes["classes"]
        self.shared, self.exit_positions = SharedExit(dim, self.head.out_features), positions
        self.exits = nn.ModuleList(ExitPosition(dim) for _ in positions)
        self.norm, self.head = nn.Identity(), nn.Identity()  # type: ignore[assignment]  # which are not called
        axes = {name: axis for name, axis in old.axes.items() if name in self.state_dict()}
        exits = {f"exits.{number}": position for number, position in enumerate(positions)}
        axes |= {"shared.head.weight": (classes, None), "shared.head.bias": (classes,)}
        return Layout.of(self, axes, old.stages, old.shallow, exits, old.closing)

    def layout(self) -> Layout:
        """One residual stream through all blocks."""
        stream = Axis("stream", self.head.in_features)
        token = (None, None, stream)
        others: dict[str, Axes] = {"cls_token": token, "pos_embed": token, "patch_embed.proj": (stream, None)}
        return transformer_layout(self, stream, others)


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def default_patch(shape: Shape) -> int:
    """16 for large images; for small ones an eighth of their side, or what comes next below and divides it."""
    side = math.gcd(*shape[1:])
    return 16 if side >= 128 else max(patch for patch in _divisors(side) if patch <= max(1, side // 8))


def check_sizes(shape: Shape, patch: int, dim: int, heads: int) -> None:
    """Refuses patches that do not fill an image and heads that do not share a stream."""
    if dim % heads:
        raise ConfigError(f"model.dim: got {dim}, expected a multiple of model.heads = {heads}")
    _, height, width = shape
    if patch not in (fitting := _divisors(math.gcd(height, width))):
        expected = f"what divides them: {', '.join(map(str, fitting))}; or another data.side"
        raise ConfigError(f"model.patch: got {patch} for images of {height} x {width}, expected {expected}")


def _divisors(side: int) -> list[int]:
    return [patch for patch in range(1, side + 1) if side % patch == 0]


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
        hidden = Axis(f"{name}.mlp", len(block.get_parameter("mlp.fc1.bias")))
        axes |= {f"{name}.attn.qkv": (stacked, stream), f"{name}.attn.proj": (stream, heads)}
        axes |= {f"{name}.mlp.fc1": (hidden, stream), f"{name}.mlp.fc2": (stream, hidden)}
        axes |= {f"{name}.norm1": (stream,), f"{name}.norm2": (stream,)}
    shallow = {f"{name}.norm2.weight": f"{name}.norm1.weight" for name in blocks}
    last = ("attn.proj.weight", "attn.proj.bias", "mlp.fc2.weight", "mlp.fc2.bias")
    return Layout.of(model, axes, [blocks], shallow, closing=[f"{name}.{key}" for name in blocks for key in last])
