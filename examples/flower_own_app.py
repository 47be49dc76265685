"""A Flower app for a model and examples of your own: what you have, and two lines that make the apps of it.

In an app of Flower's the two lines stand in server_app.py and client_app.py, where ``flwr run`` finds them. Here a
simulation runs them: python flower_own_app.py (needs flwr[simulation]).
"""

import torch
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import Tensor, nn

from incofl.flower import Task, make_client_app, make_server_app

CLIENTS = 8


class Block(nn.Module):
    """A perceptron around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The input, and what the block adds to it."""
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


def model() -> nn.Module:
    """Any module; its blocks are found by tracing."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *[Block(32) for _ in range(4)], nn.Linear(32, 10))


def digits() -> tuple[Tensor, Tensor]:
    """Whatever you load."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)


def load(context: Context) -> tuple[Tensor, Tensor]:
    """The examples of a node; a DataLoader would do as well."""
    x, y = digits()
    part = slice(int(context.node_config["partition-id"]), 1500, CLIENTS)
    return x[part], y[part]


def held_out() -> tuple[Tensor, Tensor]:
    """The examples of the server."""
    x, y = digits()
    return x[1500:], y[1500:]


# The ten lines: your functions, and what incofl makes of them.
task = Task(
    model=model,
    shape=(1, 8, 8),
    classes=10,
    data=load,
    test=held_out,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
)
config = {
    "method": "incoavg",
    "rounds": 10,
    "cohort": 4,
    "data": {"clients": CLIENTS},
    "local": {"epochs": 2, "batch_size": 32},
}
server_app = make_server_app(config, task, out="runs/flower-own", resume=True)
client_app = make_client_app(task)

if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
