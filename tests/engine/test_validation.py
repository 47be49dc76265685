"""Uploads that cannot be believed, rounds that must not be kept, and honest ones, which nothing changes."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import incofl
from incofl.client import Upload
from incofl.config import Config
from incofl.config.schema import ValidationConfig
from incofl.engine.backend import Backend
from incofl.engine.executor import Executor, InProcess, Lost
from incofl.engine.federation import Federation, Job
from incofl.engine.round import RoundStats, run_round
from incofl.engine.trace import Trace
from incofl.engine.validation import FEWEST, NORMS, REMEMBERED, Validation, norms_of
from incofl.errors import ConfigError, RunError
from incofl.server import Server
from tests.engine.test_run import comparable, final_state
from tests.federations import tiny_config, tiny_federation

Spoil = Callable[[Upload, int], dict[str, Any]]  # of an upload and the round it belongs to


class Hostile(InProcess):
    """One client sends something else than it has computed."""

    def __init__(self, federation: Federation, trace: Trace, client: int, spoil: Spoil) -> None:
        super().__init__(federation, trace)
        self.client, self.spoil = client, spoil

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
        for (upload,) in super().train(server, jobs):
            change = self.spoil(upload, server.round) if upload.client == self.client else {}
            yield [dataclasses.replace(upload, **change)]


class Infiltrated(Backend):
    def __init__(self, client: int, spoil: Spoil) -> None:
        self.client, self.spoil = client, spoil

    def executor(self, config: Config, federation: Federation, rounds: int, trace: Trace) -> Executor:
        return Hostile(federation, trace, self.client, self.spoil)


def scaled(factor: float) -> Spoil:
    return lambda upload, round: {"update": {name: value * factor for name, value in upload.update.items()}}


KEYS = ("cohort=10", "model.name=tiny-mlp", "data.limit=100", "rounds=2", "method=heteroavg")


@pytest.mark.parametrize("factor", [1e18, 1e10, 1e5])
def test_one_huge_upload_does_not_end_what_the_others_learn(tmp_path: Path, factor: float) -> None:
    """It is rejected or made shorter in the round in which it comes; no honest client is ever rejected."""
    result = incofl.run(tiny_config(*KEYS), tmp_path, backend=Infiltrated(3, scaled(factor)), progress=False)
    for row in result.history:
        named = {entry["client"] for entry in (*row["rejected"], *row.get("clipped", ()))}
        assert named == {3}
        assert row["test_loss"] < 10


def test_an_upload_is_shortened_to_the_multiple_of_the_median() -> None:
    """By hand: of norms 1, 2, 3, 4, 100 the median is 3, and three times as many steps allow three times as much."""
    federation = tiny_federation("model.name=tiny-mlp")
    start, (job, *_) = federation.start(), federation.schedule(0, 4)
    ((upload,),) = InProcess(federation).train(start, [job])
    known = {f"update {job.level}": [1.0, 2, 3, 4, 100], f"steps {job.level}": [float(upload.steps)] * FEWEST}
    tables = {name: torch.tensor(values, dtype=torch.float64) for name, values in known.items()}
    server = dataclasses.replace(start, states={NORMS: tables})
    factor = 1000 / norms_of(upload)["update"]
    large = dataclasses.replace(upload, update={name: factor * value for name, value in upload.update.items()})
    for steps, bound in ((upload.steps, 30.0), (3 * upload.steps, 90.0)):
        rules = Validation(server)
        accepted = rules.accept(dataclasses.replace(large, steps=steps))
        assert norms_of(accepted)["update"] == pytest.approx(bound, rel=1e-5)
        (clip,) = rules.clipped
        assert clip == {"client": job.client, "part": "update", "norm": pytest.approx(1000, rel=1e-5), "bound": bound}
        for name, value in accepted.update.items():
            assert torch.allclose(value * 1000 / bound, large.update[name], rtol=1e-4)
    assert Validation(server).accept(upload) is upload
    rejecting = Validation(server, ValidationConfig(norm="reject"))
    with pytest.raises(incofl.errors.UploadError, match=r"its update has a norm of 1e\+03, expected at most 30"):
        rejecting.accept(large)
    assert Validation(server, ValidationConfig(norm="off")).accept(large) is large


def test_other_levels_are_a_measure_by_the_root_of_their_size() -> None:
    """By hand: norms of 3 at level 0 allow 10 * 3 * sqrt(n_2 / n_0) at level 2, of which nothing is known yet."""
    federation = tiny_federation("split.kind=hetero", "split.levels=[0.25,0.5,1.0]")
    start = federation.start()
    job = next(job for job in federation.schedule(0, 8) if job.level == 2)
    ((upload,),) = InProcess(federation).train(start, [job])
    known = {"update 0": [1.0, 2, 3, 4, 100], "steps 0": [float(upload.steps)] * FEWEST}
    tables = {name: torch.tensor(values, dtype=torch.float64) for name, values in known.items()}
    server = dataclasses.replace(start, states={NORMS: tables})
    sizes = [
        sum(value.numel() for name, value in held.items() if name in start.layout.parameters)
        for held in (federation.slice(level, 0).take(start.shared) for level in (0, 2))
    ]
    assert sizes[1] > 4 * sizes[0]
    large = dataclasses.replace(upload, **scaled(1e9)(upload, 0))
    expected = 10 * 3 * (sizes[1] / sizes[0]) ** 0.5
    assert norms_of(Validation(server).accept(large))["update"] == pytest.approx(expected, rel=1e-4)


def test_the_first_round_is_measured_by_the_model_itself() -> None:
    federation = tiny_federation("model.name=tiny-mlp")
    server, (job, *_) = federation.start(), federation.schedule(0, 4)
    ((upload,),) = InProcess(federation).train(server, [job])
    large = dataclasses.replace(upload, **scaled(1e9)(upload, 0))
    sent = [server.shared[name][tuple(slice(n) for n in value.shape)] for name, value in upload.update.items()]
    norm = float(torch.stack([value.norm() for value in sent]).norm())
    assert norms_of(Validation(server).accept(large))["update"] == pytest.approx(norm, rel=1e-3)


def first_variance(upload: Upload) -> str:
    return min(name for name in upload.buffers if name.endswith("running_var"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda u: {"buffers": u.buffers | {first_variance(u): -u.buffers[first_variance(u)]}},
            "expected nothing below 0",
        ),
        (lambda u: {"loss": -1e30}, "its loss is -1e+30, expected at most"),
        (lambda u: {"loss": float("nan")}, "its loss is nan"),
        (lambda u: {"normaliser": float("inf")}, "its normaliser is inf"),
        (lambda u: {"normaliser": 0.0}, "its normaliser is 0.0"),
        (lambda u: {"steps": -3}, "trained on nothing"),
        (lambda u: {"examples": -3}, "it has -3 examples"),
        (
            lambda u: {"update": {n: v.double() for n, v in u.update.items()}},
            "is of torch.float64, expected torch.float32",
        ),
        (lambda u: {"extra": {"x": torch.zeros(1)}}, "its extra holds 'x' of shape (1,), expected none"),
        (lambda u: {"extra": {"fc.bias": torch.zeros(3)}}, "its extra holds 'fc.bias' of shape (3,), expected (10,)"),
    ],
)
def test_what_cannot_be_is_rejected(change: Any, reason: str) -> None:
    federation = tiny_federation()
    server, jobs = federation.start(), federation.schedule(0, 4)
    liar = Hostile(federation, Trace(), jobs[1].client, lambda upload, round: change(upload))
    stats = RoundStats()
    run_round(server, federation.method, jobs, liar, stats)
    (refusal,) = stats.rejected
    assert refusal["client"] == jobs[1].client
    assert reason in str(refusal["reason"])


def test_losses_of_learned_data_do_not_make_an_unlearned_one_a_lie() -> None:
    federation = tiny_federation("model.name=tiny-mlp")
    start, (job, *_) = federation.start(), federation.schedule(0, 4)
    ((upload,),) = InProcess(federation).train(start, [job])
    learned = {NORMS: {"loss": torch.full((9,), 1e-7, dtype=torch.float64)}}
    rules = Validation(dataclasses.replace(start, states=learned))
    rules.accept(dataclasses.replace(upload, loss=3.0))
    with pytest.raises(incofl.errors.UploadError, match=r"its loss is -2e\+04, expected at most 1e\+04"):
        rules.accept(dataclasses.replace(upload, loss=-2e4))


@pytest.mark.parametrize("spoilt", ["nothing", "update", "variance"])
def test_a_stack_is_what_its_uploads_are(spoilt: str) -> None:
    """Clients side by side are accepted together, or each by itself if something is wrong with one of them."""
    federation = tiny_federation("engine.vectorise=true", "method=heteroavg", "cohort=10")
    server, jobs = federation.start(), federation.schedule(0, 10)
    accepted = []
    for stack in InProcess(federation).train(server, jobs):
        if not isinstance(stack, incofl.upload.UploadStack):
            continue
        if spoilt == "update":
            for value in stack.update.values():
                value[0] *= 1e9
        elif spoilt == "variance":
            next(value for name, value in stack.buffers.items() if name.endswith("running_var"))[0] = -1
        together, single = Validation(server), Validation(server)
        accepted.append(together.accepts_all(stack))
        assert accepted[-1] == (spoilt == "nothing")
        if accepted[-1]:
            for upload in stack:
                assert single.accept(upload) is upload
            ours, theirs = together.state(), single.state()
            assert ours.keys() == theirs.keys()
            assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5) for name in ours)
    assert accepted


def test_what_was_learned_of_norms_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    config = ("cohort=10", "model.name=tiny-mlp", "data.limit=100", "method=heteroscaffold")
    incofl.run(tiny_config(*config, "rounds=3"), tmp_path / "whole", progress=False)
    for rounds in (1, 3):
        incofl.run(tiny_config(*config, f"rounds={rounds}"), tmp_path / "parts", resume=rounds > 1, progress=False)
    assert final_state(tmp_path / "whole") == final_state(tmp_path / "parts")
    with incofl.Run(tiny_config(*config, "rounds=3"), tmp_path / "whole", resume=True, progress=False) as run:
        norms = run.server.states[NORMS]
    assert {name.split()[0] for name in norms} == {"update", "extra", "buffers", "steps", "loss", "step"}
    assert len(norms["loss"]) == 30 <= REMEMBERED
    assert len(norms["step"]) == 3


def test_honest_clients_of_all_kinds_are_never_touched(tmp_path: Path) -> None:
    """With and without validation the rounds are the same, bit for bit."""
    keys = ("data.alpha=0.1", "rounds=6", "model.name=tiny-mlp", "local.epochs=3", "method=inconova")
    for name in ("clip", "off"):
        result = incofl.run(tiny_config(*keys, f"validation.norm={name}"), tmp_path / name, progress=False)
        assert not any(row["rejected"] or "clipped" in row or "taken_back" in row for row in result.history)
    assert comparable(tmp_path / "clip") == comparable(tmp_path / "off")


class TestRoundsThatAreTakenBack:
    def test_a_model_that_cannot_be_evaluated(self, tmp_path: Path) -> None:
        """Where norms are not looked at, the result of the round is: the next round starts from the one before."""
        keys = (*KEYS, "rounds=3", "validation.norm=off")

        def once(upload: Upload, round: int) -> dict[str, Any]:
            return scaled(1e14)(upload, round) if round == 1 else {}

        result = incofl.run(tiny_config(*keys), tmp_path / "a", backend=Infiltrated(3, once), progress=False)
        first, second, third = result.history
        assert second["taken_back"] == "its test loss is not finite"
        assert second["accuracy_by_level"] == first["accuracy_by_level"]
        assert third["rejected"] == []
        assert "taken_back" not in third
        assert third["test_loss"] < 10

    def test_clients_forget_what_they_made_of_it(self, tmp_path: Path) -> None:
        keys = (*KEYS, "method=heteroscaffold", "rounds=2", "validation.norm=off")

        def once(upload: Upload, round: int) -> dict[str, Any]:
            return scaled(1e14)(upload, round) if round == 1 else {}

        with incofl.Run(tiny_config(*keys), tmp_path, backend=Infiltrated(3, once), progress=False) as run:
            rows = list(run)
            assert "taken_back" in rows[1]
            assert {round for _, round in run._store.manifest.values()} == {0}

    def test_a_step_out_of_scale(self, tmp_path: Path) -> None:
        federation = tiny_federation("model.name=tiny-mlp", "method=heteroavg")
        start, jobs = federation.start(), federation.schedule(0, 4)
        usual = {NORMS: {"step": torch.full((FEWEST,), 1e-9, dtype=torch.float64)}}
        server, stats = dataclasses.replace(start, states=usual), RoundStats()
        after = run_round(server, federation.method, jobs, InProcess(federation), stats)
        assert stats.taken_back is not None
        assert "it moves the model by" in stats.taken_back
        assert after.round == 1
        assert all(torch.equal(after.shared[name], start.shared[name]) for name in start.shared)
        assert after.states == server.states

    def test_too_few_valid_uploads(self, tmp_path: Path) -> None:
        """Even server momentum, which would move the model without any upload, leaves it alone."""
        config = tiny_config("model.name=tiny-mlp", "method=heteroavg+momentum", "rounds=2", "validation.least=4")

        class Gone(Hostile):
            def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
                for number, uploads in enumerate(super().train(server, jobs)):
                    yield uploads if server.round == 0 or number else [Lost(jobs[0].client, "gone")]  # type: ignore[list-item]

        class Leaving(Backend):
            def executor(self, config: Config, federation: Federation, rounds: int, trace: Trace) -> Executor:
                return Gone(federation, trace, -1, lambda upload, round: {})

        with incofl.Run(config, tmp_path, backend=Leaving(), progress=False) as run:
            rows, states = [], []
            for row in run:
                rows.append(row)
                states.append(run.server.shared)
        assert rows[1]["taken_back"] == "3 valid upload(s), expected at least 4 (validation.least)"
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_in_which_nothing_was_accepted_is_an_error(tmp_path: Path) -> None:
    keys = ("data.limit=2", "data.clients=2", "cohort=2", "local.drop_last=true", "model.name=tiny-mlp", "rounds=2")
    for resume in (False, True):  # also when it is asked again
        with pytest.raises(RunError, match=r"nothing was accepted in 2 round\(s\).*trained on nothing"):
            incofl.run(tiny_config(*keys), tmp_path, resume=resume, progress=False)


@pytest.mark.parametrize("value", ["inf", "nan", "1e400"])
def test_numbers_of_a_config_are_finite(value: str) -> None:
    for key in ("prox.mu", "local.lr", "data.alpha", "validation.multiple"):
        with pytest.raises(ConfigError, match=key):
            tiny_config("method=heteroprox", f"{key}={value}")


def test_first_statistics_may_be_anything_that_can_be_computed_with() -> None:
    """They are those of the data: inputs in other units have variances far from the 1 at which they start."""
    federation = tiny_federation("data.clients=6", "cohort=6")
    server = federation.start()
    stats = RoundStats()

    class Large(InProcess):
        def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
            for (upload,) in super().train(server, jobs):
                for value in upload.buffers.values():
                    value.mul_(500)
                yield [upload]

    run_round(server, federation.method, federation.schedule(0, 6), Large(federation), stats)
    assert not stats.rejected


def test_statistics_far_from_the_usual_are_rejected() -> None:
    """Once there are enough of others, in the rounds before."""
    federation = tiny_federation()
    server = federation.start()
    for round in range(4):
        jobs, stats = federation.schedule(round, 4), RoundStats()
        liar = Hostile(
            federation,
            Trace(),
            jobs[1].client,
            lambda upload, at: {"buffers": {n: v * 100000 for n, v in upload.buffers.items()}} if at == 3 else {},
        )
        server = run_round(server, federation.method, jobs, liar, stats)
    (refusal,) = stats.rejected
    assert "its buffers has a norm of" in str(refusal["reason"])


def one_upload(*keys: str) -> tuple[Server, Upload]:
    """A server that knows nothing yet, and an honest upload of the largest level."""
    federation = tiny_federation("model.name=tiny-mlp", "method=heteroavg", *keys)
    server = federation.start()
    job = next(job for job in federation.schedule(0, 10) if job.level == 2)
    ((upload,),) = InProcess(federation).train(server, [job])
    assert isinstance(upload, Upload)
    return server, upload


def with_known(server: Server, **known: list[float]) -> Server:
    """A server that remembers norms, by name with _ for a space."""
    tables = {name.replace("_", " "): torch.tensor(values, dtype=torch.float64) for name, values in known.items()}
    return dataclasses.replace(server, states={NORMS: tables})


def with_norm(upload: Upload, norm: float) -> Upload:
    """The same upload with an update of some length."""
    return dataclasses.replace(upload, **scaled(norm / norms_of(upload)["update"])(upload, 0))


def test_fewer_steps_than_usual_do_not_lower_the_bound() -> None:
    """Usual are a norm of 3 and 8 steps: 30 may be sent with 8 steps, with 4, and with 1."""
    start, upload = one_upload("cohort=10")
    server = with_known(start, update_2=[3.0] * FEWEST, steps_2=[8.0] * FEWEST)
    for steps in (8, 4, 1):
        accepted = Validation(server).accept(dataclasses.replace(with_norm(upload, 1000), steps=steps))
        assert norms_of(accepted)["update"] == pytest.approx(30, rel=1e-5)
        fine = dataclasses.replace(with_norm(upload, 29), steps=steps)
        assert Validation(server).accept(fine) is fine


def test_steps_of_other_levels_count_as_they_are() -> None:
    """Norms grow with the size of a level, steps do not: twice the steps of level 0 allow twice as much at level 2."""
    start, upload = one_upload("split.kind=hetero", "split.levels=[0.25,0.5,1.0]")
    server = with_known(start, update_0=[3.0] * FEWEST, steps_0=[4.0] * FEWEST)
    once, twice = (
        norms_of(Validation(server).accept(dataclasses.replace(with_norm(upload, 1e9), steps=steps)))["update"]
        for steps in (4, 8)
    )
    assert twice == pytest.approx(2 * once, rel=1e-5)


def test_the_latest_are_remembered() -> None:
    start, upload = one_upload()
    rules = Validation(with_known(start, loss=[float(at) for at in range(REMEMBERED)]))
    rules.accept(dataclasses.replace(upload, loss=-7.0))
    assert rules.state()["loss"].tolist() == [*map(float, range(1, REMEMBERED)), 7.0]  # its size counts


def moved(server: Server, by: float) -> Server:
    """The server after a round whose step has some length."""
    name = min(server.layout.parameters)
    change = torch.zeros_like(server.shared[name])
    change.view(-1)[0] = by
    return dataclasses.replace(server, shared=server.shared | {name: server.shared[name] + change})


def test_a_step_may_be_so_many_times_the_usual() -> None:
    """Of steps of 0.01 to 0.05 the median is 0.03: 0.29 may be kept and 0.31 not, unless norms are not looked at."""
    start, _ = one_upload()
    server = with_known(start, step=[0.01, 0.05, 0.03, 0.02, 0.04])
    assert Validation(server).problem(moved(server, 0.29), 1) is None
    assert Validation(server).problem(moved(server, 0.31), 1) == (
        "it moves the model by 0.31, expected at most 0.3 (validation.multiple)"
    )
    assert Validation(server, ValidationConfig(norm="off")).problem(moved(server, 0.31), 1) is None
    assert Validation(start).problem(moved(start, 1e3), 1) is None  # nothing is known


def test_as_many_as_are_needed_are_enough() -> None:
    start, _ = one_upload()
    rules = Validation(start, ValidationConfig(least=3))
    assert rules.problem(start, 3) is None
    assert rules.problem(start, 2) == "2 valid upload(s), expected at least 3 (validation.least)"


@pytest.mark.parametrize("where", ["shared", "private", "extra", "states"])
@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_result_that_cannot_be_computed_with_is_not_kept(where: str, value: float) -> None:
    """Wherever it is: in the model, in a level's own part, in what a method keeps, or a transform."""
    start, _ = one_upload()
    name = min(start.layout.parameters)
    wrong: Any = {name: torch.full_like(start.shared[name], value)}
    tables = {"shared": start.shared | wrong, "private": {2: wrong}, "extra": {"x": wrong}, "states": {"x": wrong}}
    problem = Validation(start).problem(dataclasses.replace(start, **{where: tables[where]}), 1)
    assert problem == "its result is not finite, or too large to compute with"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("update", "heteroavg"),
        ("buffers", "heteroavg"),
        ("buffers", "fedfloor"),
        ("extra", "heteroscaffold"),
        ("smallest", "fedfloor"),
    ],
)
def test_no_part_of_an_upload_may_be_out_of_bounds(part: str, method: str, value: float) -> None:
    federation = tiny_federation(f"method={method}")
    server = federation.start()
    job = next(job for job in federation.schedule(0, 10) if job.level == 2)
    ((upload,),) = InProcess(federation).train(server, [job])
    table = dict(getattr(upload, part))
    name = max(name for name in table if table[name].is_floating_point() and not name.endswith("running_var"))
    wrong: dict[str, Any] = {part: table | {name: torch.full_like(table[name], value)}}
    changed = dataclasses.replace(upload, **wrong)
    assert Validation(server).accept(upload) is upload
    with pytest.raises(incofl.errors.UploadError, match=r"is not finite|has values up to"):
        Validation(server, ValidationConfig(norm="off")).accept(changed)


@pytest.mark.parametrize("part", ["buffers", "smallest"])
def test_neither_counters_nor_variances_are_absurd(part: str) -> None:
    """Also in the statistics of the smallest path, which clients of larger levels send in addition."""
    federation = tiny_federation("method=fedfloor" if part == "smallest" else "method=heteroavg")
    server = federation.start()
    job = next(job for job in federation.schedule(0, 10) if job.level == 2)
    ((upload,),) = InProcess(federation).train(server, [job])
    table = getattr(upload, part)
    for ending, value, reason in (
        ("running_var", -1e-3, "has -0.001, expected nothing below 0"),
        ("num_batches_tracked", -1, "has -1, expected nothing below 0"),
        ("num_batches_tracked", 2**62, r"has values up to 4.6e\+18"),
    ):
        name = min(name for name in table if name.endswith(ending))
        changed = dataclasses.replace(upload, **{part: table | {name: torch.full_like(table[name], value)}})
        with pytest.raises(incofl.errors.UploadError, match=reason):
            Validation(server).accept(changed)


def test_a_stack_in_which_one_has_not_trained_is_not_accepted_as_a_whole() -> None:
    federation = tiny_federation("engine.vectorise=true", "method=heteroavg", "cohort=10", "model.name=tiny-mlp")
    server, jobs = federation.start(), federation.schedule(0, 10)
    stacks = [s for s in InProcess(federation).train(server, jobs) if isinstance(s, incofl.upload.UploadStack)]
    for stack in (stack for stack in stacks if len(stack) > 1):
        assert Validation(server).accepts_all(stack)
        idle = dataclasses.replace(stack, steps=[*stack.steps[:-1], 0])
        assert not Validation(server).accepts_all(idle)
    assert stacks


@pytest.mark.parametrize(("counts", "clipped"), [("[5,4,1]", True), ("[4,3,3]", False)])
def test_a_single_client_of_a_level_is_not_its_own_scale(counts: str, clipped: bool) -> None:
    """What others send, for its size: a liar that is alone on its level would otherwise soon be the usual."""
    federation = tiny_federation("method=heteroavg", f"split.counts={counts}", "model.name=tiny-mlp")
    start = federation.start()
    job = next(job for job in federation.schedule(0, 10) if job.level == 2)
    ((upload,),) = InProcess(federation).train(start, [job])
    norm = norms_of(upload)["update"]
    norms = {"update 0": [norm / 100] * 9, "update 1": [norm / 100] * 9, "update 2": [norm] * 9}
    tables = {name: torch.tensor(values, dtype=torch.float64) for name, values in norms.items()}
    rules = Validation(dataclasses.replace(start, states={NORMS: tables}))
    rules.accept(upload)
    assert bool(rules.clipped) == clipped


def test_many_steps_lengthen_the_bound_no_more_than_its_multiple() -> None:
    """A client that says it has made a billion steps is bounded by ten times the bound of one that says five."""
    federation = tiny_federation("method=heteroavg", "model.name=tiny-mlp", "split.levels=1")
    start = federation.start()
    ((upload,),) = InProcess(federation).train(start, federation.schedule(0, 1))
    tables = {"update 0": torch.ones(9, dtype=torch.float64), "steps 0": torch.full((9,), 5.0, dtype=torch.float64)}
    rules = Validation(dataclasses.replace(start, states={NORMS: tables}))
    factor = 1e6 / norms_of(upload)["update"]
    lie = {name: value * factor for name, value in upload.update.items()}
    found = rules.accept(dataclasses.replace(upload, update=lie, steps=10**9))
    assert norms_of(found)["update"] == pytest.approx(10 * 10, rel=1e-4)


def test_a_run_in_which_every_round_is_taken_back_is_an_error(tmp_path: Path) -> None:
    def huge(upload: Upload, round: int) -> dict[str, Any]:
        return {"loss": float("nan")} if upload.client else {}

    config = tiny_config(*KEYS, "validation.least=9", "data.clients=10", "method=largestonly")  # few hold the largest
    with pytest.raises(RunError, match=r"every round was taken back in 2 round\(s\), .*validation.least"):
        incofl.run(config, tmp_path, backend=Infiltrated(0, huge), progress=False)


def test_more_valid_uploads_than_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"validation.least: got 5, expected at most the 4 clients of a round"):
        tiny_config("validation.least=5", "cohort=4")
