"""InclusiveFL: what sizes share, and how the larger teach the smaller."""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch

from incofl.client import Upload
from incofl.config.schema import ValidationConfig
from incofl.engine.executor import InProcess
from incofl.engine.federation import Job
from incofl.engine.round import RoundStats, run_round
from incofl.methods import METHODS
from incofl.methods.inclusivefl import InclusiveFL, InclusiveOptions, held_blocks
from incofl.models import ModelOptions, make_model
from incofl.server import Server
from incofl.split import make_splitter
from incofl.tensors import Tensors
from tests.federations import tiny_federation

MODEL = make_model("resnet26", ModelOptions(width=1 / 16))
SPLITTER = make_splitter(MODEL.layout, "stage", 5)
SLICES = [SPLITTER.slice(MODEL.layout, level, 0) for level in range(5)]
RULE = InclusiveFL("samples", precision="float64")


def start() -> Server:
    zero = {name: torch.zeros_like(value) for name, value in MODEL.initial.items()}
    return RULE.start(Server(MODEL.layout, zero, population={level: (SLICES[level], 20) for level in range(5)}))


def upload(level: int, value: float, examples: int = 1) -> Upload:
    """Every parameter of a block moves by ``value`` times one more than the block's number in its stage."""
    update: Tensors = {}
    for name, shape in SLICES[level].shapes.items():
        if name in MODEL.layout.parameters:
            block = MODEL.layout.block_of[name]
            factor = 1 if block is None else int(block[-1]) + 1
            update[name] = torch.full(shape, value * factor)
    return Upload(level, level, SLICES[level], update, {}, examples, 1, 0.0)


def step(server: Server, *uploads: Upload, rule: InclusiveFL = RULE) -> Server:
    return server.advance(rule.aggregate(server, [uploads]))


def moved(before: Server, after: Server, level: int, name: str) -> float:
    """By how much all elements of an entry moved."""
    return only(after.state(level)[name] - before.state(level)[name])


def only(value: torch.Tensor) -> float:
    """The value that all elements have."""
    assert float(value.max() - value.min()) < 1e-6
    return float(value.mean())


def test_private_parts() -> None:
    """The deepest block and the head: layer4.0 of ResNet10, layer4.1 of 14 and 18, layer4.2 of 22 and 26."""
    last = [held_blocks(MODEL.layout, piece)[-1] for piece in SLICES]
    assert last == ["layer4.0", "layer4.1", "layer4.1", "layer4.2", "layer4.2"]
    for level, block in enumerate(last):
        private = RULE.private(MODEL.layout, SLICES[level])
        assert {name for name in private if name in ("fc.weight", "fc.bias")} == {"fc.weight", "fc.bias"}
        assert {MODEL.layout.block_of[name] for name in private} == {block, None}
        assert start().private[level].keys() == private


def test_shared_blocks_are_averaged_over_sizes_that_do_not_end_there() -> None:
    """layer4.1: shared by 22 and 26, private to 14 and 18; stem by all, by examples."""
    server = step(start(), upload(0, 1.0), upload(1, 2.0), upload(3, 4.0, examples=3), upload(4, 8.0))
    name = "layer4.1.conv1.weight"
    assert only(server.shared[name]) == pytest.approx(2 * (3 * 4 + 8) / 4)
    assert only(server.state(1)[name]) == pytest.approx(2 * 2.0)
    assert only(server.state(3)[name]) == pytest.approx(2 * (3 * 4 + 8) / 4)
    assert only(server.shared["conv1.weight"]) == pytest.approx((1 + 2 + 3 * 4 + 8) / 6)
    assert [server.state(level)["fc.bias"][0].item() for level in range(5)] == [1, 2, 0, 4, 8]
    assert server.shared["fc.bias"][0].item() == 0


def test_momentum_by_hand() -> None:
    """Round 1: sizes 0 and 1. Round 2: size 0 alone moves its block by 0.2 m + 0.8 g.

    m for layer4.0 is the mean of size 1's layer4.0 (moved by 2) and layer4.1 (moved by 4) where the shapes agree: 3 for
    conv2, and 2 for conv1, whose shape only layer4.0 has. In round 3 nobody taught in round 2: plain g.
    """
    first = step(start(), upload(0, 1.0), upload(1, 2.0))
    assert only(first.state(0)["layer4.0.conv2.weight"]) == pytest.approx(1.0)
    second = step(first, upload(0, 1.0))
    assert moved(first, second, 0, "layer4.0.conv2.weight") == pytest.approx(0.2 * 3 + 0.8 * 1)
    assert moved(first, second, 0, "layer4.0.conv1.weight") == pytest.approx(0.2 * 2 + 0.8 * 1)
    assert (second.state(0)["fc.bias"] - first.state(0)["fc.bias"])[0].item() == 1.0
    third = step(second, upload(0, 1.0))
    assert moved(second, third, 0, "layer4.0.conv2.weight") == pytest.approx(1.0)


def test_without_momentum() -> None:
    rule = InclusiveFL("samples", precision="float64", options=InclusiveOptions(momentum=False))
    server = step(step(start(), upload(0, 1.0), upload(1, 2.0), rule=rule), upload(0, 1.0), rule=rule)
    assert only(server.state(0)["layer4.0.conv2.weight"]) == pytest.approx(2.0)
    assert server.extra == {}


def test_sizes_that_end_in_the_same_block_teach_each_other() -> None:
    """18 teaches 14: both end in layer4.1."""
    first = step(start(), upload(1, 1.0), upload(2, 5.0))
    second = step(first, upload(1, 1.0))
    assert moved(first, second, 1, "layer4.1.conv2.weight") == pytest.approx(0.2 * 10 + 0.8 * 2)


class Ones(InProcess):
    """An executor whose clients move every parameter by 1."""

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
        for (upload,) in super().train(server, jobs):
            for value in upload.update.values():
                value.fill_(1)
            yield [upload]


def test_a_server_learning_rate_scales_what_is_taught_too() -> None:
    """Everything moves by 0.2 where every update is 1, also in round 2: 0.2 m + 0.8 g with m = g = 0.2."""
    small = ["data.clients=3", "cohort=3", "data.limit=60"]
    federation = tiny_federation("method=inclusivefl", "server.lr=0.2", *small)
    before = federation.start()
    for round in range(2):
        jobs = federation.schedule(round, 3)
        stats = RoundStats(validation=ValidationConfig(norm="off"))  # such updates are longer than the model
        after = run_round(before, federation.method, jobs, Ones(federation), stats)
        for level in range(3):
            for name in federation.slice(level, round).index.keys() & federation.model.layout.parameters:
                assert moved(before, after, level, name) == pytest.approx(0.2, abs=1e-6), (round, level, name)
        before = after
    assert before.extra


class Sent(InProcess):
    """An executor that gives the uploads it was made with."""

    def __init__(self, *uploads: Upload) -> None:
        self.uploads = uploads

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
        yield self.uploads


def test_inco_mixes_last_blocks_with_the_shared_shallow_layer() -> None:
    """ResNet14's own layer4.1 moved by 0.02, the shared layer4.0.conv2 by 0.01, in all 9 elements of a kernel.

    theta = 0.02 / 0.01 = 2, norms 0.06 and 0.03: (1/3 + 2 * 1/3) (0.06 + 0.03) / 2 = 0.045.
    """
    before = start()
    buffers = {n: before.shared[n] for n in SLICES[1].index if n in MODEL.layout.buffers}
    sent = dataclasses.replace(upload(1, 0.01), buffers=buffers)
    stats = RoundStats()
    after = run_round(before, METHODS["inclusivefl+inco"], [], Sent(sent), stats)
    assert stats.rejected == []
    for name in ("layer4.1.conv1.weight", "layer4.1.conv2.weight"):
        assert moved(before, after, 1, name) == pytest.approx(0.045, rel=1e-3)
    assert moved(before, after, 1, "layer4.0.conv2.weight") == pytest.approx(0.01)
