"""Anchoring: larger levels train the smallest path, too."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import incofl
from incofl.engine.executor import InProcess
from incofl.engine.federation import Job
from incofl.engine.round import RoundStats, run_round
from incofl.engine.worker import Worker
from incofl.errors import ConfigError
from incofl.flower.protocol import most_steps
from incofl.path import within
from incofl.split import submodel
from tests.federations import tiny_config, tiny_federation
from tests.split.test_growth import tensors

ONE_STEP = ("local.optimizer=sgd", "local.momentum=0", "local.lr=0.1", "local.batch_size=1000", "data.limit=100")


@pytest.mark.parametrize("split", [("split.kind=stage",), ("split.kind=hetero", "model.width=1")])
@pytest.mark.parametrize("distil", [0.0, 0.5])
def test_one_step_against_plain_autograd(split: tuple[str, ...], distil: float) -> None:
    """The gradient of the client's loss plus 0.3 times that of the smallest model, whose weights are a part of it."""
    options = ("anchor.weight=0.3", f"anchor.distil={distil}", "anchor.temperature=2", "data.clients=3", "cohort=1")
    federation = tiny_federation("method=heteroavg+anchor", *ONE_STEP, *split, *options)
    server, job = federation.start(), Job(2, 2, 0)
    ((upload,),) = InProcess(federation).train(server, [job])
    piece, small = federation.slice(2, 0), federation.slice(0, 0)
    held = {n: v.clone().requires_grad_(n in server.layout.parameters) for n, v in server.shared.items()}
    own = [federation.data.train.pick(federation.partition[2])]
    x, y = federation.data.pipeline.test(own[0].x), own[0].y
    logits = []
    for slice_ in (piece, small):
        module = submodel(federation.model.template, federation.model.layout, slice_).train()
        state = slice_.look(held)
        logits.append(torch.func.functional_call(module, {n: v.clone() for n, v in state.items()}, (x,)))
    loss = functional.cross_entropy(logits[0], y) + 0.3 * functional.cross_entropy(logits[1], y)
    q, log_p = (logits[0].detach() / 2).softmax(1), (logits[1] / 2).log_softmax(1)
    loss = loss + distil * 4 * functional.kl_div(log_p, q, reduction="batchmean")
    loss.backward()  # type: ignore[no-untyped-call]
    for name, update in upload.update.items():
        gradient = held[name].grad
        assert gradient is not None
        (expected,) = piece.look({name: -0.1 * gradient}).values()
        torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-6)


def test_without_weight_it_is_the_method_itself(tmp_path: Path) -> None:
    incofl.run(tiny_config("method=heteroavg"), tmp_path / "plain", progress=False)
    settings = ("method=heteroavg+anchor", "anchor.weight=0")
    incofl.run(tiny_config(*settings), tmp_path / "anchored", progress=False)
    first, second = tensors(tmp_path / "plain"), tensors(tmp_path / "anchored")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_second_batch() -> None:
    """The smallest path is computed in the first, the third ... step."""
    federation = tiny_federation("method=heteroavg+anchor", "anchor.every=2", "local.batch_size=5", "data.clients=4")
    worker, calls = Worker(federation), []
    worker.module(0, 0).register_forward_hook(lambda *_: calls.append(1))
    upload = worker.train(federation.start(), Job(3, 2, 0))
    assert len(calls) == -(-upload.steps // 2)


def test_the_plan_counts_the_smallest_path() -> None:
    plain = tiny_federation("method=heteroavg").costs
    anchored = tiny_federation("method=heteroavg+anchor").costs
    halved = tiny_federation("method=heteroavg+anchor", "anchor.every=2").costs
    assert [cost.macs for cost in anchored] == [plain[0].macs, *(cost.macs + plain[0].macs for cost in plain[1:])]
    assert halved[2].macs == plain[2].macs + plain[0].macs // 2
    federation = tiny_federation()
    smallest, buffers = federation.slice(0, 0), federation.model.layout.buffers
    statistics = sum(federation.model.initial[name].nbytes for name in smallest.shapes.keys() & buffers)
    assert statistics > 0
    assert [cost.bytes_up for cost in anchored] == [plain[0].bytes_up, *(c.bytes_up + statistics for c in plain[1:])]
    assert [cost.bytes_down for cost in anchored][2] == plain[2].bytes_down + statistics
    static = tiny_federation("method=heteroavg+anchor", "buffers=static").costs
    assert [cost.bytes_up for cost in static] == [cost.bytes_up for cost in plain]
    assert anchored[2].memory > plain[2].memory


def test_windows_that_move_have_no_smallest_path() -> None:
    with pytest.raises(ConfigError, match="there is no smallest path to anchor"):
        tiny_federation("method=fedrolex+anchor", "buffers=static")


def test_distillation_needs_classes() -> None:
    from incofl import Data, Task
    from incofl.config import make_config
    from incofl.engine.build import build

    data = Data((torch.rand(40, 6), torch.rand(40, 1)))
    config = {"method": "heteroavg+anchor", "anchor": {"distil": 1.0}, "data": {"clients": 4}, "cohort": 2}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 8)
            self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
            self.head = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.blocks(self.stem(x)))
            return out

    with pytest.raises(ConfigError, match=r"anchor\.distil: needs a task with classes"):
        build(make_config(config, model=Net, data=data, task=Task(functional.mse_loss)))


@pytest.mark.parametrize("split", [("split.kind=stage",), ("split.kind=hetero", "model.width=1")])
@pytest.mark.parametrize("buffers", ["per-level", "average", "static"])
def test_without_share_the_smallest_level_is_trained_as_if_everybody_trained_it(
    split: tuple[str, ...], buffers: str
) -> None:
    """Parameters and statistics, after two rounds; whatever the larger levels learn."""
    common = (*split, f"buffers={buffers}", "local.batch_size=20", "data.limit=200", "data.clients=6", "cohort=4")
    states = []
    for method in ("heteroavg+anchor", "allsmall"):
        share = ("anchor.share=0",) if "anchor" in method else ()
        federation = tiny_federation(f"method={method}", *share, *common)
        server = federation.start()
        for round in range(2):
            jobs = federation.schedule(round, 4)
            server = run_round(server, federation.method, jobs, InProcess(federation), RoundStats())
        states.append(federation.slice(0, 0).take(server.state(0)))
    ours, theirs = states
    start = federation.slice(0, 0).take(federation.start().state(0))
    assert any(job.level for job in jobs) or federation.method.name == "allsmall"
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert not all(torch.equal(value, start[name]) for name, value in ours.items())


def test_the_norm_of_each_path_is_bounded_by_itself() -> None:
    """After one step of SGD both have the norm lr * most; together, as without anchoring, they would be shorter."""
    lr, most = 0.1, 0.2
    options = (f"local.max_grad_norm={most}", "data.clients=3", "cohort=1")
    federation = tiny_federation("method=heteroavg+anchor", *ONE_STEP, *options)
    update = Worker(federation).train(federation.start(), Job(2, 2, 0)).update
    small = federation.slice(0, 0).index.keys() & update.keys()  # levels of depth: whole tensors
    for part in (small, update.keys() - small):
        assert float(torch.stack([update[name].norm() for name in part]).norm()) == pytest.approx(lr * most, rel=1e-3)


def test_with_a_share_the_smallest_level_learns_from_the_larger_ones_too() -> None:
    common = ("data.limit=200", "data.clients=3", "cohort=1", *ONE_STEP[:3])
    updates = {}
    for share in (0.0, 0.25, 1.0):
        federation = tiny_federation("method=heteroavg+anchor", f"anchor.share={share}", *common)
        upload = Worker(federation).train(federation.start(), Job(2, 2, 0))
        updates[share] = federation.slice(0, 0).shapes.keys() & upload.update.keys(), upload.update
    names, whole = updates[1.0]
    head = next(name for name in names if name.endswith("fc.weight"))
    assert not torch.allclose(updates[0.0][1][head], whole[head], atol=1e-5)
    assert not torch.allclose(updates[0.25][1][head], whole[head], atol=1e-5)


@pytest.mark.parametrize("split", [("split.kind=stage",), ("split.kind=hetero", "model.width=1")])
def test_beyond_epochs_leave_the_smallest_path_as_it_is(split: tuple[str, ...]) -> None:
    """With Adam, whose momentum would move it; what the client holds in addition learns more."""
    common = (*split, "method=heteroavg+anchor", "anchor.share=0", "data.clients=3", "cohort=1", "local.batch_size=20")
    uploads = []
    for beyond in (0, 2):
        federation = tiny_federation(*common, f"anchor.beyond={beyond}")
        uploads.append(Worker(federation).train(federation.start(), Job(2, 2, 0)))
    short, long = uploads
    assert long.steps == 3 * short.steps
    small, large = federation.slice(0, 0), federation.slice(2, 0)
    differ = 0
    for name in federation.model.layout.parameters & large.shapes.keys():
        ours, theirs = long.update[name].clone(), short.update[name].clone()
        if name in small.index:
            at = within(small.index[name], large.index[name], federation.model.layout.shapes[name])
            assert torch.equal(ours[at], theirs[at])
            ours[at] = theirs[at]
        differ += not torch.equal(ours, theirs)
    assert differ > 5
    assert all(torch.equal(value, short.smallest[name]) for name, value in long.smallest.items())
    assert short.smallest


def test_a_beyond_epoch_by_hand() -> None:
    """A step with the smallest path, and one of plain SGD for the rest of the parameters."""
    common = ("method=heteroavg+anchor", "anchor.share=0", *ONE_STEP, "data.clients=3", "cohort=1", "local.epochs=1")
    federation = tiny_federation(*common, "anchor.beyond=1")
    first = tiny_federation(*common)
    start, job = federation.start(), Job(2, 2, 0)
    once, twice = (Worker(f).train(start, job) for f in (first, federation))
    piece, small = federation.slice(2, 0), federation.slice(0, 0)
    given = piece.take(start.state(2))
    after = {
        n: (v + once.update[n] if n in once.update else v).requires_grad_(n in once.update) for n, v in given.items()
    }
    own = federation.data.train.pick(federation.partition[2])
    module = submodel(federation.model.template, federation.model.layout, piece).train()
    logits = torch.func.functional_call(module, after, (federation.data.pipeline.test(own.x),))
    functional.cross_entropy(logits, own.y).backward()  # type: ignore[no-untyped-call]
    for name, update in twice.update.items():
        gradient = after[name].grad
        assert gradient is not None
        step = torch.zeros_like(update) if name in small.index else -0.1 * gradient  # levels differ in depth alone
        torch.testing.assert_close(update, once.update[name] + step, rtol=1e-4, atol=1e-6)


def test_beyond_epochs_count_in_the_time_of_a_turn() -> None:
    plain, long = (tiny_federation("method=heteroavg+anchor", f"anchor.beyond={n}", "local.epochs=2") for n in (0, 3))
    assert [cost.macs for cost in plain.costs] == [cost.macs for cost in long.costs]
    smallest, *larger = (cost.macs for cost in long.costs)
    assert [long.turn(level) for level in range(3)] == [2 * smallest, *(5 * macs - 3 * smallest for macs in larger)]
    assert [most_steps(long, level, 2 * long.local.batch_size) for level in range(3)] == [4, 10, 10]


@pytest.mark.parametrize("method", ["heteronova", "heteroscaffold"])
def test_methods_that_count_steps_refuse_beyond_epochs(method: str) -> None:
    with pytest.raises(ConfigError, match=r"anchor\.beyond: got 1, expected 0: .* counts the steps"):
        tiny_federation(f"method={method}+anchor", "anchor.beyond=1")
    tiny_federation(f"method={method}+anchor")
