"""What holds for every method of the table."""

import importlib
from pathlib import Path

import pytest
import torch

import incofl
from incofl.config import Config, make_config
from incofl.engine.executor import make_store
from incofl.errors import ConfigError
from incofl.methods import METHODS
from incofl.tensors import Tensors, all_finite, clone
from tests.federations import run_rounds, tiny_config, tiny_federation

# Where a method is the same as another in the first rounds, or must differ from it.
PER_SIZE = ("fedavg", "fedprox", "fednova", "scaffold", "moon")
SPLIT = ("heteroavg", "heteroprox", "heteronova", "heteroscaffold", "heteromoon")
UNEQUAL = ("heterofl", "inclusivefl", "fedrolex", "scalefl")
NAMES = list(METHODS)


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_all_promised_names_are_there() -> None:
    promised = {
        *PER_SIZE,
        *SPLIT,
        *(name.replace("hetero", "inco") for name in SPLIT),
        *UNEQUAL,
        *(f"{name}+inco" for name in UNEQUAL),
        *("allsmall", "alllarge"),
    }
    assert set(NAMES) == promised
    for base in SPLIT:
        assert METHODS[f"{base}+inco"] is METHODS[base.replace("hetero", "inco")]


@pytest.mark.parametrize("name", NAMES)
def test_two_rounds(name: str) -> None:
    """Finite, what nobody held keeps its bits, and the start is not touched."""
    federation = tiny_federation(f"method={name}", "local.epochs=1", "moon.mu=1")
    before = clone(federation.model.initial)
    servers = run_rounds(federation, 2)
    assert same(federation.model.initial, before)
    first, last = servers[0], servers[-1]
    assert all_finite(last.shared)
    assert all(all_finite(private) for private in last.private.values())
    assert all(all_finite(table) for table in last.extra.values())
    assert last.round == 2
    held = {
        name
        for round in range(2)
        for job in federation.schedule(round, 4)
        for name in federation.slice(job.level, round).index
    }
    moved = {n for level in federation.levels_in_use for n in before if differs(last.state(level)[n], before[n])}
    assert moved <= held
    assert moved & federation.model.layout.parameters
    assert all(same(first.state(level), servers[0].state(level)) for level in federation.levels_in_use)


def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Three rounds at once, or two and then one: with memories, variates and momenta."""
    settings = [f"method={name}", "cohort=6", "data.clients=8", "scalefl.distil_after=1"]
    incofl.run(tiny_config(*settings, "rounds=3"), tmp_path / "a")
    incofl.run(tiny_config(*settings, "rounds=2"), tmp_path / "b")
    incofl.run(tiny_config(*settings, "rounds=3"), tmp_path / "b", resume=True)
    a, b = ((tmp_path / run / "checkpoint" / "state.safetensors").read_bytes() for run in "ab")
    assert a == b
    memories = [
        {path.name: path.read_bytes() for path in (tmp_path / run).glob("checkpoint/clients/*")} for run in "ab"
    ]
    assert memories[0] == memories[1]
    assert bool(memories[0]) == any(word in name for word in ("scaffold", "moon"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fedavg", "heteroavg")])
def test_differs_from_fedavg(name: str) -> None:
    """In the second round at the latest; at the same sizes and cohorts."""
    method = METHODS[name]
    base = "fedavg" if method.server.separate else "heteroavg"
    options = ["cohort=6", "data.clients=6", "split.kind=" + method.split, "buffers=per-level"]
    ours = run_rounds(tiny_federation(f"method={name}", *options), 3, cohort=6)[-1]
    theirs = run_rounds(tiny_federation(f"method={base}", *options), 3, cohort=6)[-1]
    level = max(ours.population)
    common = [n for n in theirs.layout.parameters if n in ours.layout.parameters]
    assert any(differs(ours.state(level)[n], theirs.state(level)[n]) for n in common)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("inco") or "+" in name])
def test_inco_changes_deep_layers_only(name: str) -> None:
    """In the first round: the base method with other updates of the layers that have a shallow counterpart."""
    base = name.removesuffix("+inco") if "+" in name else name.replace("inco", "hetero", 1)
    with_inco, without = (run_rounds(tiny_federation(f"method={n}"), 1)[-1] for n in (name, base))
    deep = with_inco.layout.shallow.keys()
    changed = set()
    for level in with_inco.population:
        a, b = with_inco.state(level), without.state(level)
        changed |= {n for n in a if differs(a[n], b[n])}
    assert changed
    assert changed <= deep


@pytest.mark.parametrize("name", NAMES)
def test_documented(name: str) -> None:
    """Every method's file names its paper and says how it differs."""
    method = METHODS[name]
    assert method.name == name
    assert method.summary
    base = name.removesuffix("+inco")
    for prefix in ("hetero", "inco"):
        if base.startswith(prefix) and base not in UNEQUAL:
            base = "fed" + base.removeprefix(prefix)
    base = {"fedscaffold": "scaffold", "fedmoon": "moon", "allsmall": "fedavg", "alllarge": "fedavg"}.get(base, base)
    text = importlib.import_module(f"incofl.methods.{base}").__doc__
    assert text is not None
    assert "Differences: " in text
    assert " et al., " in text or " and " in text
    assert "20" in text


@pytest.mark.parametrize(
    "setting",
    [
        "prox.mu=0.3",
        "scaffold.correction_scale=0.5",
        "moon.temperature=0.2",
        "heterofl.mask=false",
        "rolex.direction=backward",
        "scalefl.gamma=0.1",
        "inclusive.beta=0.5",
    ],
)
def test_options_round_trip_and_arrive(setting: str) -> None:
    config = make_config({}, [setting])
    key, _, value = setting.partition("=")
    assert str(config.flat()[key]).lower() == value
    assert make_config(config.to_dict()) == config
    assert config.digest() != Config().digest()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["prox.mu=-1"], "prox.mu: got -1.0, expected a number >= 0"),
        (["scaffold.correction_scale=2"], "scaffold.correction_scale: got 2.0, expected a number in [0, 1]"),
        (["moon.temperature=0"], "moon.temperature: got 0.0, expected a number > 0"),
        (["moon.mu=-0.1"], "moon.mu: got -0.1, expected a number >= 0"),
        (["heterofl.clip=0"], "heterofl.clip: got 0.0, expected a number > 0 or none"),
        (["rolex.direction=up"], "rolex.direction: got 'up', expected 'forward' or 'backward'"),
        (["scalefl.gamma=-1"], "scalefl.gamma: got -1.0, expected a number >= 0"),
        (["scalefl.head_convs=10"], "scalefl.head_convs: got 10, expected a whole number from 0 to 9"),
        (["inclusive.beta=1.5"], "inclusive.beta: got 1.5, expected a number in [0, 1]"),
        (
            ["method=heterofl", "split.kind=stage"],
            "split.kind: got 'stage', expected 'hetero': heterofl splits by width",
        ),
    ],
)
def test_options_out_of_range(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as problem:
        make_config({}, settings)
    assert words in str(problem.value)


def test_scalefl_needs_exits() -> None:
    with pytest.raises(ConfigError, match="expected a model with early exits for this method"):
        tiny_federation("method=scalefl", "model.name=tiny-mlp")


def test_rejected_clients_remember_nothing() -> None:
    """A diverged turn leaves neither its update nor its memory behind."""
    federation = tiny_federation("method=heteroscaffold", "local.lr=3e38", "local.optimizer=sgd", "local.epochs=3")
    store = make_store(federation)
    first, last = (run_rounds(federation, 1, store=store)[i] for i in (0, -1))
    assert same(first.shared, last.shared)
    assert store.manifest == {}
