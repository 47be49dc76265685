"""The fused optimisers are torch's, bit for bit, in every turn of many."""

import pytest
import torch
from torch import nn

from incofl.client import LocalSettings, Trainee

SETTINGS = [
    LocalSettings(optimizer="adam", weight_decay=0.1),
    LocalSettings(optimizer="adamw", weight_decay=0.1),
    LocalSettings(optimizer="sgd", lr=0.1),
    LocalSettings(optimizer="sgd", lr=0.1, nesterov=True, weight_decay=0.1),
    LocalSettings(optimizer="sgd", lr=0.1, momentum=0.0),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_same_bits_as_torch(settings: LocalSettings) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    start = {name: value.clone() for name, value in ours.state_dict().items()}
    trainee, x = Trainee(ours), torch.randn(4, 5)
    for _ in range(2):  # the second turn starts without a past
        trainee.load(start)
        theirs.load_state_dict(start)
        mine, torchs = trainee.optimizer(settings), settings.make_optimizer(theirs.parameters())
        for step in range(4):
            for model, optimizer in ((ours, mine), (theirs, torchs)):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                if step == 1:
                    model.bias.grad = None  # a parameter that is not moved in a step
                optimizer.step()
            assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert not torch.equal(ours.weight, start["weight"])


def test_a_trainee_loads_what_load_state_dict_does() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    trainee = Trainee(model)
    state = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    trainee.load(state)
    model(torch.ones(2, 2))
    assert all(bool((value == 3).all()) for value in state.values())  # the model has moved, the state has not
    with pytest.raises(RuntimeError, match="Missing key"):
        trainee.load({"0.weight": torch.ones(2, 2)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        trainee.load(state | {"0.weight": torch.ones(3, 2)})


def test_a_trainee_follows_a_buffer_that_is_replaced() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: torch.Tensor
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = self.mean + x.mean()  # another tensor
            return x * self.weight

    model = Average()
    trainee, state = Trainee(model), {"weight": torch.ones(1), "mean": torch.zeros(1)}
    for _ in range(2):
        trainee.load(state)
        model(torch.full((2,), 5.0))
        assert trainee.changing_buffers(state)["mean"].tolist() == [5.0]
