"""Nested models: FjORD's widths inside a client's model, NeFL's steps of residual branches."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from incofl.client import ClientInput, Local, LocalSettings
from incofl.costs import costs
from incofl.engine.federation import Federation, Job
from incofl.engine.worker import Worker
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.methods.fjord import PATHS, FjORD, path_in, soft_loss
from incofl.methods.nefl import STEP, NeFL
from incofl.path import Path
from incofl.split import cut, submodel
from tests.federations import run_rounds, tiny_config, tiny_federation
from tests.methods.test_identities import near, plain_fedavg, same

SAMPLES = "aggregate.weighting=samples"


def wide(federation: Federation, level: int = -1) -> nn.Module:
    """A module of a level with the initial values."""
    level %= len(federation.splitter.depths)
    piece = federation.slice(level, 0)
    module = submodel(federation.model.template, federation.model.layout, piece)
    module.load_state_dict(piece.take(federation.model.initial))
    return module


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("distil", ["true", "false"])
def test_fjord_with_one_width_is_plain_fedavg(distil: str) -> None:
    options = ["split.levels=1", "aggregate.precision=float64", "aggregate.weighting=uniform"]
    federation = tiny_federation("method=fjord", f"fjord.distil={distil}", *options)
    assert near(run_rounds(federation, 2)[-1].state(0), plain_fedavg(federation, rounds=2, cohort=4))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("model", ["tiny-resnet", "tiny-vit", "tests.own_models:encoder"])
def test_a_path_is_the_smaller_model_inside_the_larger(model: str) -> None:
    """The same logits, and gradients at the positions that it holds and nowhere else."""
    federation = tiny_federation("method=fjord", f"model.name={model}", *(["model.patch=2"] if "vit" in model else []))
    layout, splitter = federation.model.layout, federation.splitter
    large, small = wide(federation, 2).train(), wide(federation, 0).train()
    path = path_in(large, layout, splitter, 0, 2)
    x = federation.data.pipeline.test(federation.data.train.pick(slice(6)).x)
    assert isinstance(x, torch.Tensor)
    torch.manual_seed(0)
    expected = small(x)
    torch.manual_seed(0)
    found = path(large, x)
    assert torch.allclose(found, expected, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in small.named_parameters():
        inner, outer = parameter.grad, large.get_parameter(name).grad
        assert inner is not None
        assert outer is not None
        back = torch.zeros_like(outer)
        path.part.put({name: inner}, {name: back})
        assert torch.allclose(outer, back, atol=1e-12)


def test_soft_labels_by_hand() -> None:
    """Teacher (log 3, 0): 3/4 and 1/4. Student (0, log 3): log 4 - log 3 / 4; the teacher has no gradient."""
    log3 = float(torch.tensor(3.0).log())
    teacher, student = torch.tensor([[log3, 0.0]], requires_grad=True), torch.tensor([[0.0, log3]], requires_grad=True)
    loss = soft_loss(student, teacher)
    assert float(loss.detach()) == pytest.approx(2 * 0.6931472 - log3 / 4, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert teacher.grad is None
    assert student.grad is not None
    assert student.grad.flatten().tolist() == pytest.approx([0.25 - 0.75, 0.75 - 0.25])


def test_every_width_is_drawn_alike() -> None:
    """Of 600 batches each of three widths has about 200, and without distillation only that one is computed."""
    counts = [0, 0, 0]

    class Counted(Path):
        def __call__(self, model: nn.Module, x: object) -> torch.Tensor:
            counts[int(self.part.shapes["level"][0])] += 1
            return torch.zeros(1, 2, requires_grad=True)

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts[2] += 1
            return torch.zeros(1, 2, requires_grad=True)

    model, empty = Own(), tiny_federation().slice(0, 0)
    vars(model)[PATHS] = [Counted(model, dataclasses.replace(empty, shapes={"level": (at,)})) for at in range(2)]
    local = Local(model, ClientInput({}), LocalSettings())
    torch.manual_seed(0)
    for _ in range(600):
        FjORD(distil=False).loss(local, torch.zeros(1), torch.zeros(1, dtype=torch.long))
    assert sum(counts) == 600
    assert all(abs(count - 200) < 3 * (600 * 2 / 9) ** 0.5 for count in counts)


def test_a_client_has_a_path_for_every_smaller_level() -> None:
    federation = tiny_federation("method=fjord")
    for level in range(3):
        module = wide(federation, level)
        FjORD().nest(module, federation.model.layout, federation.splitter, level)
        shapes = [path.part.shapes["fc.weight"] for path in vars(module)[PATHS]]
        assert shapes == [federation.slice(inner, 0).shapes["fc.weight"] for inner in range(level)]


def test_a_path_uses_the_statistics_of_a_frozen_norm() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2)).requires_grad_(False)
    layout = Layout.of(model, {}, [], {})
    x = torch.randn(5, 2) + 3
    found = Path(copy.deepcopy(model), cut(layout, []))(model.train(), x)
    assert torch.equal(found, model.eval()(x))


@pytest.mark.parametrize("distil", [True, False])
def test_the_loss_of_fjord_by_hand(distil: bool) -> None:
    """Whole model (3/4, 1/4), narrow path (1/4, 3/4), class 0: log 4/3 and log 4, or log 4 - log 3 / 4 if taught."""
    log3, y = math.log(3), torch.tensor([0])

    class Narrow(Path):
        def __call__(self, model: nn.Module, x: object) -> torch.Tensor:
            return torch.tensor([[0.0, log3]])

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[log3, 0.0]])

    model = Whole()
    vars(model)[PATHS] = [Narrow(model, tiny_federation().slice(0, 0))]
    local, whole = Local(model, ClientInput({}), LocalSettings()), math.log(4 / 3)
    torch.manual_seed(0)
    found = {round(float(FjORD(distil=distil).loss(local, torch.zeros(1), y)), 4) for _ in range(40)}
    narrow = whole + math.log(4) - log3 / 4 if distil else math.log(4)
    assert found == {round(whole, 4), round(narrow, 4)}


def test_clients_of_fjord_weigh_by_examples() -> None:
    ours, theirs = (run_rounds(tiny_federation("method=fjord", *more), 1)[-1] for more in ([], [SAMPLES]))
    uniform = run_rounds(tiny_federation("method=fjord", "aggregate.weighting=uniform"), 1)[-1]
    assert same(ours.shared, theirs.shared)
    assert not same(ours.shared, uniform.shared)


def test_fjord_counts_what_it_computes() -> None:
    """With distillation the whole model and on average a third of each narrower one; without, a third of each."""
    config = ["split.kind=hetero", "split.levels=3", SAMPLES]
    plain = tiny_federation("method=heteroavg", *config)
    macs = [cost.macs for cost in plain.costs]
    for distil, expected in ((True, macs[2] + (macs[0] + macs[1]) / 3), (False, sum(macs) / 3)):
        federation = tiny_federation("method=fjord", f"fjord.distil={str(distil).lower()}", *config)
        found = costs(federation.model, federation.splitter, federation.local, federation.method)
        assert found[2].macs == round(expected)
        assert found[0] == plain.costs[0]
        assert (found[2].memory > plain.costs[2].memory) == distil


@pytest.mark.parametrize("kind", ["stage", "hetero"])
def test_nefl_with_steps_of_one_and_shared_norms_is_the_covered_mean(kind: str) -> None:
    settings = [f"split.kind={kind}", "cohort=4"]
    ours = run_rounds(tiny_federation("method=nefl", "nefl.steps=false", "nefl.norms=false", *settings), 2)[-1]
    theirs = run_rounds(tiny_federation("method=heteroavg", *settings), 2)[-1]
    assert all(torch.equal(ours.shared[name], value) for name, value in theirs.shared.items())
    assert {name.rpartition(".")[2] for name in ours.shared.keys() - theirs.shared.keys()} == {STEP}


def test_levels_share_all_but_steps_and_norms() -> None:
    federation = tiny_federation("method=nefl", "data.clients=6")
    server = run_rounds(federation, 2, cohort=6)[-1]
    layout, first = federation.model.layout, federation.model.initial
    steps = {name for name in layout.parameters if name.endswith(STEP)}
    norms = {name for name in layout.axes if ".bn" in name or name.startswith("bn")} | {
        name for name in layout.axes if "downsample.1" in name
    }
    assert len(steps) == len(layout.blocks)
    for level in (1, 2):
        own = server.private[level].keys()
        assert own == (steps | norms) & federation.slice(level, 0).index.keys()
    block = next(name for name in steps if name in server.private[0])
    values = [float(server.state(level)[block]) for level in range(3)]
    assert len(set(values)) == 3
    assert all(torch.equal(server.shared[name], first[name]) for name in steps)
    assert not torch.equal(server.shared["conv1.weight"], first["conv1.weight"])


@pytest.mark.parametrize("settings", [["model.name=tiny-vit", "model.patch=2"], ["nefl.norms=false"]], ids=" ".join)
def test_steps_belong_to_a_level_whatever_the_norms(settings: list[str]) -> None:
    """A ViT has no batch norm; where levels share it, they keep nothing but its statistics, which are per level."""
    federation = tiny_federation("method=nefl", "data.clients=6", *settings)
    server, layout = run_rounds(federation, 2, cohort=6)[-1], federation.model.layout
    steps = {name for name in layout.parameters if name.endswith(STEP)}
    for level in range(3):
        assert server.private[level].keys() == (steps | layout.buffers) & federation.slice(level, 0).index.keys()
    values = [float(server.state(level)[min(steps)]) for level in range(3)]
    assert len(set(values)) == 3


@pytest.mark.parametrize("training", [True, False])
def test_an_attention_of_torch_has_its_step_as_a_whole(training: bool) -> None:
    """It does not call its last layer, and returns a tuple: with s = 3, three times what it says."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.as_tensor(self.attention(x, x, x)[0])

    model, x = nn.Sequential(Attending()).train(training), torch.randn(2, 3, 4)
    closing = [f"0.attention.out_proj.{key}" for key in ("weight", "bias")]
    added = model(x) - x
    layout = NeFL().extend(model, Layout.of(model, {}, [["0"]], {}, closing=closing))
    assert torch.equal(model(x) - x, added)
    name = f"0.attention.{STEP}"
    assert name in layout.parameters
    model.get_parameter(name).data.fill_(3.0)
    assert torch.allclose(model(x) - x, 3 * added, atol=1e-5)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("model", "ends"), [("tiny-resnet", 1), ("tiny-vit", 2), ("tiny-mlp", 1)])
def test_a_step_multiplies_what_a_block_adds(model: str, ends: int) -> None:
    """x + s F(x): linear in s, the identity at 0; a ResNet's blocks end in a ReLU, which positive sums do not see."""
    federation = tiny_federation("method=nefl", f"model.name={model}", *(["model.patch=2"] if "vit" in model else []))
    module, layout = wide(federation).eval(), federation.model.layout
    block = module.get_submodule(layout.blocks[-1])
    seen: dict[str, torch.Tensor] = {}
    hook = block.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].abs() + 1))
    example = federation.data.pipeline.test(federation.data.train.pick(slice(3)).x)
    module(example)
    hook.remove()
    steps = [parameter for name, parameter in block.named_parameters() if name.endswith(STEP)]
    assert len(steps) == ends

    @torch.no_grad()
    def added(size: float) -> torch.Tensor:
        for step in steps[:-1]:
            step.fill_(0.0)
        steps[-1].fill_(size)
        return torch.as_tensor(block(seen["x"])) - seen["x"]

    assert torch.equal(added(0.0), torch.zeros_like(seen["x"]))
    assert torch.allclose(added(1e-3), 1e-3 * added(1.0) if "resnet" not in model else 10 * added(1e-4), atol=1e-9)
    assert float(added(1e-3).abs().max()) > 0


def test_models_without_known_branches_are_refused() -> None:
    for model in ("tests.own_models:encoder",):
        with pytest.raises(ConfigError, match=r"model.name: .* cannot have steps, expected residual blocks of which"):
            tiny_federation("method=nefl", f"model.name={model}")


def test_a_turn_trains_the_steps() -> None:
    federation = tiny_federation("method=nefl")
    upload = Worker(federation).train(federation.start(), Job(9, 2, 0))
    steps = {name: value for name, value in upload.update.items() if name.endswith(STEP)}
    assert steps
    assert all(float(value) != 0 for value in steps.values())
    frozen = tiny_federation("method=nefl", "nefl.steps=false")
    assert not any(name.endswith(STEP) for name in Worker(frozen).train(frozen.start(), Job(9, 2, 0)).update)


def test_options() -> None:
    with pytest.raises(ConfigError, match=r"fjord.distil: needs a task with classes"):
        tiny_federation("method=fjord", "task.name=multilabel")
    with pytest.raises(ConfigError, match=r"split.kind: got 'stage', expected 'hetero': fjord splits by width"):
        tiny_config("method=fjord", "split.kind=stage")
