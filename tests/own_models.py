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
