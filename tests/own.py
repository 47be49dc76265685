"""Objects of a user: models, data, a method and a task, which configs can name ``tests.own:NAME``."""

import torch
from torch import Tensor, nn
from torch.nn import functional

import incofl
from incofl.options import options


class Residual(nn.Module):
    """x + W2 relu(W1 x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(functional.relu(self.first(x)))
        return out


class Net(nn.Module):
    """A perceptron of equal residual blocks."""

    def __init__(self, inputs: int = 6, outputs: int = 3, width: int = 12, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(blocks)])
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)))
        return out


class TwoInputs(Net):
    """Called with two named inputs, as Hugging Face's models are."""

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(values * mask)


class LanguageModel(nn.Module):
    """Logits of the next token at every position, (batch, length, tokens)."""

    def __init__(self, tokens: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(2))
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Segmenter(nn.Module):
    """Logits of a class for every pixel, (batch, classes, height, width)."""

    def __init__(self, classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*[nn.Conv2d(width, width, 3, padding=1) for _ in range(2)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(functional.relu(self.blocks(self.stem(x))))
        return out


def points(examples: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points and the largest of their first three coordinates."""
    x = torch.randn(examples, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


data = incofl.Data(points(), points(60, seed=1))


@options("scaled")
class Scaled(incofl.ClientRule):
    """Local training on a multiple of the gradient.

    Attributes:
        factor: what gradients are multiplied by.
    """

    factor: float = 0.5

    def adjust(self, local: incofl.Local) -> None:
        for parameter in local.parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(self.factor)


method = incofl.Method("scaledavg", client=Scaled(), summary="heteroavg with scaled gradients")
task = incofl.Task(
    functional.cross_entropy, {"error": lambda output, target: (output.argmax(1) != target).float().mean()}, name="own"
)
