"""Steps that settle: FedDyn and FedBN against numbers by hand and closed forms, FedOpt by its names."""

from dataclasses import replace

import pytest
import torch

from incofl.client import ClientRule
from incofl.engine.store import ClientStore
from incofl.errors import ConfigError
from incofl.method import ServerRule
from incofl.methods import METHODS
from incofl.methods.fedbn import batch_norm
from incofl.methods.feddyn import FedDyn, FedDynServer
from incofl.tensors import Tensors
from tests.federations import run_rounds, tiny_federation
from tests.methods.quadratic import Client, Problem, on_parabola
from tests.methods.test_identities import same
from tests.methods.test_quadratic import OPTIMUM, UNEQUAL

ALPHA = 0.5


def feddyn(clients: list[Client], lr: float, alpha: float = ALPHA) -> Problem:
    server = FedDynServer(precision="float64", options=FedDyn(alpha=alpha))
    return Problem(clients, on_parabola(FedDyn)(alpha), server, lr)  # type: ignore[call-arg]


@pytest.mark.usefixtures("double")
def test_feddyn_by_hand() -> None:
    """Three rounds with two clients, K = 2, lr 0.1, against the formulas in plain numbers."""
    clients = [Client(1.0, 0.0, 2), Client(3.0, 4.0, 2)]
    problem, lr, w, h, h_i = feddyn(clients, 0.1), 0.1, 0.0, 0.0, [0.0, 0.0]
    for number in range(3):
        ends = []
        for i, client in enumerate(clients):
            y = w
            for _ in range(2):
                y -= lr * (client.curvature * (y - client.optimum) - h_i[i] + ALPHA * (y - w))
            ends.append(y)
        h_i = [h_i[i] - ALPHA * (ends[i] - w) for i in range(2)]
        h -= ALPHA * sum(end - w for end in ends) / 2
        w = sum(ends) / 2 - h / ALPHA
        assert problem.round() == pytest.approx(w, abs=1e-12), number
        assert float(problem.server.extra["h"]["w"]) == pytest.approx(h, abs=1e-12) == pytest.approx(sum(h_i) / 2)
        assert [float(problem.memories[i]["w"]) for i in range(2)] == pytest.approx(h_i, abs=1e-12)


@pytest.mark.usefixtures("double")
def test_the_first_round_of_feddyn_goes_twice_as_far() -> None:
    """One client, one step of lr 0.1 from 0 towards 1: the mean moves by 0.1, and -h / alpha by 0.1 more."""
    assert feddyn([Client(1.0, 1.0, 1)], 0.1).round() == pytest.approx(0.2, abs=1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("clients", [UNEQUAL, [replace(c, steps=s) for c, s in zip(UNEQUAL, (2, 7, 4), strict=True)]])
def test_feddyn_settles_at_the_common_optimum(clients: list[Client]) -> None:
    """Whatever the number of steps; there h_i is the gradient of client i, h = 0, and FedAvg is elsewhere."""
    problem, fedavg = feddyn(clients, 0.05, 2.0), Problem(clients, on_parabola(ClientRule)(), ServerRule(), 0.05)
    for _ in range(600):
        problem.round()
        fedavg.round()
    assert problem.w == pytest.approx(OPTIMUM, abs=1e-8)
    assert float(problem.server.extra["h"]["w"]) == pytest.approx(0, abs=1e-8)
    gradients = [client.curvature * (OPTIMUM - client.optimum) for client in clients]
    assert [float(problem.memories[i]["w"]) for i in range(3)] == pytest.approx(gradients, abs=1e-7)
    assert abs(fedavg.w - OPTIMUM) > 0.3


@pytest.mark.usefixtures("double")
def test_feddyn_settles_with_partial_participation() -> None:
    problem = feddyn(UNEQUAL, 0.05, 2.0)
    for number in range(1500):
        problem.round([number % 3, (number + 1) % 3])
    assert problem.w == pytest.approx(OPTIMUM, abs=1e-3)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_h_is_the_mean_of_the_clients(weighting: str) -> None:
    """At every position over those of the population that hold it, after several rounds of parts of the clients."""
    settings = ["method=heterodyn", f"aggregate.weighting={weighting}", "aggregate.precision=float64"]
    federation = tiny_federation(*settings, "data.partition=iid")  # equal weights, or the sum would be weighted
    store = ClientStore(federation)
    server, layout = run_rounds(federation, 3, store=store)[-1], federation.model.layout
    mean = {name: torch.zeros(layout.shapes[name]) for name in layout.parameters}
    for client, (level, round) in store.manifest.items():
        piece = federation.slice(level, round)
        piece.put(store.get(client, piece), mean)
    assert len(store.manifest) > 4
    for name, total in mean.items():
        assert torch.allclose(server.extra["h"][name], total / server.holders(name), atol=1e-12), name


@pytest.mark.usefixtures("double")
def test_h_of_a_size_is_the_mean_of_its_own_clients() -> None:
    federation = tiny_federation("method=feddyn", "aggregate.precision=float64", "data.partition=iid")
    store = ClientStore(federation)
    server = run_rounds(federation, 3, store=store)[-1]
    for level in range(3):
        total, clients = torch.zeros(federation.model.layout.shapes["conv1.weight"]), federation.levels.counts[level]
        for client, (held, round) in store.manifest.items():
            total += store.get(client, federation.slice(held, round))["conv1.weight"] if held == level else 0
        assert torch.allclose(server.extra[f"h-{level}"]["conv1.weight"], total / clients, atol=1e-12)
        assert bool(total.any())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("population", "h", "w"), [("holders", -0.1, 0.4), ("all", -0.025, 0.25)])
def test_a_population_of_all_shrinks_h(population: str, h: float, w: float) -> None:
    """One client of four holds w and moves it by 0.2: h = -0.5 * 0.2, or a quarter of that; w = 0.2 - h / 0.5."""
    problem = feddyn([Client(1.0, 2.0, 1)], 0.1)
    options = FedDyn(alpha=ALPHA, population=population)  # type: ignore[arg-type]
    problem.rule_of_server = FedDynServer(precision="float64", options=options)
    piece, count = problem.server.population[0]
    others = replace(piece, index={}, shapes={}), 3
    problem.server = replace(problem.server, population={0: (piece, count), 1: others})
    assert problem.round() == pytest.approx(w, abs=1e-12)
    assert float(problem.server.extra["h"]["w"]) == pytest.approx(h, abs=1e-12)


def test_inco_mixes_the_mean_and_not_h() -> None:
    """The corrections are the same with InCo and without: h does not see what the server does to the mean."""
    with_inco, without = (run_rounds(tiny_federation(f"method={name}"), 1)[-1] for name in ("incodyn", "heterodyn"))
    assert same(dict(with_inco.extra["h"]), dict(without.extra["h"]))
    assert not same(with_inco.shared, without.shared)


def test_separate_sizes_have_an_h_each() -> None:
    server = run_rounds(tiny_federation("method=feddyn", "cohort=10"), 1, cohort=10)[-1]
    assert server.extra.keys() == {"h-0", "h-1", "h-2"}
    assert server.extra["h-0"].keys() < server.extra["h-2"].keys()


def test_a_client_keeps_its_batch_norm() -> None:
    """The second turn has rate 0: it starts from its own scale and shift, not from the mean, and keeps them."""
    schedule = ["local.schedule=cosine", "local.decay_rounds=1"]
    federation = tiny_federation("method=heterobn", "data.clients=4", *schedule)
    store = ClientStore(federation)
    first = run_rounds(federation, 1, store=store)[-1]
    kept: dict[int, Tensors] = {c: store.get(c, federation.slice(*store.manifest[c])) for c in range(4)}
    names = batch_norm(federation.model.layout) & federation.model.layout.parameters
    second = run_rounds(federation, 1, server=first, store=store)[-1]
    assert all(store.manifest[c][1] == 1 for c in range(4))
    for client, before in kept.items():
        after = store.get(client, federation.slice(*store.manifest[client]))
        assert after.keys() == before.keys() == batch_norm(federation.model.layout) & after.keys()
        assert all(torch.equal(after[name], before[name]) for name in before.keys() & names)
    stem = torch.stack([own["bn1.weight"] for own in kept.values()])
    assert torch.allclose(second.shared["bn1.weight"], stem.mean(0), atol=1e-6)
    assert not torch.equal(kept[0]["bn1.weight"], kept[1]["bn1.weight"])


@pytest.mark.usefixtures("double")
def test_fedbn_with_one_client_is_fedavg_and_with_two_is_not() -> None:
    for clients, equal in ((1, True), (2, False)):
        settings = ["split.levels=1", f"data.clients={clients}", "cohort=1", "aggregate.precision=float64"]
        a, b = (
            run_rounds(tiny_federation(f"method={name}", *settings), 3, cohort=clients)[-1].state(0)
            for name in ("heterobn", "heteroavg")
        )
        assert all(torch.allclose(a[name], b[name], atol=1e-9) for name in a) == equal


def test_fedbn_needs_batch_norm() -> None:
    with pytest.raises(ConfigError, match="method: fedbn needs a model with batch norm"):
        tiny_federation("method=heterobn", "model.name=tiny-vit", "model.patch=2")
    with pytest.raises(ConfigError, match="buffers: got 'static', expected another: fedbn"):
        tiny_federation("method=fedbn", "buffers=static")


@pytest.mark.parametrize(("name", "optimizer"), [("avgm", "momentum"), ("adam", "adam"), ("yogi", "yogi")])
def test_fedopt_is_fedavg_with_an_optimiser_after_all_else(name: str, optimizer: str) -> None:
    for form in ("fed", "hetero", "inco"):
        short, long = METHODS[f"{form}{name}"], METHODS[f"{form}avg+{optimizer}"]
        assert short == replace(long, name=short.name, summary=short.summary)
    assert [t.name for t in METHODS[f"hetero{name}+inco"].transforms] == ["inco", optimizer]
