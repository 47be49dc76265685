"""ResNets of basic blocks (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016), as in the InCo paper.

Parameter names equal torchvision's, so its checkpoints load. The family is named by its number of layers: every block
counts two, stem and head one each; ResNet26 has blocks (3, 3, 3, 3).
"""

import math
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from incofl.layout import Axes, Axis, Layout

Stem = Literal["imagenet", "small"]

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


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """relu(x + f(x)), with the shortcut projected where the shape changes."""
        out = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return functional.relu(out, inplace=True)


class ResNet(nn.Module):
    """Stem, four stages of basic blocks, global average pooling, linear head.

    The ``imagenet`` stem (7x7, stride 2, then max pooling) is the paper's, at 32 x 32 too. The ``small`` stem (3x3,
    stride 1, no pooling) suits images that the other would shrink away.
    """

    def __init__(
        self, depth: tuple[int, ...], width: float = 1.0, channels: int = 3, classes: int = 10, stem: Stem = "imagenet"
    ) -> None:
        super().__init__()
        widths = [math.ceil(width * base) for base in BASE_WIDTHS[: len(depth)]]
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, widths[0], 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(widths[0])
        inputs = widths[0]
        for stage, (blocks, outputs) in enumerate(zip(depth, widths, strict=True), start=1):
            first = BasicBlock(inputs, outputs, stride=1 if stage == 1 else 2)
            rest = [BasicBlock(outputs, outputs, stride=1) for _ in range(blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(first, *rest))
            inputs = outputs
        self.stages = len(depth)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        """The pooled feature vector, before the head."""
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x)), inplace=True))
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        logits: Tensor = self.fc(self.features(x))
        return logits


class ExitHead(nn.Module):
    """A classifier in the middle of a network: some convolutions, pooling, a linear layer."""

    def __init__(self, channels: int, classes: int, convolutions: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        self.convs = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        logits: Tensor = self.fc(self.convs(x).mean((2, 3)))
        return logits


class ExitResNet(ResNet):
    """A ResNet with early exits, as ScaleFL trains it; the last exit is the usual head.

    In training it gives the logits of all exits that it has, in evaluation those of the last. Its trunk has the same
    initial weights as the ResNet without exits.
    """

    def __init__(
        self,
        depth: tuple[int, ...],
        width: float,
        channels: int,
        classes: int,
        stem: Stem,
        positions: tuple[int, ...],
        head_convs: int,
    ) -> None:
        super().__init__(depth, width, channels, classes, stem)
        self.positions = positions
        self.stage_of = [stage for stage, blocks in enumerate(depth, start=1) for _ in range(blocks)]
        sizes = [getattr(self, f"layer{self.stage_of[at - 1]}")[0].conv2.out_channels for at in positions[:-1]]
        self.exits = nn.ModuleList(ExitHead(size, classes, head_convs) for size in sizes)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:  # type: ignore[override]
        """Class logits, of every exit in training. A part that a client does not hold is an ``nn.Identity``."""
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x)), inplace=True))
        logits: list[Tensor] = []
        blocks = (block for stage in range(1, self.stages + 1) for block in getattr(self, f"layer{stage}"))
        for number, block in enumerate(blocks, start=1):
            x = block(x)
            if number in self.positions[:-1]:
                head = self.exits[self.positions.index(number)]
                if not isinstance(head, nn.Identity) and (self.training or number == self.last_exit):
                    logits.append(head(x))
        if not isinstance(self.fc, nn.Identity):
            logits.append(self.fc(x.mean((2, 3))))
        return logits if self.training else logits[-1]

    @property
    def last_exit(self) -> int:
        """After which block the last exit is that this module holds."""
        heads = [*self.exits, self.fc]
        return max(at for at, head in zip(self.positions, heads, strict=True) if not isinstance(head, nn.Identity))


def resnet_layout(model: ResNet) -> Layout:
    """Axes: a residual stream per stage (the stem belongs to stage 1) and an inner width per block.

    The shallow counterpart of every convolution of the later blocks is the second convolution of the first block, as
    in the paper's released code (it is the first of that shape in stages 2 to 4).
    """
    state = model.state_dict()
    image = Axis("image", state["conv1.weight"].shape[1], fixed=True)
    classes = Axis("classes", state["fc.weight"].shape[0], fixed=True)
    axes: dict[str, Axes] = {}
    shallow: dict[str, str] = {}
    stages: list[list[str]] = []

    def convolution(name: str, outputs: Axis, inputs: Axis) -> None:
        axes[f"{name}.weight"] = (outputs, inputs, None, None)

    def norm(name: str, channels: Axis) -> None:
        for entry in ("weight", "bias", "running_mean", "running_var"):
            axes[f"{name}.{entry}"] = (channels,)

    stream = Axis("layer1", state["conv1.weight"].shape[0])
    convolution("conv1", stream, image)
    norm("bn1", stream)
    for stage in range(1, model.stages + 1):
        below, stream = stream, Axis(f"layer{stage}", state[f"layer{stage}.0.conv2.weight"].shape[0])
        blocks = [f"layer{stage}.{b}" for b in range(len(getattr(model, f"layer{stage}")))]
        stages.append(blocks)
        for b, block in enumerate(blocks):
            inner = Axis(f"{block}.inner", stream.size)
            convolution(f"{block}.conv1", inner, below if b == 0 else stream)
            norm(f"{block}.bn1", inner)
            convolution(f"{block}.conv2", stream, inner)
            norm(f"{block}.bn2", stream)
            if f"{block}.downsample.0.weight" in state:
                convolution(f"{block}.downsample.0", stream, below)
                norm(f"{block}.downsample.1", stream)
            if b > 0:
                for conv in ("conv1", "conv2"):
                    shallow[f"{block}.{conv}.weight"] = f"{blocks[0]}.conv2.weight"
    axes["fc.weight"] = (classes, stream)
    axes["fc.bias"] = (classes,)
    exits: dict[str, int] = {}
    if isinstance(model, ExitResNet):
        for number, position in enumerate(model.positions[:-1]):
            name = f"exits.{number}"
            exits[name] = position
            stage = model.stage_of[position - 1]
            inputs = Axis(f"layer{stage}", state[f"layer{stage}.0.conv2.weight"].shape[0])
            head = model.exits[number]
            assert isinstance(head, ExitHead)
            for layer in range(0, len(head.convs), 3):
                outputs = Axis(f"{name}.{layer}", inputs.size)
                convolution(f"{name}.convs.{layer}", outputs, inputs)
                norm(f"{name}.convs.{layer + 1}", outputs)
                inputs = outputs
            axes[f"{name}.fc.weight"] = (classes, inputs)
            axes[f"{name}.fc.bias"] = (classes,)
        exits["fc"] = model.positions[-1]
    return Layout.of(model, axes, stages, shallow, exits)
