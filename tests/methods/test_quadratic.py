"""Methods on parabolas, against closed forms: what Scaffold and FedNova are for, and that FedAvg needs them."""

import dataclasses

import pytest
import torch

from incofl.client import ClientInput, ClientRule, LocalSettings, train
from incofl.method import ServerRule
from incofl.methods.fednova import FedNova
from incofl.methods.fedprox import FedProx
from incofl.methods.scaffold import Scaffold, ScaffoldServer
from tests.methods.quadratic import Client, Point, Problem, on_parabola

pytestmark = pytest.mark.usefixtures("double")

UNEQUAL = [Client(1.0, 0.0, 5), Client(4.0, 10.0, 5), Client(2.0, -3.0, 5)]
OPTIMUM = (1 * 0 + 4 * 10 + 2 * -3) / (1 + 4 + 2)
FLOAT64 = {"precision": "float64"}


def pull(client: Client, lr: float) -> float:
    """How far a client's steps move a point towards its optimum: 1 - (1 - lr a)^K."""
    return 1 - (1 - lr * client.curvature) ** client.steps


def test_fedavg_stays_biased() -> None:
    """Its fixed point is the mean of the optima weighted by how far each client gets, not by curvature."""
    problem = Problem(UNEQUAL, on_parabola(ClientRule)(), ServerRule(**FLOAT64), 0.1)  # type: ignore[arg-type]
    for _ in range(200):
        problem.round()
    weights = [pull(client, 0.1) for client in UNEQUAL]
    fixed = sum(w * c.optimum for w, c in zip(weights, UNEQUAL, strict=True)) / sum(weights)
    assert problem.w == pytest.approx(fixed, abs=1e-10)
    assert abs(fixed - OPTIMUM) > 0.5


def test_scaffold_converges_to_the_true_optimum() -> None:
    problem = Problem(UNEQUAL, on_parabola(Scaffold)(), ScaffoldServer(**FLOAT64), 0.1)  # type: ignore[arg-type]
    for _ in range(400):
        problem.round()
    assert problem.w == pytest.approx(OPTIMUM, abs=1e-8)


def test_scaffold_converges_with_partial_participation_and_unequal_steps() -> None:
    clients = [Client(1.0, 0.0, 2), Client(4.0, 10.0, 7), Client(2.0, -3.0, 4)]
    problem = Problem(clients, on_parabola(Scaffold)(), ScaffoldServer(**FLOAT64), 0.05)  # type: ignore[arg-type]
    for number in range(1200):
        problem.round([number % 3, (number + 1) % 3])
    assert problem.w == pytest.approx(OPTIMUM, abs=1e-3)


def test_scaffold_by_hand() -> None:
    """Two rounds with two clients, K = 2, lr 0.1, against the formulas in plain numbers."""
    clients = [Client(1.0, 0.0, 2), Client(3.0, 4.0, 2)]
    problem = Problem(clients, on_parabola(Scaffold)(), ScaffoldServer(**FLOAT64), 0.1)  # type: ignore[arg-type]
    fedavg = Problem(clients, on_parabola(ClientRule)(), ServerRule(**FLOAT64), 0.1)  # type: ignore[arg-type]
    lr, w, c, c_i = 0.1, 0.0, 0.0, [0.0, 0.0]
    for number in range(2):
        ends = []
        for i, client in enumerate(clients):
            y = w
            for _ in range(2):
                y -= lr * (client.curvature * (y - client.optimum) + c - c_i[i])
            ends.append(y)
        new = [c_i[i] - c + (w - ends[i]) / (2 * lr) for i in range(2)]
        c += sum(new[i] - c_i[i] for i in range(2)) / 2
        w, c_i = sum(ends) / 2, new
        assert problem.round() == pytest.approx(w, abs=1e-12)
        assert float(problem.server.extra["variate"]["w"]) == pytest.approx(c, abs=1e-12)
        assert [float(problem.memories[i]["w"]) for i in range(2)] == pytest.approx(c_i, abs=1e-12)
        assert (fedavg.round() == pytest.approx(w, abs=1e-12)) == (number == 0)  # the second round differs


def test_scaffold_uses_the_rate_of_the_round() -> None:
    """Rate 0.1 in round 0, 0.05 in round 1, 0 afterwards, where nothing moves and the variates stay."""
    client, c, c_i = Client(1.0, 4.0, 2), 0.5, -1.0
    settings = LocalSettings(optimizer="sgd", lr=0.1, momentum=0.0, schedule="cosine", decay_rounds=2)
    batch = torch.tensor([client.curvature, client.optimum]), torch.zeros(1)
    for number, lr in enumerate((0.1, 0.05, 0.0, 0.0)):
        y = 0.0
        for _ in range(2):
            y -= lr * (y - 4.0 + c - c_i)
        new = c_i - c - y / (2 * lr) if lr else c_i
        state, extra, memory = ({"w": torch.tensor([value])} for value in (0.0, c, c_i))
        given = ClientInput(state, extra, memory, round=number)
        upload = train(Point(), given, [batch] * 2, on_parabola(Scaffold)(), settings)
        assert float(upload.update["w"]) == pytest.approx(y, abs=1e-12)
        assert float(upload.memory["w"]) == pytest.approx(new, abs=1e-12)
        assert float(upload.extra["w"]) == pytest.approx(new - c_i, abs=1e-12)
    first = train(Point(), dataclasses.replace(given, memory={}), [batch], on_parabola(Scaffold)(), settings)
    assert float(first.memory["w"]) == float(first.extra["w"]) == 0


def test_scaffolds_variate_does_not_weigh_by_examples() -> None:
    """One step from 0 towards 2 and 4, with 1 and 3 examples: w = 0.1 (2 + 3 * 4) / 4, but c = -(2 + 4) / 2."""
    clients = [Client(1.0, 2.0, 1), Client(1.0, 4.0, 1, examples=3)]
    problem = Problem(clients, on_parabola(Scaffold)(), ScaffoldServer("samples", "float64"), 0.1)
    assert problem.round() == pytest.approx(0.35, abs=1e-12)
    assert float(problem.server.extra["variate"]["w"]) == pytest.approx(-3.0, abs=1e-12)


def test_scaffold_first_variate_is_the_mean_gradient() -> None:
    """One client, zero variates: c_i+ is the mean of the gradients along its path."""
    client = Client(2.0, 3.0, 3)
    problem = Problem([client], on_parabola(Scaffold)(), ScaffoldServer(**FLOAT64), 0.1)  # type: ignore[arg-type]
    gradients, y = [], 0.0
    for _ in range(3):
        gradients.append(2.0 * (y - 3.0))
        y -= 0.1 * gradients[-1]
    problem.round()
    assert float(problem.memories[0]["w"]) == pytest.approx(sum(gradients) / 3, abs=1e-12)


def test_scaffold_with_one_client_is_fedavg() -> None:
    """Then c = c_i at all times, and no step is corrected."""
    clients = [Client(2.0, 3.0, 3)]
    scaffold = Problem(clients, on_parabola(Scaffold)(), ScaffoldServer(**FLOAT64), 0.1)  # type: ignore[arg-type]
    fedavg = Problem(clients, on_parabola(ClientRule)(), ServerRule(**FLOAT64), 0.1)  # type: ignore[arg-type]
    for _ in range(3):
        assert scaffold.round() == pytest.approx(fedavg.round(), abs=1e-12)


def test_unequal_steps_bias_fedavg_and_not_fednova() -> None:
    """Equal curvature: the optimum is the mean of the optima. FedAvg leans to who takes more steps."""
    clients = [Client(1.0, 0.0, 1), Client(1.0, 10.0, 9)]
    lr = 0.01
    fedavg = Problem(clients, on_parabola(ClientRule)(), ServerRule(**FLOAT64), lr)  # type: ignore[arg-type]
    fednova = Problem(clients, on_parabola(FedNova)(), ServerRule(**FLOAT64), lr)  # type: ignore[arg-type]
    for _ in range(420):
        fedavg.round()
        fednova.round()
    weights = [pull(client, lr) for client in clients]
    biased = weights[1] * 10 / sum(weights)
    normalised = [pull(client, lr) / client.steps for client in clients]
    assert fedavg.w == pytest.approx(biased, abs=1e-6)
    assert biased == pytest.approx(9, abs=0.1)
    assert fednova.w == pytest.approx(normalised[1] * 10 / sum(normalised), abs=1e-6)
    assert fednova.w == pytest.approx(5, abs=0.11)


def test_fednova_by_hand() -> None:
    """From w = 0 with curvature 1 and lr 0.5: two steps to 3 reach 2.25, one step to 8 reaches 4.

    d = 2.25/2 and 4/1, mean 2.5625, mean length 1.5: 3.84375; FedAvg: 3.125.
    """
    clients = [Client(1.0, 3.0, 2), Client(1.0, 8.0, 1)]
    fednova = Problem(clients, on_parabola(FedNova)(), ServerRule(**FLOAT64), 0.5)  # type: ignore[arg-type]
    fedavg = Problem(clients, on_parabola(ClientRule)(), ServerRule(**FLOAT64), 0.5)  # type: ignore[arg-type]
    assert fednova.round() == pytest.approx(3.84375, abs=1e-12)
    assert fedavg.round() == pytest.approx(3.125, abs=1e-12)


def test_fednova_weighs_by_examples() -> None:
    """The same with three times the examples for the second: d = (1.125 + 12)/4, length 1.25: 4.1015625."""
    clients = [Client(1.0, 3.0, 2), Client(1.0, 8.0, 1, examples=3)]
    problem = Problem(clients, on_parabola(FedNova)(), ServerRule("samples", "float64"), 0.5)
    assert problem.round() == pytest.approx(4.1015625, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "steps", "length"),
    [
        (LocalSettings(optimizer="sgd", momentum=0.9), 10, 41.381),
        (LocalSettings(optimizer="sgd", momentum=0.0), 10, 10.0),
        (LocalSettings(optimizer="adam"), 10, 10.0),
    ],
)
def test_length_of_a_path(settings: LocalSettings, steps: int, length: float) -> None:
    assert FedNova().normaliser(settings, steps) == pytest.approx(length, abs=5e-4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_length_of_momentum_is_the_sum_of_its_weights(nesterov: bool) -> None:
    """Of gradient k of tau, heavy-ball SGD applies 1 + rho + ... + rho^(tau - k), Nesterov's one term more.

    That is how far torch's optimiser moves in tau steps of gradient -1 and rate 1.
    """
    rho, tau = 0.9, 7
    weights = [sum(rho**j for j in range(tau - k + 1 + nesterov)) for k in range(1, tau + 1)]
    settings = LocalSettings(optimizer="sgd", momentum=rho, nesterov=nesterov, lr=1.0)
    assert FedNova().normaliser(settings, tau) == pytest.approx(sum(weights), abs=1e-12)
    point = torch.nn.Parameter(torch.zeros(1))
    optimizer = settings.make_optimizer([point])
    for _ in range(tau):
        point.grad = -torch.ones(1)
        optimizer.step()
    assert float(point.detach()) == pytest.approx(sum(weights), abs=1e-12)


def test_fedprox_by_hand() -> None:
    """w = 0, curvature 1, optimum 1, lr 0.1, mu = 2: w1 = 0.1; gradient -0.9 + 2 * 0.1 = -0.7: w2 = 0.17."""
    problem = Problem([Client(1.0, 1.0, 2)], on_parabola(FedProx)(2.0), ServerRule(**FLOAT64), 0.1)  # type: ignore[arg-type, call-arg]
    assert problem.round() == pytest.approx(0.17, abs=1e-12)


def test_the_proximal_term_vanishes_in_the_first_step() -> None:
    one_step = [Client(1.0, 1.0, 1)]
    near = Problem(one_step, on_parabola(FedProx)(1e6), ServerRule(**FLOAT64), 0.1)  # type: ignore[arg-type, call-arg]
    free = Problem(one_step, on_parabola(ClientRule)(), ServerRule(**FLOAT64), 0.1)  # type: ignore[arg-type]
    assert near.round() == free.round()
    assert torch.get_default_dtype() == torch.float64


def test_a_global_population_shrinks_the_variate() -> None:
    """One client holds w, three of another level do not: c is the client's variate, or a quarter of it."""
    from incofl.methods.scaffold import Scaffold as Options

    clients = [Client(1.0, 2.0, 1)]
    for population, expected in (("holders", -2.0), ("all", -0.5)):
        rule = ScaffoldServer(precision="float64", options=Options(population=population))  # type: ignore[arg-type]
        problem = Problem(clients, on_parabola(Scaffold)(), rule, 0.1)
        piece, count = problem.server.population[0]
        empty = dataclasses.replace(piece, index={}, shapes={})
        problem.server = dataclasses.replace(problem.server, population={0: (piece, count), 1: (empty, 3)})
        problem.round()
        assert float(problem.server.extra["variate"]["w"]) == pytest.approx(expected, abs=1e-12)
