"""Anchoring: larger levels train the smallest path, too."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import incofl
from incofl.anchor import within
from incofl.engine.executor import InProcess
from incofl.engine.federation import Job
from incofl.engine.round import RoundStats, run_round
from incofl.engine.worker import Worker
from incofl.errors import ConfigError
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


def test_a_slice_in_a_slice() -> None:
    small = (slice(0, 2), torch.tensor([0, 1, 8, 9]))
    large = (slice(0, 4), torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]))
    rows, columns = within(small, large, (8, 16))
    assert rows == slice(0, 2)
    assert isinstance(columns, torch.Tensor)
    assert columns.tolist() == [0, 1, 4, 5]
    with pytest.raises(ValueError, match="not part of"):
        within((slice(2, 6),), (slice(0, 4),), (8,))


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
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)
    assert not all(torch.equal(value, start[name]) for name, value in ours.items())


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
