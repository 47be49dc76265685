"""The fused optimisers are torch's, bit for bit, in every turn of many."""

import functools

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
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 16), (5, 3)])
def test_same_bits_as_torch(settings: LocalSettings, inputs: int, outputs: int) -> None:
    """Where tensors fill whole registers; elsewhere torch itself rounds the last numbers of a tensor otherwise."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)
    start = {name: value.clone() for name, value in ours.state_dict().items()}
    trainee, x = Trainee(ours), torch.randn(4, inputs)
    same = torch.equal if outputs % 16 == 0 else functools.partial(torch.allclose, rtol=1e-5, atol=1e-7)
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
            assert all(map(same, ours.parameters(), theirs.parameters()))
    assert not torch.equal(ours.weight, start["weight"])


class Two(nn.Module):
    """A kernel in the memory of images, and a bias."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs, 3, 3, memory_format=torch.channels_last)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.empty(outputs))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_slice_moves_as_it_does_in_the_whole(settings: LocalSettings) -> None:
    """Bit for bit, though its tensors end within a register, in one turn after the other."""
    torch.manual_seed(0)
    for _ in range(20):
        whole, part = Trainee(Two(8, 3)), Trainee(Two(2, 1))
        start = {"weight": torch.randn(8, 3, 3, 3), "bias": torch.randn(8) / 1000}
        for _ in range(2):
            whole.load(start)
            part.load({"weight": start["weight"][:2, :1], "bias": start["bias"][:2]})
            optimizers = [trainee.optimizer(settings) for trainee in (whole, part)]
            for _ in range(5):
                weight, bias = torch.randn(8, 3, 3, 3), torch.randn(8)
                whole.parameters["weight"].grad, whole.parameters["bias"].grad = weight, bias
                part.parameters["weight"].grad, part.parameters["bias"].grad = weight[:2, :1].clone(), bias[:2].clone()
                for optimizer in optimizers:
                    optimizer.step()
            assert torch.equal(whole.parameters["weight"][:2, :1], part.parameters["weight"])
            assert torch.equal(whole.parameters["bias"][:2], part.parameters["bias"])


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
