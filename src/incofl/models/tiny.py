"""A residual perceptron: small enough for tests, and one stage of equal blocks, so that layer splitting applies."""

import math

from torch import Tensor, nn
from torch.nn import functional

from incofl.layout import Axes, Axis, Layout


class ResidualBlock(nn.Module):
    """x + W2 relu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(functional.relu(self.fc1(self.norm(x))))


class ResidualMlp(nn.Module):
    """A linear stem on the flattened image, equal residual blocks, a linear head."""

    def __init__(self, depth: int, width: float, inputs: int, classes: int) -> None:
        super().__init__()
        hidden = math.ceil(32 * width)
        self.stem = nn.Linear(inputs, hidden)
        self.blocks = nn.Sequential(*[ResidualBlock(hidden) for _ in range(depth)])
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x.flatten(1))))


def mlp_layout(model: ResidualMlp) -> Layout:
    """One residual stream, an inner width per block; counterparts are the same weights of the first block."""
    stream = Axis("stream", model.stem.out_features)
    classes = Axis("classes", model.head.out_features, fixed=True)
    layers: dict[str, Axes] = {"stem": (stream, None), "head": (classes, stream)}
    blocks = [f"blocks.{b}" for b in range(len(model.blocks))]
    for block in blocks:
        inner = Axis(f"{block}.inner", stream.size)
        layers |= {f"{block}.norm": (stream,), f"{block}.fc1": (inner, stream), f"{block}.fc2": (stream, inner)}
    shallow = {f"{block}.{fc}.weight": f"{blocks[0]}.{fc}.weight" for block in blocks[1:] for fc in ("fc1", "fc2")}
    return Layout.of(model, layers, [blocks], shallow)
