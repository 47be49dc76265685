"""Attacks as instruments: what attackers send, by hand, and runs with them."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

import incofl
from incofl.attacks import Attack, little, with_trigger
from incofl.data import Data, Examples
from incofl.engine.build import attackers, build
from incofl.engine.executor import InProcess, Lost
from incofl.engine.federation import Federation, Job
from incofl.engine.round import RoundStats, run_round
from incofl.engine.under_attack import UnderAttack
from incofl.errors import ConfigError
from incofl.server import Server
from incofl.upload import Upload
from tests.federations import tiny_config, tiny_federation
from tests.shell import Shell

TINY = ("model.name=tiny-mlp", "method=heteroavg")


@functools.cache
def federation() -> Federation:
    return tiny_federation(*TINY)


def upload(client: int, level: int, value: float) -> Upload:
    """An upload whose values are all the same."""
    layout, piece = federation().model.layout, federation().slice(level, 0)
    update = {n: torch.full(s, value) for n, s in piece.shapes.items() if n in layout.parameters}
    state = piece.take(federation().start().shared)
    return Upload(client, level, piece, update, {n: state[n] for n in layout.buffers & state.keys()}, 10, 3)


def sent(attack: Attack, value: float = 2.0) -> Upload:
    return sent_of(attack, upload(0, 0, value))


def sent_of(attack: Attack, honest: Upload) -> Upload:
    return attack.sent(honest, federation().start())


def test_flipped_scaled_and_out_of_bounds() -> None:
    for attack, want in (
        (Attack(kind="sign-flip"), -2.0),
        (Attack(kind="sign-flip", scale=5.0), -10.0),
        (Attack(kind="scaling"), 200.0),
        (Attack(kind="free-ride"), 0.0),
        (Attack(kind="magnitude", scale=1e20), 1e20),
        (Attack(kind="not-a-number"), math.nan),
    ):
        for value in sent(attack).update.values():
            torch.testing.assert_close(value, torch.full_like(value, want), equal_nan=True)


@pytest.mark.parametrize(("kind", "want"), [("not-a-number", math.nan), ("magnitude", 1e30)])
def test_what_is_everywhere_is_in_every_part(kind: Any, want: float) -> None:
    """Statistics, and what a method uploads in addition; counters, which hold no such value, stay."""
    ones, counter = torch.ones(2), torch.tensor(5)
    tables: dict[str, Any] = {"buffers": {"m": ones, "n": counter}, "extra": {"w": ones}, "smallest": {"m": ones}}
    made = sent_of(Attack(kind=kind), dataclasses.replace(upload(0, 0, 2.0), **tables))
    for value in (*made.update.values(), made.buffers["m"], made.extra["w"], made.smallest["m"]):
        torch.testing.assert_close(value, torch.full_like(value, want), equal_nan=True)
    assert made.buffers["n"] is counter


def test_scales_that_are_left_out() -> None:
    """As in docs/robustness.md; a scale of 0 is one that is given."""
    kinds: Any = ("sign-flip", "scaling", "noise", "inner-product", "magnitude")
    assert [Attack(kind=kind).factor for kind in kinds] == [1.0, 100.0, 10.0, 1.0, 1e30]
    assert Attack(kind="scaling", scale=0.0).factor == 0.0


def test_wrong_shapes() -> None:
    made, honest = sent(Attack(kind="shape")).update, upload(0, 0, 2.0).update
    assert all(len(made[n]) == len(v) + 1 for n, v in honest.items() if v.dim())


def test_a_free_rider_returns_the_statistics_it_got() -> None:
    held = upload(0, 0, 2.0)
    moved = dataclasses.replace(held, buffers={n: v + 1 for n, v in held.buffers.items()})
    made = Attack(kind="free-ride").sent(moved, federation().start())
    assert all(torch.equal(made.buffers[n], v) for n, v in held.buffers.items())


def test_noise_has_the_stated_scale_and_follows_the_seed() -> None:
    """Of values that are 1 and -1 by turns, whose deviation is 1: with a scale of 3, the noise has deviation 3."""
    honest = upload(0, 2, 1.0)
    signs = {n: torch.where(torch.arange(v.numel()) % 2 == 0, 1.0, -1.0).view_as(v) for n, v in honest.update.items()}
    start = federation().start()
    disturbed = dataclasses.replace(honest, update={n: v for n, v in signs.items() if v.numel() > 60})
    made = Attack(kind="noise", scale=3.0).sent(disturbed, start).update
    noise = torch.cat([(made[n] - v).flatten() for n, v in disturbed.update.items()])
    assert float(noise.std()) == pytest.approx(3, rel=5 / math.sqrt(2 * len(noise)))
    again = Attack(kind="noise", scale=3.0).sent(disturbed, start).update
    other = Attack(kind="noise", scale=3.0).sent(disturbed, dataclasses.replace(start, round=1)).update
    assert all(torch.equal(made[n], again[n]) and not torch.equal(made[n], other[n]) for n in made)


def test_a_little_is_enough_by_hand() -> None:
    """Attackers of levels 0, 0 and 2 would send 1, 3 and 5: mean 3, deviation sqrt(8/3); the last alone has 5 and 0."""
    layout, mine = federation().model.layout, [upload(0, 0, 1.0), upload(1, 0, 3.0), upload(9, 2, 5.0)]
    for made in Attack(kind="little-is-enough", scale=1.5).sent_together(mine, layout, 10):
        for name, value in made.update.items():
            shared = name in mine[0].update and mine[0].slice.shapes[name] == layout.shapes[name]
            want = 3 - 1.5 * math.sqrt(8 / 3) if shared else 5.0
            if shared or name not in mine[0].update:
                torch.testing.assert_close(value, torch.full_like(value, want))
    flipped = Attack(kind="inner-product", scale=0.5).sent_together(mine, layout, 10)
    assert float(flipped[0].update["stem.bias"][0]) == pytest.approx(-1.5)


def test_how_little_is_enough() -> None:
    """The paper's example: 24 of 50 attack, and 2 of the others must be on their side: the 24/26 quantile."""
    assert little(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26))
    assert little(10, 1) == 0.0  # (9 - 5) / 9 is below a half
    assert little(10, 10) > 3  # no honest client is left


def test_who_attacks() -> None:
    levels = [0] * 8 + [1] * 8 + [2] * 4
    assert Attack().clients(levels, 0) == frozenset()
    drawn = Attack(kind="not-a-number", share=0.3).clients(levels, 5)
    assert len(drawn) == 6
    assert drawn == Attack(kind="replay", share=0.3).clients(levels, 5)  # the same for every kind, for comparisons
    assert drawn != Attack(kind="not-a-number", share=0.3).clients(levels, 6)
    assert Attack(kind="not-a-number", only="deepest").clients(levels, 5) == frozenset(range(16, 20))


def test_flipped_labels() -> None:
    honest, poisoned = federation(), build(tiny_config(*TINY, "attack.kind=label-flip", "attack.share=0.2"))
    who = attackers(tiny_config("attack.kind=label-flip", "attack.share=0.2"), honest)
    assert len(who) == 2
    for client in range(10):
        held = honest.partition[client]
        before, after = honest.data.train.y[held], poisoned.data.train.y[held]
        assert torch.equal(after, 9 - before if client in who else before)
    assert torch.equal(honest.data.test.y, poisoned.data.test.y)


def test_a_backdoor_in_the_data() -> None:
    """Half of an attacker's examples, rounded up, have a square of 2 x 2 in the corner and the label 7."""
    honest, config = federation(), tiny_config(*TINY, "attack.kind=backdoor", "attack.target=7", "attack.share=0.1")
    poisoned, (client,) = build(config), attackers(config, honest)
    held = honest.partition[client]
    changed = (poisoned.data.train.x != honest.data.train.x).flatten(1).any(1)
    marked = (poisoned.data.train.x[held][..., -2:, -2:] == 255).flatten(1).all(1)
    assert int(marked.sum()) == math.ceil(len(held) / 2)
    assert bool((poisoned.data.train.y[held][marked] == 7).all())
    assert set(changed.nonzero().flatten().tolist()) <= set(held.tolist())
    test = config.attack.triggered(honest.data.test)
    assert len(test) == int((honest.data.test.y != 7).sum())
    assert bool((test.y == 7).all())
    assert bool((test.x[..., -2:, -2:] == 255).all())


def test_the_poisoned_share_is_rounded_up() -> None:
    """Of the attacker's five examples three, by a share of a half; of the other client's, none."""
    data = Data((torch.zeros(9, 1, 8, 8, dtype=torch.uint8), torch.arange(9) % 3), classes=10)
    attack = Attack(kind="backdoor", target=7)
    train = attack.poison(data, [torch.arange(4), torch.arange(4, 9)], {1}, 0).train
    assert int((train.y[4:] == 7).sum()) == int(train.x[4:].flatten(1).any(1).sum()) == 3
    assert torch.equal(train.y[:4], data.train.y[:4])


def test_a_trigger_on_larger_images() -> None:
    x = with_trigger(torch.zeros(1, 1, 28, 28))
    assert float(x.sum()) == 9  # 3 x 3 ones
    with pytest.raises(ConfigError, match="expected images"):
        with_trigger(torch.zeros(4, 5))


class Played(InProcess):
    """An executor whose uploads are written by hand."""

    def __init__(self, uploads: Sequence[Sequence[Upload | Lost]]) -> None:
        self.uploads = uploads

    def train(self, server: Server, jobs: Sequence[Job]):  # type: ignore[no-untyped-def]
        return iter(self.uploads)


def test_only_uploads_of_attackers_change(tmp_path: Path) -> None:
    """The order of honest uploads stays; those that collude come last."""
    given: list[list[Upload | Lost]] = [[upload(0, 0, 1.0), Lost(1, "away")], [upload(2, 1, 2.0), upload(3, 2, 4.0)]]
    server, jobs = federation().start(), [Job(client, 0, 0) for client in range(4)]

    def found(attack: Attack) -> list[tuple[int, float | None]]:
        executor = UnderAttack(Played(given), attack, frozenset({1, 2, 3}), tmp_path)
        every = [each for some in executor.train(server, jobs) for each in some]
        return [(u.client, None if isinstance(u, Lost) else float(u.update["stem.bias"][0])) for u in every]

    assert found(Attack(kind="sign-flip")) == [(0, 1.0), (1, None), (2, -2.0), (3, -4.0)]
    assert found(Attack(kind="inner-product")) == [(0, 1.0), (1, None), (2, -3.0), (3, -3.0)]


def test_any_number_of_senders_of_nan_changes_nothing(tmp_path: Path) -> None:
    """With eight of ten the round is, bit for bit, that of the two others alone."""
    fleet, liars, stats = federation(), frozenset(range(8)), RoundStats()
    jobs, honest = fleet.schedule(0, 10), InProcess(fleet)
    under = UnderAttack(honest, Attack(kind="not-a-number"), liars, tmp_path)
    attacked = run_round(fleet.start(), fleet.method, jobs, under, stats)
    others = [job for job in jobs if job.client not in liars]
    alone = run_round(fleet.start(), fleet.method, others, honest, RoundStats())
    assert {refused["client"] for refused in stats.rejected} == liars
    assert all(torch.equal(value, alone.shared[name]) for name, value in attacked.shared.items())


def test_how_little_follows_from_the_cohort(tmp_path: Path) -> None:
    """Three of ten attack, with 1, 2 and 4: mean 7/3, variance 7 - 49/9; 4 of 7 honest ones are beyond z."""
    given: list[list[Upload | Lost]] = [[upload(k, 0, value) for k, value in enumerate((1.0, 2.0, 4.0))]]
    executor = UnderAttack(Played(given), Attack(kind="little-is-enough"), frozenset({0, 1, 2}), tmp_path)
    ((made, *_),) = executor.train(federation().start(), [Job(client, 0, 0) for client in range(10)])
    assert isinstance(made, Upload)
    want = 7 / 3 - NormalDist().inv_cdf(4 / 7) * math.sqrt(7 - 49 / 9)
    assert float(made.update["stem.bias"][0]) == pytest.approx(want, rel=1e-5)


def test_what_is_replayed(tmp_path: Path) -> None:
    """The first turn is in round 1, and is repeated once, as after an interruption; from then on the same is sent."""
    start, sent = federation().start(), []
    for round_, value in ((1, 5.0), (1, 5.0), (2, 6.0), (4, 7.0)):
        executor = UnderAttack(Played([[upload(0, 0, value)]]), Attack(kind="replay"), frozenset({0}), tmp_path)
        ((made,),) = executor.train(dataclasses.replace(start, round=round_), [])
        assert isinstance(made, Upload)
        sent.append(float(made.update["stem.bias"][0]))
    assert sent == [5.0, 5.0, 5.0, 5.0]
    assert len(list(tmp_path.iterdir())) == 1


KINDS = ("label-flip", "noise", "little-is-enough", "replay", "backdoor", "not-a-number")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_resume_with_the_same_attackers(kind: str, tmp_path: Path) -> None:
    config = tiny_config(*TINY, f"attack.kind={kind}", "attack.share=0.4", "cohort=7")
    whole = incofl.run(config, tmp_path / "whole", progress=False)
    with incofl.Run(config, tmp_path / "parts", progress=False) as first:
        next(iter(first))
    again = incofl.run(config, tmp_path / "parts", progress=False, resume=True)
    assert [dict(row, seconds=0) for row in again.history] == [dict(row, seconds=0) for row in whole.history]
    clients = [row["attack"]["clients"] for row in whole.history]
    assert any(clients)
    if kind == "not-a-number":
        assert [len(row["rejected"]) for row in whole.history] == list(map(len, clients))
    if kind == "backdoor":
        assert all(0 <= success <= 1 for row in whole.history for success in row["attack"]["success_by_level"])


def test_without_attackers_nothing_changes() -> None:
    """The same digest as before there were attacks, whatever they would be; another with them."""
    plain = tiny_config(*TINY)
    assert plain.digest() == tiny_config(*TINY, "attack.share=0.5").digest()
    assert plain.digest() != tiny_config(*TINY, "attack.kind=not-a-number").digest()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["attack.kind=bribe"], "attack.kind: got 'bribe', expected"),
        (["attack.kind=label-flip", "data.partition=virtual"], "expected clients with examples of their own"),
        (["attack.kind=backdoor", "attack.target=10"], "attack.target: got 10, expected a class below 10"),
        (["attack.kind=not-a-number", "attack.share=2"], "attack.share: got 2, expected"),
    ],
)
def test_what_cannot_be_done_is_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        tiny_federation(*TINY, *keys)
    assert message in str(problem.value)


def test_numbers_have_no_label_to_flip() -> None:
    data = Data((torch.randn(4, 2), torch.randn(4)))
    with pytest.raises(ConfigError, match="expected data with a class per example"):
        Attack(kind="label-flip").poison(data, [torch.arange(4)], {0}, 0)
    assert isinstance(data.train, Examples)


@pytest.mark.slow
def test_from_the_command_line(incofl: Shell, tmp_path: Path) -> None:
    code, out, _ = incofl(
        *("run", "--method", "heteroavg+median", "--out", tmp_path / "run", "--set", "model.name=tiny-mlp"),
        *("--set", "rounds=1", "--set", "attack.kind=sign-flip", "--set", "attack.only=deepest"),
    )
    assert code == 0, out
