"""Small image models in the style of torchvision and timm, and other networks that people write by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    padding = (kernel - 1) // 2
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


def pooled(*features: nn.Module, width: int) -> nn.Sequential:
    """Features, their mean over the image, and a classifier."""
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def alexnet() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
    classifier = nn.Sequential(nn.Dropout(), nn.Linear(16 * 4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), classifier, nn.Linear(24, CLASSES))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in [(3, 8), (8, 8), (8, 16), (16, 16)]:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if inputs == outputs else []
    return pooled(nn.Sequential(*layers), width=16)


class Bottleneck(nn.Module):
    """The block of a ResNet50, or with groups of a ResNeXt."""

    def __init__(self, inputs: int, width: int, groups: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, groups=groups), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.downsample = nn.Conv2d(inputs, 2 * width, 1) if inputs != 2 * width else None

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return (self.bn3(self.conv3(x)) + short).relu()


def resnet50(groups: int = 1) -> nn.Module:
    layer1 = nn.Sequential(Bottleneck(8, 8, groups), Bottleneck(16, 8, groups))
    layer2 = nn.Sequential(Bottleneck(16, 16, groups), *(Bottleneck(32, 16, groups) for _ in range(2)))
    return pooled(conv_bn(3, 8), layer1, nn.MaxPool2d(2), layer2, width=32)


def resnext50() -> nn.Module:
    return resnet50(groups=2)


class DenseLayer(nn.Module):
    """A layer of a DenseNet, which sees all layers before it."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 2 * growth, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(2 * growth), nn.Conv2d(2 * growth, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())], 1)


def densenet() -> nn.Module:
    block1 = nn.Sequential(*(DenseLayer(8 + 4 * at, 4) for at in range(3)))
    transition = nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1), nn.AvgPool2d(2))
    block2 = nn.Sequential(*(DenseLayer(10 + 4 * at, 4) for at in range(3)))
    return pooled(nn.Conv2d(3, 8, 3, padding=1), block1, transition, block2, nn.BatchNorm2d(22), width=22)


class Fire(nn.Module):
    """The block of a SqueezeNet."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1, self.expand3 = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1(x), self.expand3(x)], 1).relu()


def squeezenet() -> nn.Module:
    return pooled(nn.Conv2d(3, 8, 3, 2), Fire(8, 4, 8), Fire(16, 4, 8), Fire(16, 4, 8), width=16)


class Inverted(nn.Module):
    """The block of a MobileNetV2 or, with a squeeze-and-excitation, of an EfficientNet."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, squeeze: bool = False) -> None:
        super().__init__()
        hidden = 2 * inputs
        layers: list[nn.Module] = [conv_bn(inputs, hidden, 1), conv_bn(hidden, hidden, 3, stride, groups=hidden)]
        layers += [SqueezeExcitation(hidden)] if squeeze else []
        self.branch = nn.Sequential(*layers, nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) if self.adds else self.branch(x)


class SqueezeExcitation(nn.Module):
    """Scales every channel by what the mean of all channels says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


def mobilenet_v1() -> nn.Module:
    def separable(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(conv_bn(inputs, inputs, groups=inputs), conv_bn(inputs, outputs, 1))

    return pooled(conv_bn(3, 8), separable(8, 16), separable(16, 16), separable(16, 16), width=16)


def mobilenet_v2() -> nn.Module:
    blocks = [Inverted(8, 16, 2), Inverted(16, 16), Inverted(16, 16), Inverted(16, 24, 2), Inverted(24, 24)]
    return pooled(nn.Sequential(conv_bn(3, 8), *blocks, conv_bn(24, 32, 1)), width=32)


def efficientnet() -> nn.Module:
    stages = [(8, 16), (16, 24)]
    blocks = [
        nn.Sequential(Inverted(a, b, 2, True), Inverted(b, b, squeeze=True), Inverted(b, b, squeeze=True))
        for a, b in stages
    ]
    return pooled(nn.Sequential(conv_bn(3, 8), *blocks, conv_bn(24, 32, 1)), width=32)


class Shuffle(nn.Module):
    """The block of a ShuffleNetV2: half of the channels pass, and then halves are interleaved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(conv_bn(half, half, 1), conv_bn(half, half, 3, groups=half), conv_bn(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        passed, changed = x.chunk(2, 1)
        x = torch.cat([passed, self.branch(changed)], 1)
        return x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


def shufflenet() -> nn.Module:
    return pooled(conv_bn(3, 16), nn.Sequential(*(Shuffle(16) for _ in range(3))), width=16)


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """The block of torchvision's ConvNeXt, with its scale of the branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.layer_scale * self.down(functional.gelu(self.up(out))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    """Stages and the layers between them are unlike children of one Sequential."""
    stages: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 8, 2, 2), LayerNorm2d(8))]
    for width, depth in [(8, 2), (16, 3)]:
        stages.append(nn.Sequential(*(ConvNextBlock(width) for _ in range(depth))))
        stages.append(nn.Sequential(LayerNorm2d(width), nn.Conv2d(width, 2 * width, 2, 2)))
    return pooled(nn.Sequential(*stages), width=32)


class MixerBlock(nn.Module):
    """The block of an MLP-Mixer."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 8), nn.GELU(), nn.Linear(8, patches))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(16, 16) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x).flatten(2).transpose(1, 2))).mean(1))


class ViT(nn.Module):
    """A vision transformer as timm writes it: one matrix for queries, keys and values."""

    class Block(nn.Module):
        """Attention and a perceptron."""

        def __init__(self, width: int = 16, heads: int = 4) -> None:
            super().__init__()
            self.head_width = width // heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
            x = x + self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cls = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(torch.zeros(1, 17, 16))
        self.blocks = nn.Sequential(*(self.Block() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Encoder(nn.Module):
    """Rows of an image as tokens of torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x.flatten(1, 2))).mean(1))


class ParallelLists(nn.Module):
    """Convolutions in one list and norms in another, as graph networks are often written."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, CLASSES)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.bns = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, bn in zip(self.convs, self.bns, strict=True):
            x = x + bn(conv(x)).relu()
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """A U-Net whose deepest features are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = conv_bn(3, 8), conv_bn(8, 16)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), conv_bn(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        x = self.up(self.down2(functional.max_pool2d(fine, 2)))
        return self.head(self.last(torch.cat([x, fine], 1))).mean((2, 3))


class WaveNet(nn.Module):
    """Dilated convolutions over the rows of an image, with gates and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 3, padding=2**at, dilation=2**at) for at in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(2))
        total = torch.zeros_like(x)
        for gate, skip in zip(self.gates, self.skips, strict=True):
            a, b = gate(x).chunk(2, 1)
            out = skip(a.tanh() * b.sigmoid())
            x, total = x + out, total + out
        return self.head(total.mean(2))


class Recurrent(nn.Module):
    """A bidirectional GRU over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.flatten(1, 2))[0].mean(1))
