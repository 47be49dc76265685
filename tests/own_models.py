"""Models as users have them: plain torch, without a layout."""

from torch import Tensor, nn


class Encoder(nn.Module):
    """Torch's own transformer encoder on the rows of an image, with dropout as it comes."""

    def __init__(self, rows: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(rows, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from the mean over the rows."""
        logits: Tensor = self.head(self.encoder(self.embed(x.flatten(1, 2))).mean(1))
        return logits


def encoder(shape: tuple[int, ...], classes: int) -> nn.Module:
    """What ``model.name`` names."""
    return Encoder(shape[-1], classes)


class HeadFirst(nn.Module):
    """Registers its head before its blocks, and has a batch norm without scale."""

    def __init__(self, inputs: int, classes: int, blocks: int) -> None:
        super().__init__()
        self.head = nn.Linear(16, classes)
        self.stem = nn.Linear(inputs, 16)
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.blocks(self.norm(self.stem(x.flatten(1)))))
        return logits


def head_first(shape: tuple[int, ...], classes: int) -> nn.Module:
    """With three blocks."""
    return HeadFirst(shape[1] * shape[2], classes, 3)


def without_blocks(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Nothing to leave out."""
    return HeadFirst(shape[1] * shape[2], classes, 0)


class Volumes(nn.Module):
    """A convolution in three dimensions, and blocks."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.blocks(self.stem(x.unsqueeze(1)).mean((2, 3, 4))))
        return logits


def volumes(classes: int) -> nn.Module:
    """What ``model.name`` names."""
    return Volumes(classes)


class TwoTowers(nn.Module):
    """Two inputs, an image and a text, added up before the blocks."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.image = nn.Linear(64, 16)
        self.words = nn.Embedding(vocabulary, 16)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(16, classes)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.blocks(self.image(image.flatten(1)) + self.words(words).mean(1)))
        return logits


def two_towers(classes: int, vocabulary: int) -> nn.Module:
    """What ``model.name`` names."""
    return TwoTowers(vocabulary, classes)


class Viewing(nn.Module):
    """Convolutions, and then a view that only images with their channels first have."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.stem = nn.Conv2d(channels, 8, 3, padding=1)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(8 * height * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.blocks(self.stem(x))
        logits: Tensor = self.head(x.view(x.size(0), -1))
        return logits


def viewing(shape: tuple[int, ...], classes: int) -> nn.Module:
    """What ``model.name`` names."""
    return Viewing(shape, classes)
