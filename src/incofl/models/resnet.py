"""ResNets of basic blocks (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016), as in the InCo paper.

Parameter names equal torchvision's, so its checkpoints load. The family is named by its number of layers: every block
counts two, stem and head one each; ResNet26 has blocks (3, 3, 3, 3). Those for signals are the same in one
dimension.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from incofl.errors import ConfigError
from incofl.layout import Axes, Axis, Layout

Stem = Literal["imagenet", "small"]
Shape = tuple[int, ...]

# The paper's five, and torchvision's deeper one.
DEPTHS = {
    "resnet10": (1, 1, 1, 1),
    "resnet14": (1, 1, 2, 2),
    "resnet18": (2, 2, 2, 2),
    "resnet22": (2, 2, 3, 3),
    "resnet26": (3, 3, 3, 3),
    "resnet34": (3, 4, 6, 3),
}
BASE_WIDTHS = (64, 128, 256, 512)
NORMS = ("batch", "group")


class Layers(NamedTuple):
    """The layers of a network in one dimension (signals) or two (images)."""

    conv: type[nn.Conv1d] | type[nn.Conv2d]
    norm: Callable[[int], nn.Module]  # of so many channels
    pool: type[nn.MaxPool1d] | type[nn.MaxPool2d]


LAYERS = {1: Layers(nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d), 2: Layers(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d)}


class BasicBlock(nn.Module):
    """Two convolutions, 3x3 in two dimensions, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, layers: Layers = LAYERS[2]) -> None:
        super().__init__()
        conv, norm, _ = layers
        self.conv1 = conv(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module | None = None  # projects the shortcut where the shape changes
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return functional.relu(out, inplace=True)


class ExitHead(nn.Module):
    """A classifier in the middle of a network: some convolutions, pooling, a linear layer."""

    def __init__(self, channels: int, classes: int, convolutions: int, layers: Layers = LAYERS[2]) -> None:
        super().__init__()
        convs: list[nn.Module] = []
        for _ in range(convolutions):
            convs += [layers.conv(channels, channels, 3, padding=1, bias=False), layers.norm(channels), nn.ReLU()]
        self.convs = nn.Sequential(*convs)
        self.fc = nn.Linear(channels, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(_pooled(self.convs(x)))


class ResNet(nn.Module):
    """Stem, up to four stages of basic blocks, global average pooling, linear head.

    The ``imagenet`` stem (7x7, stride 2, then max pooling) is the paper's, at 32 x 32 too. The ``small`` stem (3x3,
    stride 1, no pooling) suits images that the other would shrink away. Group norm, of all channels in one group, keeps
    no statistics of the data, which privacy needs.
    """

    def __init__(
        self,
        blocks: Shape,
        shape: Shape = (3, 32, 32),
        classes: int = 10,
        width: float = 1.0,
        stem: Stem = "imagenet",
        norm: Literal["batch", "group"] = "batch",
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ConfigError(f"model.options.norm: got {norm!r}, expected one of {', '.join(NORMS)}")
        channels, *places = shape
        self.layers = layers = LAYERS[len(places)]
        if norm == "group":
            self.layers = layers = layers._replace(norm=partial(nn.GroupNorm, 1))
        widths = [math.ceil(width * base) for base in BASE_WIDTHS[: len(blocks)]]
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = layers.conv(channels, widths[0], kernel, stride, padding=kernel // 2, bias=False)
        self.maxpool = layers.pool(3, stride=2, padding=1) if stem == "imagenet" else nn.Identity()
        self.bn1 = layers.norm(widths[0])
        inputs = widths[0]
        for stage, (count, outputs) in enumerate(zip(blocks, widths, strict=True), start=1):
            first = BasicBlock(inputs, outputs, stride=1 if stage == 1 else 2, layers=layers)
            rest = [BasicBlock(outputs, outputs, stride=1, layers=layers) for _ in range(count - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(first, *rest))
            inputs = outputs
        self.depth, self.widths = blocks, widths
        self.fc = nn.Linear(inputs, classes)
        self.exits = nn.ModuleList()
        self.exit_positions: tuple[int, ...] = ()  # after how many blocks; the last one is that of the usual head
        self.answer: Literal["last", "mean"] = "last"  # which of its exits it answers with in evaluation
        _initialise(self)

    @property
    def stages(self) -> list[nn.Sequential]:
        return [getattr(self, f"layer{stage}") for stage in range(1, len(self.depth) + 1)]

    def add_exits(self, positions: tuple[int, ...], convolutions: int) -> Layout:
        """Adds early exits after some blocks, as ScaleFL trains them, and returns the new layout.

        The last exit is the usual head. A module with exits returns the logits of all of them in training, and those of
        the last one that it holds, or their mean, in evaluation.
        """
        channels = [width for width, blocks in zip(self.widths, self.depth, strict=True) for _ in range(blocks)]
        heads = [ExitHead(channels[at - 1], self.fc.out_features, convolutions, self.layers) for at in positions[:-1]]
        self.exits, self.exit_positions = nn.ModuleList(heads), positions
        return self.layout()

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        heads = zip(self.exit_positions or (sum(self.depth),), (*self.exits, self.fc), strict=True)
        held = [(at, head) for at, head in heads if not isinstance(head, nn.Identity)]  # which replaces a missing one
        used = dict(held if self.training or self.answer == "mean" else held[-1:])
        logits: list[Tensor] = []
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x)), inplace=True))
        for number, block in enumerate((block for stage in self.stages for block in stage), start=1):
            x = block(x)
            if (head := used.get(number)) is not None:
                logits.append(head(x if isinstance(head, ExitHead) else _pooled(x)))
        if self.training and self.exit_positions:
            return logits
        return torch.stack(logits).mean(0) if len(logits) > 1 else logits[0]

    def layout(self) -> Layout:
        """Axes: a residual stream per stage (the stem belongs to stage 1) and an inner width per block.

        The shallow counterpart of every convolution of the later blocks is the second convolution of the first block,
        as in the paper's released code (it is the first of that shape in stages 2 to 4).
        """
        image = Axis("image", self.conv1.in_channels, fixed=True)
        classes = Axis("classes", self.fc.out_features, fixed=True)
        stages = [[f"layer{stage}.{block}" for block in range(size)] for stage, size in enumerate(self.depth, start=1)]
        widths = zip(stages, self.widths, strict=True)
        streams = [Axis(block.partition(".")[0], width) for blocks, width in widths for block in blocks]
        below = streams[0]
        layers: dict[str, Axes] = {"conv1": (below, image), "bn1": (below,)}
        for block, stream in zip(itertools.chain(*stages), streams, strict=True):
            inner = Axis(f"{block}.inner", stream.size)
            layers |= {f"{block}.conv1": (inner, below), f"{block}.bn1": (inner,)}
            layers |= {f"{block}.conv2": (stream, inner), f"{block}.bn2": (stream,)}
            layers |= {f"{block}.downsample.0": (stream, below), f"{block}.downsample.1": (stream,)}  # if it has one
            below = stream
        layers["fc"] = (classes, below)
        later = [(f"{block}.{conv}", first) for first, *rest in stages for block in rest for conv in ("conv1", "conv2")]
        shallow = {f"{conv}.weight": f"{first}.conv2.weight" for conv, first in later}
        exits: dict[str, int] = {}
        for number, head in enumerate(self.exits):
            name, position = f"exits.{number}", self.exit_positions[number]
            exits[name], outputs = position, streams[position - 1]
            for layer in range(0, len(cast(ExitHead, head).convs), 3):
                inputs, outputs = outputs, Axis(f"{name}.{layer}", outputs.size)
                layers |= {f"{name}.convs.{layer}": (outputs, inputs), f"{name}.convs.{layer + 1}": (outputs,)}
            layers[f"{name}.fc"] = (classes, outputs)
        if self.exit_positions:
            exits["fc"] = self.exit_positions[-1]
        closing = [f"{block}.bn2.{key}" for _, *rest in stages for block in rest for key in ("weight", "bias")]
        return Layout.of(self, layers, stages, shallow, exits, closing)


def _pooled(x: Tensor) -> Tensor:
    """The mean of each channel over all pixels or steps."""
    return x.mean(tuple(range(2, x.dim())))


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
