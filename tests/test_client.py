"""The local training loop: hand-computed steps, hooks, and that what was received stays as it was."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from incofl.client import ClientInput, ClientRule, Local, LocalSettings, train
from incofl.errors import ConfigError
from incofl.evaluate import evaluate, measure_buffers
from incofl.task import CLASSIFICATION, TASKS
from incofl.tensors import clone


class Scalar(nn.Module):
    """Two logits, w x and 0: cross-entropy has the gradient (sigmoid(w x) - [y = 0]) x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.w * x[:, 0], torch.zeros(len(x))], 1)


@dataclass(frozen=True)
class SquaredRule(ClientRule):
    """Loss (w - x)^2 / 2, gradient w - x."""

    def loss(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        w = local.model.get_parameter("w")
        return (w - x[:, 0]).square().mean() / 2


def batch(value: float, label: int = 0) -> tuple[Tensor, Tensor]:
    return torch.tensor([[value]]), torch.tensor([label])


def test_two_sgd_steps_by_hand() -> None:
    """w = 1, targets 3 then 0, lr 0.5: w = 1 + 0.5*2 = 2, then 2 - 0.5*2 = 1; update 0; losses 2 and 2."""
    settings = LocalSettings(optimizer="sgd", lr=0.5, momentum=0.0)
    trained = train(Scalar(), ClientInput({"w": torch.tensor(1.0)}), [batch(3), batch(0)], SquaredRule(), settings)
    assert float(trained.update["w"]) == 0.0
    assert (trained.steps, trained.loss) == (2, 2.0)


def test_momentum_by_hand() -> None:
    """w = 0, target 1 twice, lr 0.1, momentum 0.9: v = -1, w = 0.1; v = -0.9 - 0.9 = -1.8, w = 0.28."""
    settings = LocalSettings(optimizer="sgd", lr=0.1, momentum=0.9)
    trained = train(Scalar(), ClientInput({"w": torch.tensor(0.0)}), [batch(1), batch(1)], SquaredRule(), settings)
    assert float(trained.update["w"]) == pytest.approx(0.28)


def test_cross_entropy_is_the_default() -> None:
    """At w = 0 the gradient for label 0 and x = 2 is (0.5 - 1) * 2 = -1."""
    settings = LocalSettings(optimizer="sgd", lr=0.1, momentum=0.0)
    trained = train(Scalar(), ClientInput({"w": torch.tensor(0.0)}), [batch(2.0)], ClientRule(), settings)
    assert float(trained.update["w"]) == pytest.approx(0.1)
    assert trained.loss == pytest.approx(0.6931, abs=1e-4)


def test_adam_moves_by_its_learning_rate() -> None:
    trained = train(Scalar(), ClientInput({"w": torch.tensor(0.0)}), [batch(2.0)], ClientRule(), LocalSettings(lr=1e-3))
    assert float(trained.update["w"]) == pytest.approx(1e-3, rel=1e-4)


def test_what_was_received_is_not_touched_and_a_second_turn_starts_afresh() -> None:
    """The pitfall of the paper's code on a CPU: an aliased snapshot makes every update zero."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    received = clone(model.state_dict())
    before = clone(received)
    data = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 4))] * 3
    first = train(model, ClientInput(received), data, ClientRule(), LocalSettings())
    second = train(model, ClientInput(received), data, ClientRule(), LocalSettings())
    assert all(torch.equal(received[name], before[name]) for name in before)
    assert all(bool(value.abs().sum() > 0) for value in first.update.values())
    assert all(torch.equal(first.update[name], second.update[name]) for name in first.update)
    assert first.buffers.keys() == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert int(first.buffers["2.num_batches_tracked"]) == 3
    assert first.update.keys() | first.buffers.keys() == received.keys()
    first.buffers["2.running_mean"].fill_(9)
    assert float(model.get_buffer("2.running_mean").max()) != 9


def test_hooks_run_in_order() -> None:
    calls: list[str] = []

    @dataclass(frozen=True)
    class Spy(ClientRule):
        def begin(self, local: Local) -> None:
            calls.append(f"begin {float(local.model.get_parameter('w').detach()):g}")

        def loss(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
            calls.append("loss")
            return super().loss(local, x, y)

        def adjust(self, local: Local) -> None:
            grad = local.model.get_parameter("w").grad
            assert grad is not None
            grad.zero_()
            calls.append(f"adjust {local.steps}")

    settings = LocalSettings(optimizer="sgd", momentum=0.0)
    trained = train(Scalar(), ClientInput({"w": torch.tensor(5.0)}), [batch(1), batch(1)], Spy(), settings)
    assert calls == ["begin 5", "loss", "adjust 0", "loss", "adjust 1"]
    assert float(trained.update["w"]) == 0.0


def test_evaluation_counts_every_example() -> None:
    """w = 1: x > 0 means class 0. Batches of three and one; three of four are right."""
    batches = [(torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([0, 0, 0])), batch(-2.0, 1)]
    score = evaluate(Scalar(), {"w": torch.tensor(1.0)}, iter(batches))
    assert CLASSIFICATION.values(score)["accuracy"] == 0.75
    expected = torch.log1p(torch.exp(torch.tensor([-1.0, -2.0, 1.0, -2.0]))).mean()
    assert CLASSIFICATION.values(score)["loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", 1),
        ("lr", 0.0),
        ("momentum", 1.0),
        ("weight_decay", -0.1),
        ("optimizer", "lamb"),
        ("nesterov", "yes"),
    ],
)
def test_settings_out_of_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"local.{field}: got"):
        LocalSettings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("bound", "update"), [(None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_a_gradient_is_clipped_by_its_norm_after_the_rule_has_changed_it(
    bound: float | None, update: list[float]
) -> None:
    """The rule makes the gradient -(3, 4), of norm 5, in two tensors; clipped earlier, or by value, it would differ."""

    class Rule(ClientRule):
        def adjust(self, local: Local) -> None:
            for name, value in (("weight", -3.0), ("bias", -4.0)):
                local.parameters[name].grad = torch.full_like(local.parameters[name], value)

    model = nn.Linear(1, 1)
    settings = LocalSettings(optimizer="sgd", lr=1.0, momentum=0.0, max_grad_norm=bound)
    data = [(torch.ones(2, 1), torch.zeros(2, 1))]
    trained = train(model, ClientInput(clone(model.state_dict())), data, Rule(), settings, TASKS["regression"])
    assert [float(trained.update[name]) for name in ("weight", "bias")] == pytest.approx(update)


def test_a_turn_of_rate_zero_is_a_turn() -> None:
    """The cosine ends at 0: the model stays, and its loss is measured all the same."""
    settings = LocalSettings(optimizer="sgd", lr=0.5, schedule="cosine", decay_rounds=2)
    trained = train(Scalar(), ClientInput({"w": torch.tensor(1.0)}, round=2), [batch(3)], SquaredRule(), settings)
    assert (float(trained.update["w"]), trained.steps, trained.loss) == (0.0, 1, 2.0)


def test_the_loss_is_the_mean_over_targets() -> None:
    """Losses 2 of three examples and 8 of one: 3.5, with weights that stay at 1."""
    settings = LocalSettings(optimizer="sgd", lr=0.5, momentum=0.0, schedule="cosine", decay_rounds=1)
    batches = [(torch.tensor([[3.0]] * 3), torch.zeros(3).long()), batch(5)]
    trained = train(Scalar(), ClientInput({"w": torch.tensor(1.0)}, round=1), batches, SquaredRule(), settings)
    assert trained.loss == 3.5
    ignored = (torch.tensor([[3.0]] * 3), torch.tensor([0, -100, -100]))  # one target, as the second batch has
    trained = train(
        Scalar(), ClientInput({"w": torch.tensor(1.0)}, round=1), [ignored, batch(5)], SquaredRule(), settings
    )
    assert trained.loss == 5.0


def test_batches_without_targets_are_left_out() -> None:
    """Also with momentum, which would move the weights on."""
    settings = LocalSettings(optimizer="sgd", lr=0.1)
    given, empty = ClientInput({"w": torch.tensor(0.0)}), batch(2.0, -100)
    trained, plain = (
        train(Scalar(), given, batches, ClientRule(), settings)
        for batches in ([empty, batch(2.0), empty], [batch(2.0)])
    )
    assert (trained.loss, trained.steps) == (plain.loss, 1)
    assert torch.equal(trained.update["w"], plain.update["w"])


def test_a_frozen_norm_computes_with_its_statistics() -> None:
    """In training, and when the statistics of a norm behind it are measured."""
    frozen = nn.BatchNorm1d(2).requires_grad_(False)
    assert frozen.running_mean is not None
    frozen.running_mean.copy_(torch.tensor([1.0, -2.0]))
    torch.manual_seed(0)
    model = nn.Sequential(frozen, nn.Linear(2, 2), nn.BatchNorm1d(2))
    state, x = clone(model.state_dict()), torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    normed = (x - torch.tensor([1.0, -2.0])) / (1 + 1e-5) ** 0.5
    settings, y = LocalSettings(optimizer="sgd", lr=0.1, momentum=0.0), torch.tensor([0, 1] * 4)
    ours = train(model, ClientInput(state), [(x, y)], ClientRule(), settings)
    rest = {name: value for name, value in state.items() if not name.startswith("0.")}
    theirs = train(model[1:], ClientInput(rest), [(normed, y)], ClientRule(), settings)
    assert ours.update.keys() == theirs.update.keys()
    for name, update in theirs.update.items():
        torch.testing.assert_close(ours.update[name], update)
    measured = measure_buffers(model, state, [x])
    behind = nn.functional.linear(normed, state["1.weight"], state["1.bias"])
    torch.testing.assert_close(measured["2.running_mean"], behind.mean(0))
    torch.testing.assert_close(measured["2.running_var"], behind.var(0))
    assert torch.equal(frozen.running_mean, torch.tensor([1.0, -2.0]))


class Recording(torch.optim.SGD):
    """An optimiser of one's own, with other defaults; remembers what it was given."""

    def __init__(self, params: object, lr: float, momentum: float = 0.5, weight_decay: float = 0.25) -> None:
        super().__init__(params, lr, momentum, weight_decay=weight_decay)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.001, 0.5, 0.25)),
        ({"lr": 0.1, "momentum": 0.3}, (0.1, 0.3, 0.25)),
        ({"weight_decay": 0.1, "nesterov": True}, (0.001, 0.5, 0.1)),  # it has no nesterov
    ],
)
def test_an_own_optimiser_gets_the_rate_and_what_was_set(given: dict[str, float], expected: tuple[float, ...]) -> None:
    settings = LocalSettings(optimizer=f"{__name__}:Recording", **given)  # type: ignore[arg-type]
    defaults = settings.make_optimizer([nn.Parameter(torch.zeros(1))]).defaults
    assert tuple(defaults[key] for key in ("lr", "momentum", "weight_decay")) == expected


def test_built_in_optimisers_get_all_they_know() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    sgd = LocalSettings(optimizer="sgd", lr=0.1, nesterov=True, weight_decay=0.2).make_optimizer(parameters).defaults
    assert (sgd["lr"], sgd["momentum"], sgd["nesterov"], sgd["weight_decay"]) == (0.1, 0.9, True, 0.2)
    for name in ("adam", "adamw"):
        defaults = LocalSettings(optimizer=name, lr=0.1).make_optimizer(parameters).defaults
        assert (defaults["lr"], defaults["weight_decay"], defaults["fused"]) == (0.1, 0.0, True)
