"""What holds for every method of the table."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import incofl
from incofl.client import Setting
from incofl.config import load_config, make_config
from incofl.engine.build import build, build_method, build_model, build_splitter
from incofl.engine.federation import Federation
from incofl.engine.store import ClientStore
from incofl.errors import ConfigError
from incofl.methods import ADAPTERS, METHODS
from incofl.server import Server
from incofl.tensors import Tensors, all_finite, clone
from tests.federations import FAMILIES, family_config, run_rounds, tiny_config, tiny_federation
from tests.texts import write_shakespeare

# Where a method is the same as another in the first rounds, or must differ from it.
PER_SIZE = ("fedavg", "fedprox", "fednova", "scaffold", "moon", "feddyn", "fedbn")
PAPERS = ("heteroavg", "heteroprox", "heteronova", "heteroscaffold", "heteromoon")
SPLIT = (*PAPERS, "heterodyn", "heterobn")
FEDOPT = tuple(f"{form}{name}" for form in ("fed", "hetero", "inco") for name in ("avgm", "adam", "yogi"))
WIDTH = ("heterofl", "fedrolex", "fedrand", "fedecover", "fiarse", "fjord")
UNEQUAL = (*WIDTH, "inclusivefl", "scalefl", "nefl", "depthfl", "reefl", "fedfloor")
# What test_noise.py and test_lora.py are about is left out.
NAMES = [name for name in METHODS if not name.endswith("+noise") and name not in ADAPTERS]


def pair(name: str, family: str) -> object:
    """A method and a family; what differs from others in the server's step alone is slow but on the first family."""
    slow = family != FAMILIES[0] and (name in FEDOPT or (name.endswith("+inco") and name != "heterofl+inco"))
    return pytest.param(name, family, marks=[pytest.mark.slow] if slow else [])


def model_for(name: str) -> list[str]:
    """The model on which a method is tried, where not the usual one."""
    return ["model.name=tiny-vit", "model.patch=2"] if name.startswith("reefl") else []


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_all_promised_names_are_there() -> None:
    promised = {
        *PER_SIZE,
        *SPLIT,
        *FEDOPT,
        *(name.replace("hetero", "inco") for name in SPLIT),
        *UNEQUAL,
        *(f"{name}+inco" for name in UNEQUAL),
        *("allsmall", "alllarge", "largestonly"),
    }
    lora = {"fedit", "covered", "hetlora", "random-ranks", "flexlora", "raflora", "flora", "ffa", "rolora", "fedex"}
    assert set(METHODS) == promised | {f"{name}+noise" for name in PAPERS} | lora
    assert lora == ADAPTERS
    for base in SPLIT:
        assert METHODS[f"{base}+inco"] is METHODS[base.replace("hetero", "inco")]


@pytest.fixture(scope="module")
def text_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a play for the families that read texts."""
    return write_shakespeare(tmp_path_factory.mktemp("play")).parent


@pytest.mark.parametrize(("name", "family"), [pair(name, family) for name in NAMES for family in FAMILIES])
def test_two_rounds(name: str, family: str, text_root: Path) -> None:
    """On every family of models, or refused in one line."""
    # What starts as the identity hardly moves in two rounds.
    start = ["split.start=random"] if name.startswith("fedfloor") else []
    config = family_config(family, text_root, f"method={name}", *start)
    if name.endswith("bn") and family not in ("tiny-resnet", "tiny-mlp", "tiny-resnet-1d"):
        with pytest.raises(ConfigError, match="fedbn needs a model with batch norm"):
            build(config)
    elif name.startswith("nefl") and family in ("tiny-lstm", "tests.own_models:encoder"):
        with pytest.raises(ConfigError, match="cannot have steps, expected residual blocks of which the layout says"):
            build(config)
    elif name.startswith("reefl") and family != "tiny-vit":
        with pytest.raises(ConfigError, match="cannot have a shared exit, expected a ViT or a model with a method"):
            build(config)
    else:
        check_method(build(config))


def check_method(federation: Federation) -> None:
    """Finite; a position that nobody held keeps its bits; and a round leaves what it started from as it was."""
    layout, store, server = federation.model.layout, ClientStore(federation), federation.start()
    for round in range(2):
        before = snapshot(server)
        after = run_rounds(federation, 1, server=server, store=store)[-1]
        assert all(same(a, b) for a, b in zip(snapshot(server), before, strict=True))
        assert all(all_finite(tensors) for tensors in snapshot(after))
        held = {n: torch.zeros(layout.shapes[n]) for n in layout.parameters}
        for job in federation.schedule(round, 4, server=server):
            piece = federation.slice_of(job)
            piece.put({n: torch.ones(s) for n, s in piece.shapes.items() if n in held}, held)
        for level in federation.levels_in_use:
            for n, mask in held.items():
                outside = mask == 0
                assert torch.equal(after.state(level)[n][outside], server.state(level)[n][outside])
        moved = {n for n in held if any(differs(after.state(v)[n], server.state(v)[n]) for v in after.population)}
        trained = {n for n, mask in held.items() if bool(mask.any())}
        assert moved <= trained
        assert len(moved) > 0.8 * len(trained)  # a channel of two may be dead
        server = after
    assert same(federation.model.initial, federation.start().shared)


def snapshot(server: Server) -> list[Tensors]:
    """All tensors of a server."""
    return [clone(server.shared), *map(clone, server.private.values()), *map(clone, server.extra.values())]


@pytest.mark.parametrize(
    "name",
    [
        "incoscaffold",
        "fedecover",
        "scalefl+inco",
        "fedfloor",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("heteromoon", "heteronova", "heterofl", "fedrolex", "fedrand")
        ),
    ],
)
def test_worker_processes_give_the_same_bits(name: str, tmp_path: Path) -> None:
    """Memories, variates, measured statistics, lengths, moving windows and exits through shared memory."""
    settings = [f"method={name}", "cohort=6", "data.clients=8", "rounds=3", "aggregate.precision=float64"]
    for workers in (1, 2):
        incofl.run(tiny_config(*settings, f"engine.workers={workers}"), tmp_path / str(workers))
    a, b = ((tmp_path / run / "checkpoint" / "state.safetensors").read_bytes() for run in "12")
    assert a == b
    rows = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in "12"]
    assert [json.loads(row)["accuracy"] for row in rows[0]] == [json.loads(row)["accuracy"] for row in rows[1]]


@pytest.mark.parametrize("name", [n for n in NAMES if "+" not in n and not n.startswith(("inco", "reefl"))])
def test_every_method_takes_the_default_model_and_every_preset(name: str) -> None:
    """Five sizes of ResNet26, on digits and as in the paper's protocols."""
    for preset in (None, "demo", "paper-cifar10", "paper-fashion-mnist"):
        config = load_config(preset, [f"method={name}"])
        model = build_model(config)
        assert len(build_splitter(config, model).depths) == 5
        setting = Setting(model.template, model.example(2), model.layout, buffers=config.buffers)
        build_method(config).check(setting)


def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Three rounds at once, or two and then one: with memories, variates and momenta."""
    settings = [f"method={name}", "cohort=6", "data.clients=8", "scalefl.distil_after=1", *model_for(name)]
    incofl.run(tiny_config(*settings, "rounds=3"), tmp_path / "a")
    incofl.run(tiny_config(*settings, "rounds=2"), tmp_path / "b")
    incofl.run(tiny_config(*settings, "rounds=3"), tmp_path / "b", resume=True)
    a, b = ((tmp_path / run / "checkpoint" / "state.safetensors").read_bytes() for run in "ab")
    assert a == b
    memories = [
        {path.name: path.read_bytes() for path in (tmp_path / run).glob("checkpoint/clients/*")} for run in "ab"
    ]
    assert memories[0] == memories[1]
    assert bool(memories[0]) == any(word in name for word in ("scaffold", "moon", "dyn", "bn"))


@pytest.mark.parametrize("family", FAMILIES[2:])
def test_every_family_is_resumed_bit_for_bit(family: str, text_root: Path, tmp_path: Path) -> None:
    """With clients' memory, and InCo across blocks, which all of these have."""
    settings = ("method=incoscaffold", "inco.reference=across-blocks", "eval.every=3")
    incofl.run(family_config(family, text_root, *settings, "rounds=3"), tmp_path / "a")
    incofl.run(family_config(family, text_root, *settings, "rounds=2"), tmp_path / "b")
    incofl.run(family_config(family, text_root, *settings, "rounds=3"), tmp_path / "b", resume=True)
    a, b = ((tmp_path / run / "checkpoint" / "state.safetensors").read_bytes() for run in "ab")
    assert a == b
    mixed = [json.loads(row)["inco"] for row in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert all("weight" in name for row in mixed for name in row)
    assert any(mixed)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fedavg", "heteroavg")])
def test_differs_from_fedavg(name: str) -> None:
    """In the second round at the latest; at the same sizes and cohorts."""
    method = METHODS[name]
    base = "fedavg" if method.server.separate else "heteroavg"
    policy = "average" if method.split.window != "prefix" else "per-level"
    options = ["cohort=6", "data.clients=6", f"split.kind={method.split.kind or 'stage'}", f"buffers={policy}"]
    options += [f"aggregate.weighting={method.server.weighting}", *model_for(name)]
    options = [option.replace("stage", "layer") for option in options] if model_for(name) else options
    ours = run_rounds(tiny_federation(f"method={name}", *options), 3, cohort=6)[-1]
    theirs = run_rounds(tiny_federation(f"method={base}", *options), 3, cohort=6)[-1]
    level = max(ours.population)
    common = [n for n in theirs.layout.parameters if n in ours.layout.parameters]
    assert any(differs(ours.state(level)[n], theirs.state(level)[n]) for n in common)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("inco") or "+" in name])
def test_inco_changes_deep_layers_only(name: str) -> None:
    """In the first round: the base method with other updates of the layers that have a shallow counterpart."""
    base = name.removesuffix("+inco") if "+" in name else name.replace("inco", "hetero", 1)
    with_inco, without = (run_rounds(tiny_federation(f"method={n}", *model_for(name)), 1)[-1] for n in (name, base))
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
    base = {"fedscaffold": "scaffold", "fedmoon": "moon"}.get(base, base)
    base = "server_optimizers" if name in FEDOPT else base
    base = "fedavg" if METHODS[name].level != "own" else base
    text = importlib.import_module(f"incofl.methods.{base}").__doc__
    assert text is not None
    assert "Differences: " in text
    assert " et al., " in text or " and " in text
    assert "20" in text


def test_every_method_has_its_row() -> None:
    """In the first table of the page on methods, by its name, or as a method with InCo."""
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    _, _, table = page.partition("| method | options |")
    rows = [row.split("|")[1] for row in table.partition("\n\n")[0].splitlines()[2:]]
    known = {word for row in rows for word in row.replace("`", " ").replace(",", " ").split()}
    names = {name for name in NAMES if name not in FEDOPT and not name.endswith("+inco")}
    assert names <= known
    assert {name.removesuffix("+inco") for name in NAMES if name.endswith("+inco")} <= known


@pytest.mark.parametrize(
    "setting",
    [
        "heteroprox prox.mu=0.3",
        "scaffold scaffold.correction_scale=0.5",
        "incomoon moon.temperature=0.2",
        "moon moon.projection=256",
        "fedrolex heterofl.mask=false",
        "fedrolex rolex.direction=backward",
        "scalefl+inco scalefl.gamma=0.1",
        "inclusivefl inclusive.beta=0.5",
        "incodyn feddyn.alpha=0.3",
        "fedadam server-adam.tau=0.1",
        "fedecover fedrand.scale=always",
        "fiarse fiarse.threshold=layer",
        "fjord+inco fjord.distil=false",
        "nefl nefl.norms=false",
        "depthfl depthfl.alpha=0.1",
        "heteroavg server.lr=0.5",
        "fedavg noise.uploads=0.5",
        "incoavg inco.rule=theorem",
        "incoavg+adam server-adam.tau=0.1",
    ],
)
def test_options_round_trip_and_arrive(setting: str) -> None:
    method, _, option = setting.partition(" ")
    config = make_config({"method": method}, [option])
    key, _, value = option.partition("=")
    section, _, name = key.partition(".")
    assert str(config.flat()[key]).lower() == value
    assert str(getattr(build_method(config).options[section], name)).lower() == value
    assert make_config(config.to_dict()) == config
    assert config.digest() != make_config({"method": method}).digest()


def test_options_of_another_method_change_nothing() -> None:
    assert make_config({"method": "heteroavg"}, ["prox.mu=0.3"]) == make_config({"method": "heteroavg"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["prox.mu=-1"], "prox.mu: got -1, expected a number >= 0"),
        (["scaffold.correction_scale=2"], "scaffold.correction_scale: got 2, expected a number from 0 to 1"),
        (["moon.temperature=0"], "moon.temperature: got 0, expected a number > 0"),
        (["moon.mu=-0.1"], "moon.mu: got -0.1, expected a number >= 0"),
        (["moon.projection=-1"], "moon.projection: got -1, expected a whole number from 0 to 65536"),
        (["scaffold.population=some"], "scaffold.population: got 'some', expected 'holders' or 'all'"),
        (["local.max_grad_norm=0"], "local.max_grad_norm: got 0, expected a number > 0 or 'none'"),
        (["prox.mu=inf"], "prox.mu: got inf, expected a number >= 0"),
        (["rolex.direction=up"], "rolex.direction: got 'up', expected 'forward' or 'backward'"),
        (["scalefl.gamma=-1"], "scalefl.gamma: got -1, expected a number >= 0"),
        (["scalefl.temperature=0"], "scalefl.temperature: got 0, expected a number > 0"),
        (["scalefl.distil_after=-1"], "scalefl.distil_after: got -1, expected a whole number >= 0 or 'none'"),
        (["scalefl.head_convs=10"], "scalefl.head_convs: got 10, expected a whole number from 0 to 9"),
        (["method=fedrolex", "buffers=per-level"], "buffers: got 'per-level', expected 'static' or 'average'"),
        (["method=heteromoon", "buffers=static"], "buffers: got 'static', expected another"),
        (["method=moon", "engine.compile=true"], "engine.compile: got true, expected false"),
        (["feddyn.alpha=0"], "feddyn.alpha: got 0, expected a number > 0"),
        (["depthfl.rise=0"], "depthfl.rise: got 0, expected a whole number >= 1 or 'none'"),
        (["nefl.steps=1"], "nefl.steps: got 1, expected true or false"),
        (["split.rounding=half"], "split.rounding: got 'half', expected 'up' or 'down'"),
        (["inclusive.beta=1.5"], "inclusive.beta: got 1.5, expected a number from 0 to 1"),
        (
            ["method=heterofl", "split.kind=stage"],
            "split.kind: got 'stage', expected 'hetero': heterofl splits by width",
        ),
    ],
)
def test_options_out_of_range(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as problem:
        tiny_federation(*settings)
    assert words in str(problem.value)


def test_scalefl_needs_blocks() -> None:
    with pytest.raises(ConfigError, match="HeadFirst cannot have early exits"):
        tiny_federation("method=scalefl", "model.name=tests.own_models:without_blocks")


def test_rejected_clients_remember_nothing() -> None:
    """A diverged turn leaves neither its update nor its memory behind."""
    federation = tiny_federation("method=heteroscaffold", "local.lr=3e38", "local.optimizer=sgd", "local.epochs=3")
    store = ClientStore(federation)
    first, last = (run_rounds(federation, 1, store=store)[i] for i in (0, -1))
    assert same(first.shared, last.shared)
    assert store.manifest == {}
