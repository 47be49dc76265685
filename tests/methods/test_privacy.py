"""Client-level differential privacy: sums that hide a client, where all hold a position and where few do."""

import dataclasses
import functools
import json
import math
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import incofl
from incofl.aggregate import spread
from incofl.engine.federation import Federation
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError
from incofl.method import Method, ServerRule
from incofl.methods import METHODS
from incofl.methods.privacy import STATE, Privacy, epsilon_of, noise_for
from incofl.server import Server
from incofl.tensors import Tensors
from incofl.upload import Upload
from tests.federations import tiny_config, tiny_federation
from tests.shell import Shell

dp = pytest.importorskip("dp_accounting")
PLAIN = ('model.options={norm="group"}', "method=heteroavg+privacy", "cohort=4")


def private(federation: Federation, **changes: object) -> tuple[ServerRule, Server]:
    """The rule of a federation with other options, which may be without noise, and a server before the first round."""
    rule = federation.method.server
    mean = dataclasses.replace(rule.mean, **changes)
    return dataclasses.replace(rule, mean=mean), mean.start(federation.start())


@pytest.fixture(scope="module")
def federation() -> Federation:
    return shared_federation()


def upload(federation: Federation, client: int, level: int, value: float) -> Upload:
    piece = federation.slice(level, 0)
    names = federation.model.layout.parameters & piece.index.keys()
    return Upload(client, level, piece, {n: torch.full(piece.shapes[n], value) for n in names}, {}, 10, 1)


def step(rule: ServerRule, server: Server, uploads: list[Upload]) -> Tensors:
    """How far a round moves the parameters."""
    after = server.advance(rule.mean.aggregate(rule, server, [uploads]))
    return {name: after.shared[name] - server.shared[name] for name in server.layout.parameters}


def expected_holders(federation: Federation, name: str) -> torch.Tensor:
    held = [(s, float(n)) for s, n in federation.population.values() if name in s.index]
    return spread(federation.model.layout, name, held) * 4 / 10


def test_the_mean_by_hand(federation: Federation) -> None:
    """Levels of 4, 3 and 3 clients; 4 of 10 take part: 4 are expected where all hold, 1.2 where the largest do."""
    rule, server = private(federation, noise=0.0, clip=1e9)
    moved = step(rule, server, [upload(federation, 0, 0, 1.0), upload(federation, 9, 2, 2.0)])
    counts = sorted(
        {round(float(v), 6) for name in moved for v in set(expected_holders(federation, name).flatten().tolist())}
    )
    assert counts[0] == pytest.approx(1.2)
    assert counts[-1] == pytest.approx(4.0)
    for name, change in moved.items():
        holders = expected_holders(federation, name).expand_as(change)
        sums = torch.where(holders > 3.9, 3.0, 2.0)  # both clients, or the larger alone
        torch.testing.assert_close(change, (sums / holders).float())


def test_a_long_upload_is_shortened_as_a_whole(federation: Federation) -> None:
    rule, server = private(federation, noise=0.0, clip=0.5)
    moved = step(rule, server, [upload(federation, 9, 2, 7.0)])
    total = sum(float((change * expected_holders(federation, n)).square().sum()) for n, change in moved.items())
    assert math.sqrt(total) == pytest.approx(0.5, rel=1e-5)
    short = step(rule, server, [upload(federation, 9, 2, 1e-5)])
    assert all(
        torch.allclose(change * expected_holders(federation, n), torch.tensor(1e-5, dtype=torch.float64), rtol=1e-3)
        for n, change in short.items()
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2), st.floats(-1e6, 1e6), st.lists(st.floats(-10, 10), max_size=3))
def test_no_client_moves_the_sums_by_more_than_the_bound(level: int, value: float, others: list[float]) -> None:
    """With the same noise: the sums with and without a client, whatever it sends and whoever else is there."""
    federation = shared_federation()
    rule, server = private(federation, noise=1.0, clip=0.7)
    rest = [upload(federation, client, client % 3, each) for client, each in enumerate(others)]
    one, other = step(rule, server, rest), step(rule, server, [*rest, upload(federation, 9, level, value)])
    moved = sum(float(((other[n] - one[n]) * expected_holders(federation, n)).square().sum()) for n in one)
    assert math.sqrt(moved) <= 0.7 * (1 + 1e-3)


@functools.cache
def shared_federation() -> Federation:
    return tiny_federation(*PLAIN, "privacy.noise=1")


@pytest.mark.parametrize("quantile", [None, 0.5])
def test_the_noise_has_the_stated_scale_wherever_it_is(federation: Federation, quantile: float | None) -> None:
    """At positions that all, some and one class of clients hold, also if nobody of them came: z C over the holders."""
    z, c = 1.5, 0.3
    rule, server = private(federation, noise=z, clip=c, quantile=quantile, count_noise=2.0)
    draws: dict[float, list[torch.Tensor]] = {}
    for round_ in range(25):
        for name, change in step(rule, dataclasses.replace(server, round=round_), []).items():
            holders = expected_holders(federation, name).expand_as(change)
            for number in set(holders.flatten().tolist()):
                draws.setdefault(round(float(number), 6), []).append(change[holders == number])
    effective = z if quantile is None else (z**-2 - 4.0**-2) ** -0.5  # the count takes its share
    assert len(draws) >= 3
    for number, parts in draws.items():
        values = torch.cat(parts).double() * number / (effective * c)
        assert len(values) > 1000
        error = 4 / math.sqrt(2 * len(values))  # four standard errors of a standard deviation
        assert float(values.std()) == pytest.approx(1, abs=error)
        assert abs(float(values.mean())) < 4 / math.sqrt(len(values))


def test_epsilon_is_that_of_dp_accounting() -> None:
    rdp, relation = dp.rdp, dp.NeighboringRelation
    poisson = rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
    poisson.compose(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.1)), 30)
    assert epsilon_of(1.1, 1e-5, "poisson", 5, 100, 30) == pytest.approx(poisson.get_epsilon(1e-5), rel=1e-12)
    fixed = rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    # A client that is replaced moves the sum by up to twice the bound.
    fixed.compose(dp.SampledWithoutReplacementDpEvent(100, 5, dp.GaussianDpEvent(0.55)), 30)
    assert epsilon_of(1.1, 1e-5, "fixed", 5, 100, 30) == pytest.approx(fixed.get_epsilon(1e-5), rel=1e-12)
    assert epsilon_of(1.1, 1e-5, "fixed", 5, 100, 30) > epsilon_of(1.1, 1e-5, "poisson", 5, 100, 30)
    # All clients in every round: the Gaussian mechanism, whose epsilon is below the classical bound.
    whole = epsilon_of(4.0, 1e-5, "poisson", 100, 100, 1)
    assert 1.0 < whole < math.sqrt(2 * math.log(1.25e5)) / 4
    assert epsilon_of(4.0, 1e-5, "poisson", 100, 100, 0) == 0


def test_the_least_noise_for_a_budget() -> None:
    noise = noise_for(3.0, 1e-5, "poisson", 10, 1000, 40)
    assert (
        epsilon_of(noise, 1e-5, "poisson", 10, 1000, 40) <= 3 < epsilon_of(0.99 * noise, 1e-5, "poisson", 10, 1000, 40)
    )


def test_the_bound_follows_a_quantile(federation: Federation) -> None:
    """Three of four expected uploads within the bound, no noise: C exp(-0.2 (1/2 + (3 - 4/2)/4 - 1/2)) = C e^-0.05."""
    rule, server = private(federation, noise=0.0, clip=1.0, quantile=0.5, clip_rate=0.2)
    uploads = [upload(federation, k, 0, value) for k, value in enumerate((1e-6, 1e-6, 1e-6, 9.0))]
    after = server.advance(rule.mean.aggregate(rule, server, [uploads]))
    assert float(after.extra[STATE]["clip"]) == pytest.approx(math.exp(-0.05))


def test_the_count_within_the_bound_may_be_of_any_cohort(federation: Federation) -> None:
    """Three uploads where four are expected, two of them short: 1/2 + (2 - 3/2)/4 = 5/8 are within the bound."""
    rule, server = private(federation, noise=0.0, clip=1.0, quantile=0.25, clip_rate=0.2)
    uploads = [upload(federation, k, 0, value) for k, value in enumerate((1e-6, 1e-6, 9.0))]
    after = server.advance(rule.mean.aggregate(rule, server, [uploads]))
    assert float(after.extra[STATE]["clip"]) == pytest.approx(math.exp(-0.2 * (5 / 8 - 1 / 4)))


def test_the_count_has_the_stated_noise(federation: Federation) -> None:
    """Nobody came: the bound moves by the noise of the count alone, of deviation s = 3, over four expected clients."""
    rule, server = private(federation, noise=2.0, clip=1.0, quantile=0.5, clip_rate=0.2, count_noise=3.0)
    after = [rule.mean.aggregate(rule, dataclasses.replace(server, round=round_), []) for round_ in range(300)]
    moves = np.array([-math.log(float(changes.extra[STATE]["clip"])) for changes in after]) * 4 / 0.2
    assert moves.std() == pytest.approx(3, rel=4 / math.sqrt(2 * 300))
    assert abs(moves.mean()) < 4 * 3 / math.sqrt(300)


@pytest.mark.parametrize(("cohort", "count_noise"), [(4, 1.5), (80, 4.0)])
def test_the_sums_and_the_count_share_the_noise(federation: Federation, cohort: int, count_noise: float) -> None:
    """Left out, the noise of the count is a twentieth of the cohort and at least z, which leaves more for the sums."""
    rule, server = private(federation, noise=1.5, clip=0.3, quantile=0.5)
    rule = dataclasses.replace(rule, cohort=cohort)
    expected = (1.5**-2 - (2 * count_noise) ** -2) ** -0.5 * 0.3
    moved = step(rule, server, [])
    sums = [(moved[n] * expected_holders(federation, n) * cohort / 4).flatten() for n in sorted(moved)]
    deviation, number = float(torch.cat(sums).std()), sum(map(len, sums))
    assert deviation == pytest.approx(expected, rel=4 / math.sqrt(2 * number))


def test_the_bound_that_was_reached_is_that_of_uploads_and_noise(federation: Federation) -> None:
    """The first bound is 9; by now it is 0.3, and the record says so. No two rounds have the same noise."""
    rule, start = private(federation, noise=0.0, clip=9.0)
    server = dataclasses.replace(start, extra={STATE: {"clip": torch.tensor(0.3, dtype=torch.float64)}})
    quiet = step(rule, server, [upload(federation, 9, 2, 7.0)])
    total = sum(float((change * expected_holders(federation, n)).square().sum()) for n, change in quiet.items())
    assert math.sqrt(total) == pytest.approx(0.3, rel=1e-5)
    louder: dict[str, Any] = {"noise": 2.0, "quantile": 0.5, "count_noise": 99.0}
    rule = dataclasses.replace(rule, mean=dataclasses.replace(rule.mean, **louder))
    first, second = (step(rule, dataclasses.replace(server, round=round_), []) for round_ in (0, 1))
    sums = torch.cat([(first[n] * expected_holders(federation, n)).flatten() for n in sorted(first)])
    assert float(sums.std()) == pytest.approx(0.6, rel=4 / math.sqrt(2 * len(sums)))
    assert all(not torch.equal(first[name], second[name]) for name in first)
    record = rule.mean.aggregate(rule, server, []).records["privacy"]["spent"]
    assert record["clip"] == pytest.approx(0.3)
    assert record["noise"] == 2.0


def test_what_is_spent_counts_the_round_that_is_made(federation: Federation) -> None:
    """After three rounds the record has what three spend; a fourth that would exceed the budget is not made."""
    three, four = (epsilon_of(1.2, 1e-5, "poisson", 4, 10, rounds) for rounds in (3, 4))
    rule, server = private(federation, noise=1.2, epsilon=(three + four) / 2, delta=1e-5)
    third = dataclasses.replace(server, round=2)
    assert rule.mean.ended(third, 4) is None
    spent = rule.mean.aggregate(rule, third, []).records["privacy"]["spent"]
    assert spent["epsilon"] == pytest.approx(three, rel=1e-12)
    assert rule.mean.ended(dataclasses.replace(server, round=3), 4) is not None


def test_delta_may_be_one_over_the_clients_and_the_noise_of_the_count_more_than_half() -> None:
    """At most one over ten clients; twice the noise of the count is more than that of both together."""
    assert Privacy(noise=4.0, delta=0.1).for_fleet(4, 10, 5).noise == 4
    with pytest.raises(ConfigError, match=r"privacy.delta: got 0.11"):
        Privacy(noise=4.0, delta=0.11).for_fleet(4, 10, 5)
    assert Privacy(noise=4.0, quantile=0.5, count_noise=2.01).for_fleet(4, 10, 5).count_noise == 2.01
    with pytest.raises(ConfigError, match="expected more than half of the noise, 2"):
        Privacy(noise=4.0, quantile=0.5, count_noise=2.0).for_fleet(4, 10, 5)


def test_clients_take_part_by_themselves(federation: Federation) -> None:
    """4 of 10: each in two fifths of the rounds, cohorts of many sizes; their number has variance 10 q (1 - q)."""
    cohorts = [[job.client for job in federation.schedule(round_, 4)] for round_ in range(3000)]
    share = np.bincount([client for cohort in cohorts for client in cohort], minlength=10) / 3000
    assert np.abs(share - 0.4).max() < 4 * math.sqrt(0.24 / 3000)
    sizes = np.array(list(map(len, cohorts)))
    assert sizes.var() == pytest.approx(2.4, rel=0.15)
    assert 0 in sizes  # such a round is noise
    some = [job.client for job in federation.schedule(0, 4, among=[1, 2, 3])]
    assert set(some) == set(cohorts[0]) & {1, 2, 3}  # who is away changes nothing for the others


@pytest.mark.slow
@pytest.mark.parametrize("method", ["heteroavg+privacy", "incoavg+privacy", "allsmall+privacy", "heteroprox+privacy"])
def test_a_run_ends_within_its_budget_and_resumes(method: str, tmp_path: Path) -> None:
    config = tiny_config(*PLAIN, f"method={method}", "privacy.epsilon=20", "rounds=4", "cohort=3")
    whole = incofl.run(config, tmp_path / "whole", progress=False)
    spent = [row["privacy"]["spent"]["epsilon"] for row in whole.history]
    assert spent == sorted(spent)
    assert 19.5 < spent[-1] <= 20
    assert whole["status"] == "done"
    with incofl.Run(config, tmp_path / "parts", progress=False) as first:
        next(iter(first))
    with incofl.Run(config, tmp_path / "parts", progress=False, resume=True) as again:
        list(again)
        assert torch.equal(again.server.shared["conv1.weight"], _model(whole)["conv1.weight"])


def _model(result: incofl.Result) -> Tensors:
    server: Server = result._run.server
    return server.shared


@pytest.mark.slow
def test_a_spent_budget_stops_the_run(tmp_path: Path) -> None:
    config = tiny_config(*PLAIN, "privacy.epsilon=12", "privacy.noise=1.2", "rounds=40")
    result = incofl.run(config, tmp_path / "run", progress=False)
    rounds = result["rounds"]
    assert 0 < rounds < 40
    assert epsilon_of(1.2, 1e-5, "poisson", 4, 10, rounds) <= 12 < epsilon_of(1.2, 1e-5, "poisson", 4, 10, rounds + 1)
    assert result["status"] == "done"
    assert result["stopped"] == "the privacy budget of epsilon = 12 is spent"
    again = incofl.run(config, tmp_path / "run", progress=False, resume=True)
    assert again["rounds"] == rounds


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.options={}", "privacy.noise=1"], "the model has statistics that no noise protects"),
        (["privacy.noise=1", "aggregate.weighting=samples"], "aggregate.weighting: got 'samples', expected 'uniform'"),
        ([], "privacy: got neither epsilon nor noise, expected one, such as privacy.epsilon=8"),
        (["privacy.noise=0"], "privacy.noise: got 0, expected more"),
        (["privacy.noise=1", "privacy.delta=0.2"], "privacy.delta: got 0.2, expected at most one over 10 clients"),
        (["privacy.noise=1", "split.grow=plateau"], "split.grow: got 'plateau', expected what is known before"),
        (["privacy.noise=1", "method=heteroavg+privacy+coverage", "coverage.kind=signal"], "expected 'count'"),
        (
            ["privacy.noise=4", "privacy.quantile=0.5", "privacy.count_noise=2"],
            "expected more than half of the noise, 2",
        ),
        *(
            (
                [f"method={name}+privacy", "privacy.noise=1"],
                f"got {name}+privacy, expected a method whose mean is plain",
            )
            for name in ("fedavg", "largestonly", "heteronova", "heteroscaffold", "fedrolex", "heterodyn")
        ),
    ],
)
def test_what_would_break_it_is_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        tiny_federation(*PLAIN, *keys)


@pytest.mark.slow
def test_noise_and_cohorts_of_a_secret_number(tmp_path: Path) -> None:
    """Two runs of one seed differ in both; a resumed one ends with the same bits as one that was not interrupted."""
    config = tiny_config(*PLAIN, "privacy.noise=1", "privacy.secret=true", "rounds=3")
    runs = [incofl.Run(config, tmp_path / str(at), progress=False) for at in range(2)]
    for run in runs:
        with run:
            next(iter(run))
    (one, other), (first, second) = (run.rows[0]["clients"] for run in runs), runs
    name = min(first.server.layout.parameters)
    assert one != other or not torch.equal(first.server.shared[name], second.server.shared[name])
    assert first.server.extra[STATE]["seed"] != second.server.extra[STATE]["seed"]
    assert RunFolder(tmp_path / "0").checkpoint.stat().st_mode & 0o077 == 0  # for its owner alone
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    ended = []
    for folder in ("0", "copy"):
        with incofl.Run(config, tmp_path / folder, progress=False, resume=True) as run:
            ended.append([dict(row, seconds=0) for row in run])
    assert len(ended[0]) == 2
    assert ended[0] == ended[1]


def test_it_is_an_object_too() -> None:
    method: Method = Privacy(noise=2.0).added_to(METHODS["heteroavg"])
    assert method.server.mean == Privacy(noise=2.0)


@pytest.mark.slow
def test_the_plan_says_what_epsilon_costs(incofl: Shell) -> None:
    words = ["plan", "--set", "cohort=4", "--rounds", 20, "--set", "split.levels=2", "--epsilon", 8]
    code, out, _ = incofl(*words)
    noise = noise_for(8, 1e-5, "poisson", 4, 20, 20)
    assert code == 0
    assert f"epsilon 8 at delta 1e-05 over 20 rounds of 4 of 20 clients: noise multiplier {noise:.3g}" in out
    assert f"positions that all hold: 4 holders a round, noise of a mean {noise / 4:.3g} bounds" in out
    assert f"positions from level 1 on: 2 holders a round, noise of a mean {noise / 2:.3g} bounds" in out
    told = json.loads(incofl(*words, "--json")[1])["privacy"]
    assert told["noise"] == noise
    assert told["noise_of_mean_by_level"] == {"0": noise / 4, "1": noise / 2}


@pytest.mark.slow
def test_an_audit_stays_below_the_stated_epsilon() -> None:
    """And does not for a mean over the holders that came, so it can fail."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "trust" / "audit.py"))
    found = script["audit"](trials=2000, rounds=1, noise=2.0)
    assert found["ours"] < found["stated"] < found["naive"]


@pytest.mark.slow
def test_the_bound_of_an_audit_by_hand() -> None:
    """Scores that tell nothing give 0. All right in 100 of each, judged on 50: the ends of the intervals are known."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "trust" / "audit.py"))
    assert script["lower_bound"]([1.0, 2.0] * 50, [1.0, 2.0] * 50) == 0
    most_false = 1 - 0.025 ** (1 / 50)  # (1 - p)^50 = 0.025
    assert script["lower_bound"]([0.0] * 100, [1.0] * 100) == pytest.approx(
        math.log((1 - most_false - 1e-5) / most_false)
    )


def test_rounds_are_never_taken_back_and_norms_of_others_do_not_count(tmp_path: Path) -> None:
    """Both would depend on what several clients sent: neither is bounded by the noise. Empty cohorts advance, too."""
    config = tiny_config(*PLAIN, "privacy.noise=1", "cohort=1", "rounds=12", "validation.least=9")
    result = incofl.run(config, tmp_path / "run", progress=False)
    assert len(result.history) == 12
    assert [] in [row["clients"] for row in result.history]
    assert not any("taken_back" in row or "clipped" in row for row in result.history)
    assert "norms" not in result._run.server.states
