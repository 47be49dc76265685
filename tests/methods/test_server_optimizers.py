"""Optimisers on the server: hand-computed steps, what nobody held, private layers, schedules."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import incofl
from incofl import ServerAdam, ServerMomentum, ServerSchedule, ServerYogi
from incofl.aggregate import CoveredMean
from incofl.client import LocalSettings
from incofl.engine.build import build_method
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.server import Changes, Server
from incofl.tensors import Tensors
from incofl.transform import Context, UpdateTransform
from tests.federations import run_rounds, tiny_federation

LAYOUT = Layout({"w": (None,)}, {"w": (2,)}, (), {}, frozenset())


def steps(
    transform: UpdateTransform, updates: list[list[float]], held: list[list[float]] | None = None
) -> list[Tensor]:
    """The updates after a transform, round by round, with its state passed on."""
    state: Tensors = transform.init(LAYOUT)
    results = []
    for round, values in enumerate(updates):
        weight = {} if held is None else {"w": torch.tensor(held[round])}
        update, state, _ = transform({"w": torch.tensor(values)}, state, Context(LAYOUT, round, weight=weight))
        results.append(update["w"].clone())
    return results


def test_momentum_by_hand() -> None:
    """beta 0.9, lr 0.5: m = 1, then 0.9 + 2 = 2.9; steps 0.5 and 1.45."""
    first, second = steps(ServerMomentum(lr=0.5, beta=0.9), [[1.0, -1.0], [2.0, -2.0]])
    assert first.tolist() == pytest.approx([0.5, -0.5])
    assert second.tolist() == pytest.approx([1.45, -1.45])


def test_adam_by_hand() -> None:
    """U = 2: m = 0.2, v = 0.04, step 0.2 / (0.2 + 0.1) = 2/3. U = 0: m = 0.18, v = 0.0396, 0.18 / (0.19900 + 0.1)."""
    first, second = steps(ServerAdam(lr=1.0, beta1=0.9, beta2=0.99, tau=0.1), [[2.0, 0.0], [0.0, 0.0]])
    assert first.tolist() == pytest.approx([2 / 3, 0.0])
    assert second.tolist() == pytest.approx([0.18 / (math.sqrt(0.0396) + 0.1), 0.0])


def test_yogi_by_hand() -> None:
    """U = 2 from v = 0: v = 0 - 0.01 * 4 * (-1) = 0.04, as Adam. U = 0.1: v = 0.04 - 0.01 * 0.01 * (+1) = 0.0399."""
    first, second = steps(ServerYogi(lr=1.0, tau=0.1), [[2.0, 0.0], [0.1, 0.0]])
    assert float(first[0]) == pytest.approx(2 / 3)
    m = 0.9 * 0.2 + 0.1 * 0.1
    assert float(second[0]) == pytest.approx(m / (math.sqrt(0.0399) + 0.1))
    adam = steps(ServerAdam(lr=1.0, tau=0.1), [[2.0, 0.0], [0.1, 0.0]])[1]
    assert float(adam[0]) != pytest.approx(float(second[0]), rel=1e-4)


@given(u=st.floats(0.01, 3), rounds=st.integers(1, 12), beta1=st.floats(0, 0.95), beta2=st.floats(0.93, 0.999))
def test_a_constant_update_in_closed_form(u: float, rounds: int, beta1: float, beta2: float) -> None:
    """m = (1 - b1^t) U in both; Adam's v = (1 - b2^t) U^2, Yogi's, as long as it is below U^2, t (1 - b2) U^2."""
    m = (1 - beta1**rounds) * u
    for kind, v in ((ServerAdam, (1 - beta2**rounds) * u * u), (ServerYogi, rounds * (1 - beta2) * u * u)):
        last = steps(kind(lr=0.5, beta1=beta1, beta2=beta2, tau=0.01), [[u, -u]] * rounds)[-1]
        expected = 0.5 * m / (math.sqrt(v) + 0.01)
        assert last.tolist() == pytest.approx([expected, -expected], rel=1e-4)


@pytest.mark.parametrize("transform", [ServerMomentum(), ServerAdam(), ServerYogi()])
def test_what_nobody_held_keeps_its_moments_and_its_value(transform: UpdateTransform) -> None:
    """Held in rounds 0 and 2 only: as two rounds in a row."""
    gap = steps(transform, [[1.0, 1.0], [5.0, 0.0], [2.0, 2.0]], held=[[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    straight = steps(transform, [[1.0, 1.0], [2.0, 2.0]])
    assert float(gap[2][1]) == float(straight[1][1])
    servers = [Server(LAYOUT, {"w": torch.tensor([1.0, 2.0])})]
    for second in (1.0, 0.0, 0.0):  # holders of the second position, which thus moves in the first round only
        update = CoveredMean({"w": torch.tensor([3.0, 3.0 * second])}, {"w": torch.tensor([1.0, second])})
        changes, _ = Changes(update, states=servers[-1].states).transformed(transform, servers[-1])
        servers.append(servers[-1].advance(changes))
        assert list(servers[-1].states) == [transform.name]
    moments = [server.states[transform.name] for server in servers[1:]]
    for before, after in itertools.pairwise(moments):
        for name in before:
            assert float(before[name][0]) != float(after[name][0])
            assert float(before[name][1]) == float(after[name][1]) != 0
    assert len({float(server.shared["w"][0]) for server in servers}) == 4
    assert len({float(server.shared["w"][1]) for server in servers}) == 2


def test_the_state_given_is_not_changed() -> None:
    state = {"m/w": torch.ones(2), "v/w": torch.ones(2)}
    ServerAdam()({"w": torch.ones(2)}, state, Context(LAYOUT))
    assert all(torch.equal(value, torch.ones(2)) for value in state.values())


def test_levels_with_models_of_their_own_have_moments_of_their_own() -> None:
    servers = run_rounds(tiny_federation("method=fedavg+adam"), 2)
    assert {name.partition("-")[0] for name in servers[-1].states} == {"adam", "norms"}
    assert len(servers[-1].states) > 2


@pytest.mark.parametrize("name", ["momentum", "adam", "yogi"])
def test_every_optimiser_differs_from_the_plain_method(name: str) -> None:
    plain, ours = (run_rounds(tiny_federation(f"method={m}"), 2)[-1] for m in ("incoavg", f"incoavg+{name}"))
    assert any(not torch.equal(plain.shared[n], ours.shared[n]) for n in plain.layout.parameters)
    assert ours.states


@pytest.mark.parametrize(
    ("options", "rounds", "expected"),
    [
        ({}, (0, 7), (1.0, 1.0)),
        ({"schedule": "step", "decay": 0.5, "decay_every": 2}, (0, 1, 2, 5), (1.0, 1.0, 0.5, 0.25)),
        ({"schedule": "cosine", "decay_rounds": 4}, (0, 1, 2, 4, 9), (1.0, (2 + 2**0.5) / 4, 0.5, 0.0, 0.0)),
        ({"schedule": "cosine", "decay_rounds": 4, "decay_to": 0.2}, (0, 2, 4), (1.0, 0.6, 0.2)),
    ],
)
def test_schedules(options: dict[str, Any], rounds: tuple[int, ...], expected: tuple[float, ...]) -> None:
    """On the server and, as learning rates, on clients."""
    server, local = ServerSchedule(lr=2.0, **options), LocalSettings(lr=0.5, **options)
    for round, factor in zip(rounds, expected, strict=True):
        update, _, _ = server({"w": torch.tensor([3.0])}, {}, Context(LAYOUT, round))
        assert float(update["w"]) == pytest.approx(6.0 * factor)
        assert local.in_round(round).lr == pytest.approx(0.5 * factor)


def test_a_schedule_reaches_the_clients_and_the_optimisers() -> None:
    constant, decayed = (
        run_rounds(tiny_federation("method=heteroavg", *more), 2)
        for more in ([], ["local.schedule=step", "local.decay=0.5", "local.decay_every=1"])
    )
    name = next(iter(constant[0].layout.parameters))
    assert torch.equal(constant[1].shared[name], decayed[1].shared[name])  # the first round is the same
    assert not torch.equal(constant[2].shared[name], decayed[2].shared[name])
    optimisers = ServerAdam(), ServerAdam(schedule="step", decay=0.5, decay_every=1)
    whole, half = (steps(optimiser, [[1.0, 1.0]] * 2) for optimiser in optimisers)
    assert float(half[1][0]) == pytest.approx(0.5 * float(whole[1][0]))


def test_what_follows_from_the_run_is_filled_in() -> None:
    config = incofl.make_config({"rounds": 8, "server": {"schedule": "cosine"}, "local": {"schedule": "cosine"}})
    assert config.methods["server"].decay_rounds == config.local.decay_rounds == 8
    with pytest.raises(ConfigError, match="expected a number outside of a config"):
        ServerSchedule(lr="1/epochs")({"w": torch.ones(1)}, {}, Context(LAYOUT))


def test_a_schedule_of_your_own_takes_the_place_of_the_common_one() -> None:
    """Which ``[server]`` sets, where the method has it."""
    halved = incofl.METHODS["incoavg"].then(ServerSchedule(schedule="step", decay=0.5, decay_every=1))
    assert halved.name == "incoavg+schedule"
    method = build_method(incofl.make_config({"server": {"lr": 0.25}}, method=halved))
    own = ServerSchedule(lr=0.25, schedule="step", decay=0.5, decay_every=1)
    assert method.transforms == (*incofl.METHODS["incoavg"].transforms, own)


def test_two_transforms_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two transforms of heteroavg\\+adam\\+adam have the name 'adam'"):
        incofl.METHODS["heteroavg"].then(ServerAdam()).then(ServerAdam(lr=1.0))


def test_optimisers_of_the_client() -> None:
    parameters = list(torch.nn.Linear(1, 1).parameters())
    assert isinstance(LocalSettings(optimizer="adamw").make_optimizer(parameters), torch.optim.AdamW)
    rms = LocalSettings(optimizer="torch.optim:RMSprop", lr=0.25).make_optimizer(parameters)
    assert isinstance(rms, torch.optim.RMSprop)
    assert (rms.defaults["lr"], rms.defaults["momentum"]) == (0.25, 0)
    with pytest.raises(ConfigError, match="made a Identity, expected a torch"):
        LocalSettings(optimizer="torch.nn:Identity").make_optimizer(parameters)
