"""The small models of small_clients.py, for the embedded digits: images of 8 x 8 pixels in ten classes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """x + relu(norm(conv(x)))."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.relu(self.norm(self.conv(x)))
        return out


class SmallCnn(nn.Module):
    """A convolution, two blocks, a linear head: 6,000 parameters."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(Block(norm()), Block(norm()))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.blocks(self.stem(x))).flatten(1))
        return out


class SmallLstm(nn.Module):
    """An LSTM over the rows of an image, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.flatten(1, 2))[0][:, -1])
        return out


def cnn_group_norm() -> nn.Module:
    """The CNN with group norm."""
    return SmallCnn(lambda: nn.GroupNorm(4, 16))


def cnn_batch_norm() -> nn.Module:
    """The CNN with batch norm."""
    return SmallCnn(lambda: nn.BatchNorm2d(16))


def lstm() -> nn.Module:
    """The LSTM."""
    return SmallLstm()
