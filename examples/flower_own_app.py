"""A Flower app for your own model and data: your functions, and two lines that make the apps of them.

In a Flower app the two lines are in server_app.py and client_app.py, where ``flwr run`` finds them. Here a simulation
runs them: python flower_own_app.py (needs flwr[simulation]).
"""

import torch
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import Tensor, nn

from incofl import Data
from incofl.flower import make_client_app, make_server_app

CLIENTS = 8


class Block(nn.Module):
    """A perceptron whose input is added to its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the output of the block to its input."""
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


def model() -> nn.Module:
    """Any module; its blocks are found by tracing."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *[Block(32) for _ in range(4)], nn.Linear(32, 10))


def digits(part: slice) -> tuple[Tensor, Tensor]:
    """Loads examples."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16).float().view(-1, 1, 8, 8)[part], torch.tensor(labels)[part]


def node_data(context: Context) -> tuple[Tensor, Tensor]:
    """The examples of a node, which never leave it; a Dataset, a DataLoader or a Data would do as well."""
    return digits(slice(int(context.node_config["partition-id"]), 1500, CLIENTS))


# The server has no training examples: 0 of them say what they look like. It evaluates on 297 others.
server_data = Data(train=digits(slice(0)), test=digits(slice(1500, None)), classes=10)
config = {
    "method": "incoavg",
    "rounds": 10,
    "cohort": 4,
    "data": {"clients": CLIENTS},
    "local": {"epochs": 2, "batch_size": 32, "optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.01},
}
server_app = make_server_app(config, model=model, data=server_data, out="runs/flower-own", resume=True)
client_app = make_client_app(model=model, data=node_data)

if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
