"""Clients side by side make of a round what their turns make of it."""

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import incofl
from incofl.client import OPTIMIZERS, ClientRule, Local
from incofl.data import Data
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.federation import Federation, Job
from incofl.engine.grouping import Way, faster
from incofl.engine.round import RoundStats, run_round
from incofl.engine.vectorised import StackJob, declined, stackable
from incofl.engine.worker import Worker
from incofl.errors import RunError
from incofl.methods import ADAPTERS, METHODS
from incofl.optimizers import FUSED
from incofl.server import Server
from incofl.upload import UploadStack
from tests.federations import FAMILIES, family_config, run_rounds, tiny_config, tiny_federation
from tests.texts import write_shakespeare

ROOT = Path(__file__).parents[2]
SIDE = ("engine.vectorise=true", "engine.vectorise_clients=3", "aggregate.precision=float64")
SGD = ("local.optimizer=sgd", "local.lr=0.05")  # Adam would make rounding larger where gradients are nearly 0
ROWS = dict(
    re.findall(r"^\| (methods|optimisers|layers) \| (.*) \|$", (ROOT / "docs" / "speed.md").read_text(), re.MULTILINE)
)


def table(row: str) -> tuple[str, str]:
    """What a row of the table in docs/speed.md says of side by side, and of turns."""
    side, turns = ROWS[row].split(" | ")
    return side, turns


def named(text: str) -> list[str]:
    """The methods that a text names."""
    return [name for name in re.findall(r"`([^`]+)`", text) if name in METHODS]


def of_method(method: str, *settings: str) -> Federation:
    """A federation of a method, on a model that it can train."""
    model = ["model.name=tiny-vit", "model.patch=2"] if method.startswith("reefl") else ["model.name=tiny-mlp"]
    ranks = ["split.levels=[2, 4, 8]"] if method in ADAPTERS else []
    return tiny_federation(f"method={method}", *model, *ranks, "local.epochs=2", *SIDE, *settings)


SUPPORTED = named(table("methods")[0])
# The rules of clients; the others differ from one of them in what the server does.
RULES = {"fedavg", "fedprox", "fednova", "scaffold", "feddyn", "heteroavg", "heteroscaffold", "incoavg"}
RULES |= {"heterofl", "fedrolex", "nefl", "fedit", "ffa"}


def served(federation: Federation, stacks: bool, cohort: int = 8, rounds: int = 2) -> tuple[Server, list[str]]:
    """The server after some rounds of turns, or of clients side by side, and why it was turns after all."""
    said: list[str] = []
    changed = dataclasses.replace(federation, vectorise=stacks)
    seen: list[bool] = []
    made = Worker.train_stack

    def noting(self: Worker, *arguments: Any) -> Any:
        uploads = made(self, *arguments)
        seen.append(isinstance(uploads, UploadStack))
        return uploads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "train_stack", noting)
        executor = InProcess(changed)
        executor.grouping.say = said.append
        server = changed.start()
        for _ in range(rounds):
            stats = RoundStats(on_accepted=partial(executor._store.keep, server.round))
            server = run_round(server, changed.method, changed.schedule(server.round, cohort), executor, stats)
    assert all(seen)
    assert bool(seen) == (stacks and not said)
    return server, said


def difference(a: Server, b: Server) -> float:
    """The largest of any element."""
    levels = [-1, *a.private]
    return max(float((a.state(level)[n] - b.state(level)[n]).abs().max()) for level in levels for n in a.state(level))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in RULES else pytest.mark.slow)
        for name in [*SUPPORTED, "heteroavg+adam", "heteroscaffold+noise"]
    ],
)
def test_equals_turns(method: str) -> None:
    federation = of_method(method)
    sizes = {federation.num_examples(client) for client in range(10)}
    assert len(sizes) > 3  # unequal numbers of examples, batches and steps
    turns, _ = served(federation, False)
    side, said = served(federation, True)
    assert not said
    assert difference(turns, federation.start()) > 1e-3
    assert difference(turns, side) < 1e-12


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "settings",
    [
        ["local.optimizer=sgd", "local.weight_decay=0.1"],
        ["local.optimizer=sgd", "local.nesterov=true", "local.max_grad_norm=0.1"],
        ["local.optimizer=sgd", "local.momentum=0.0", "local.schedule=cosine"],
        ["local.optimizer=adamw", "local.weight_decay=0.1", "local.drop_last=true"],
        ["data.partition=virtual", "data.examples=20"],
        ["buffers=static", "local.batch_size=7"],
    ],
    ids=str,
)
def test_equals_turns_with_other_settings(settings: list[str]) -> None:
    federation = tiny_federation("method=heteroavg", "model.name=tiny-mlp", "local.epochs=2", *SIDE, *settings)
    assert difference(served(federation, False)[0], served(federation, True)[0]) < 1e-12


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_turns_in_every_family(family: str, tmp_path: Path) -> None:
    write_shakespeare(tmp_path)
    federation = build(family_config(family, tmp_path, "method=heteroavg", *SIDE, *SGD))
    turns, (side, said) = served(federation, False, 4)[0], served(federation, True, 4)
    if family == "tests.own_models:encoder":  # torch's own layer, which draws inside of its attention
        assert "random operation" in said[0]
    else:
        assert not said
    assert difference(turns, side) < 1e-10


class Net(nn.Module):
    """A network with a layer of any kind in it."""

    def __init__(self, layer: nn.Module, functional: bool = False) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(64, 16), layer, nn.Linear(16, 10)
        self.functional = functional

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(torch.relu(self.stem(x.flatten(1))))
        out = nn.functional.dropout(out, 0.2, self.training) if self.functional else out
        logits: Tensor = self.head(out)
        return logits


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.lstm = kind(8, 12, **options)
        self.head = nn.Linear(12 * (1 + self.lstm.bidirectional), 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2)
        out = self.lstm(rows)[0] if self.lstm.batch_first else self.lstm(rows.transpose(0, 1))[0].transpose(0, 1)
        logits: Tensor = self.head(out[:, -1])
        return logits


def of_module(factory: Callable[[], nn.Module], *settings: str, **objects: Any) -> Federation:
    """A federation on a module of one size."""
    return build(tiny_config_with(factory, *settings, **objects))


def tiny_config_with(factory: Callable[[], nn.Module], *settings: str, **objects: Any) -> Any:
    plain = tiny_config("method=heteroavg", "local.epochs=2", *SIDE, *settings)
    values = plain.to_dict() | {"split": {"kind": "hetero", "levels": [1.0]}, "model": {}}
    return incofl.make_config(values, model=factory, **objects)


LAYERS = {
    "dropout": lambda: Net(nn.Dropout(0.3)),
    "batch norm": lambda: Net(nn.BatchNorm1d(16)),
    "linear": lambda: Net(nn.Linear(16, 16)),
    "convolution": lambda: Net(
        nn.Sequential(nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 4, 2, padding="same"), nn.Flatten())
    ),
    "group norm": lambda: Net(nn.GroupNorm(4, 16)),
    "layer norm": lambda: Net(nn.LayerNorm(16)),
    "LSTM": lambda: Recurrent(num_layers=2),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("layer", LAYERS)
def test_equals_turns_with_every_layer(layer: str) -> None:
    federation = of_module(LAYERS[layer], *SGD)
    turns, (side, said) = served(federation, False)[0], served(federation, True)
    assert not said
    assert difference(turns, side) < 1e-12


# By the words of the table: a network, and the reason that is said.
DECLINED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "functional.dropout": (lambda: Net(nn.Identity(), functional=True), "random operation"),
    "bidirectional": (lambda: Recurrent(batch_first=True, bidirectional=True), "an LSTM that has"),
    "GRU": (lambda: Recurrent(nn.GRU), "cannot be batched"),
}


def test_the_table_is_complete() -> None:
    """docs/speed.md names every method, optimiser and kind of layer, on the right side."""
    assert sorted(named(table("methods")[0])) == sorted(
        m for m in METHODS if "+" not in m and not declined(of_method(m))
    )
    assert sorted(named(table("methods")[1])) == sorted(m for m in METHODS if "+" not in m and declined(of_method(m)))
    assert set(re.findall(r"`([a-z]+)`", table("optimisers")[0])) == set(FUSED) == set(OPTIMIZERS)
    assert all(layer in table("layers")[0] for layer in (*LAYERS, "attention", "embedding"))  # those are in families
    assert all(layer in table("layers")[1] for layer in DECLINED)


@pytest.mark.parametrize("layer", DECLINED)
def test_what_cannot_be_stacked_takes_turns_and_says_why_once(layer: str) -> None:
    make, reason = DECLINED[layer]
    federation = of_module(make)
    turns, (side, said) = served(federation, False)[0], served(federation, True)
    assert difference(turns, side) == 0
    (line,) = said
    assert line.startswith("engine.vectorise: clients take turns, because ")
    assert reason in line


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["method=heteromoon"], "a client rule that looks at single clients"),
        (["method=heteroavg+anchor"], "trains a second path"),
        (["local.optimizer=torch.optim:RMSprop"], "local.optimizer is torch.optim:RMSprop"),
        (["method=scalefl", "model.name=tiny-resnet"], "looks at single clients"),
    ],
)
def test_methods_that_cannot_be_stacked_take_turns(settings: list[str], reason: str) -> None:
    _, (line,) = served(tiny_federation("model.name=tiny-mlp", *SIDE, *settings), True, 4, 1)
    assert reason in line


def test_a_rule_of_ones_own_takes_turns_unless_it_says_otherwise() -> None:
    class Silent(ClientRule):
        def adjust(self, local: Local) -> None:
            """Something with one client's gradients."""

    class Declared(Silent):
        stacks: ClassVar[bool] = True

        def adjust(self, local: Local) -> None:
            """Something with each element."""

    assert stackable(ClientRule())
    assert not stackable(Silent())
    assert not stackable(Declared())  # what it inherits has not been declared

    class Alone(ClientRule):
        stacks: ClassVar[bool] = True

        def adjust(self, local: Local) -> None:
            """Something with each element."""

    assert stackable(Alone())


@pytest.mark.usefixtures("double")
def test_regression_leaves_out_padding() -> None:
    x, y = torch.rand(200, 3), torch.rand(200)
    clients = list(torch.split(torch.arange(200), [50, 45, 30, 29, 20, 12, 8, 3, 2, 1]))
    data = Data((x, y), (x[:10], y[:10]), clients=clients)

    def linear() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    federation = of_module(linear, "data.limit=none", "data.partition=natural", *SGD, data=data, task="regression")
    assert difference(served(federation, False)[0], served(federation, True)[0]) < 1e-12


def test_in_float32_it_is_rounding() -> None:
    federation = tiny_federation("model.name=tiny-mlp", *SIDE)
    turns, side = served(federation, False, rounds=1)[0], served(federation, True, rounds=1)[0]
    assert 0 < difference(turns, side) < 1e-4


@pytest.mark.parametrize("method", ["incoavg", "heteroscaffold"])
def test_same_bits_with_any_number_of_workers(method: str) -> None:
    federation = tiny_federation(f"method={method}", "model.name=tiny-mlp", *SIDE)
    expected, _ = served(federation, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INCOFL_WORKERS", "2")
        found = run_rounds(federation, 2, 8)[-1]
    assert difference(expected, found) == 0


def test_stacks_are_full_and_keep_the_order_of_the_schedule() -> None:
    federation = tiny_federation("model.name=tiny-mlp", *SIDE)
    jobs = federation.schedule(0, 10)
    grouped = InProcess(federation).grouping(federation.start(), jobs)
    stacks = [stack.jobs if isinstance(stack, StackJob) else (stack,) for stack in grouped]
    assert sorted(job.client for stack in stacks for job in stack) == list(range(10))
    places = [jobs.index(stack[0]) for stack in stacks]
    assert places == sorted(places)
    for stack in stacks:
        assert len({job.level for job in stack}) == 1
        assert len(stack) <= 3
        sizes = [federation.num_examples(job.client) for job in stack]
        assert sizes == sorted(sizes, reverse=True)
    assert max(map(len, stacks)) == 3


def test_a_diverging_client_is_rejected_and_the_others_count() -> None:
    federation = tiny_federation("model.name=tiny-mlp", "method=heteroavg", *SIDE)
    y = federation.data.train.y
    assert len(y) == 300

    def poisoned(federation: Federation) -> tuple[Server, list[dict[str, int | str]]]:
        x = federation.data.train.x.clone().float()
        x[federation.partition[9]] = float("nan")
        data = Data((x, y), classes=10)
        changed, stats = dataclasses.replace(federation, data=data), RoundStats()
        server = run_round(changed.start(), changed.method, changed.schedule(0, 10), InProcess(changed), stats)
        return server, stats.rejected

    side, rejected = poisoned(federation)
    turns, also = poisoned(dataclasses.replace(federation, vectorise=False))
    assert rejected == also
    assert [r["client"] for r in rejected] == [9]
    assert difference(side, turns) < 1e-4


def test_auto_takes_what_ends_a_round_sooner() -> None:
    """By hand: 40 turns of 1 s, or two stacks of 9 s. On one worker 40 s or 18 s, on two 20 or 9, on eight 5 or 9."""
    level = Way(40.0, 1.0), Way(18.0, 9.0)
    assert faster({0: level}, 1) == faster({0: level}, 2) == {0: True}
    assert faster({0: level}, 8) == {0: False}
    assert faster({0: (Way(40.0, 1.0), Way(41.0, 20.0))}, 1) == {0: False}
    # Other levels fill the workers: the stacks of five levels are 90 s of work for eight, 11.25 s; turns are 25 s.
    assert faster(dict.fromkeys(range(5), level), 8) == dict.fromkeys(range(5), True)
    # A third level's turn of 30 s ends last anyway: then the way with less work is taken.
    assert faster({0: level, 1: (Way(30.0, 30.0), Way(90.0, 45.0))}, 8) == {0: True, 1: False}
    assert faster({}, 8) == {}


def test_auto_measures_turns_of_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks once for each example of a turn, and for each client of a stack by its longest turn."""
    clock = [0.0]

    def tick(self: Worker, server: Server, job: Job | StackJob, memory: Any = None) -> None:
        examples = [federation.num_examples(one.client) for one in (job.jobs if isinstance(job, StackJob) else [job])]
        clock[0] += max(examples) * (len(examples) if isinstance(job, StackJob) else 1)

    federation = tiny_federation("model.name=tiny-mlp", "engine.vectorise=auto", "split.levels=[3]")
    monkeypatch.setattr(Worker, "do", tick)
    monkeypatch.setattr("incofl.engine.grouping.perf_counter", lambda: clock[0])
    executor, jobs = InProcess(federation), federation.schedule(0, 10)
    sizes = [federation.num_examples(job.client) for job in jobs]  # from many to few
    turns, stacks = executor.grouping._measure(federation.start(), jobs)
    assert (turns.longest, turns.total) == (sizes[0], 10 * (sizes[1] + sizes[5] + sizes[8]) / 3)
    assert stacks.longest == stacks.total == 10 * sizes[0]
    executor.grouping(federation.start(), jobs)
    assert executor.grouping.choices == {0: False}  # the first turns alone would have said that both are the same


def test_auto_measures_once_and_a_resumed_run_takes_the_same(tmp_path: Path) -> None:
    config = tiny_config("model.name=tiny-mlp", "engine.vectorise=auto", "cohort=10", "engine.workers=1").to_dict()
    whole = incofl.run(config, tmp_path / "whole", progress=False)
    choices = tmp_path / "whole" / "vectorised.json"
    chosen = json.loads(choices.read_text())
    assert set(chosen) == {"0", "1", "2"}
    for name, turned in (("same", chosen), ("other", {level: not choice for level, choice in chosen.items()})):
        folder = tmp_path / name
        incofl.run({**config, "rounds": 1}, folder, progress=False)
        (folder / "vectorised.json").write_text(json.dumps(turned))
        incofl.run(config, folder, progress=False, resume=True)
        assert json.loads((folder / "vectorised.json").read_text()) == turned
    assert whole["status"] == "done"


def test_resume_is_bit_equal(tmp_path: Path) -> None:
    config = tiny_config("model.name=tiny-mlp", "engine.vectorise=true", "method=heteroscaffold", "cohort=8").to_dict()
    whole = incofl.run(config, tmp_path / "whole", progress=False)
    incofl.run({**config, "rounds": 1}, tmp_path / "part", progress=False)
    part = incofl.run(config, tmp_path / "part", progress=False, resume=True)
    ours, theirs = (result.model().state_dict() for result in (whole, part))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_damaged_choice_is_one_line(tmp_path: Path) -> None:
    config = tiny_config("model.name=tiny-mlp", "engine.vectorise=auto", "rounds=1").to_dict()
    incofl.run(config, tmp_path / "run", progress=False)
    (tmp_path / "run" / "vectorised.json").write_text("[1")
    with pytest.raises(RunError, match=r"vectorised\.json: damaged"):
        incofl.run({**config, "rounds": 2}, tmp_path / "run", progress=False, resume=True)


def test_a_client_of_one_example_trains_nothing() -> None:
    federation = tiny_federation("model.name=tiny-mlp", "method=heteroavg", *SIDE)
    alone = [torch.tensor([0]) if client == 9 else part for client, part in enumerate(federation.partition)]
    changed, stats = dataclasses.replace(federation, partition=alone), RoundStats()
    run_round(changed.start(), changed.method, changed.schedule(0, 10), InProcess(changed), stats)
    assert [r["reason"] for r in stats.rejected] == ["client 9: trained on nothing; it has 1 example(s)"]
