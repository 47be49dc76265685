"""Shared and private state: who sees what, and how a round moves it."""

import torch

from incofl.aggregate import CoveredMean
from incofl.client import Upload
from incofl.layout import Layout
from incofl.method import ServerRule
from incofl.models import ModelOptions, make_model
from incofl.server import Changes, Server
from incofl.split import make_splitter
from incofl.tensors import Tensors, clone
from incofl.transform import Context, Record, Stateless

MODEL = make_model("tiny-resnet", ModelOptions(shape=(1, 8, 8)))
SPLITTER = make_splitter(MODEL.layout, "stage", 3)


def upload(client: int, level: int, value: float, examples: int = 1) -> Upload:
    """An upload whose parameters all moved by ``value`` and whose buffers all became ``value``."""
    piece = SPLITTER.slice(MODEL.layout, level, 0)
    full = {name: torch.full(piece.shapes[name], value) for name in piece.index}
    full = {name: v if MODEL.initial[name].is_floating_point() else v.long() for name, v in full.items()}
    update = {name: v for name, v in full.items() if name in MODEL.layout.parameters}
    buffers = {name: v for name, v in full.items() if name in MODEL.layout.buffers}
    return Upload(client, level, piece, update, buffers, examples, steps=1, loss=0.0)


def start() -> Server:
    return Server(MODEL.layout, {name: torch.zeros_like(value) for name, value in MODEL.initial.items()})


def advance(server: Server, rule: ServerRule, *uploads: Upload) -> Server:
    return server.advance(rule.aggregate(server, [uploads]))


def value(state: Tensors, name: str) -> float:
    assert len(set(state[name].flatten().tolist())) == 1
    return float(state[name].flatten()[0])


def test_average_policy_and_weighting() -> None:
    """Levels 0 and 2 moved by 1 and 4 with 1 and 3 examples: the stem by 2.5 (uniform) or 13/4, deep layers by 4."""
    for weighting, stem in (("uniform", 2.5), ("samples", 3.25)):
        rule = ServerRule(weighting=weighting, buffers="average")  # type: ignore[arg-type]
        server = advance(start(), rule, upload(0, 0, 1.0, 1), upload(1, 2, 4.0, 3))
        for level in range(3):
            assert value(server.state(level), "conv1.weight") == stem
            assert value(server.state(level), "bn1.running_mean") == stem
            assert value(server.state(level), "layer1.1.conv1.weight") == 4.0
        assert not any(server.private.values())
        assert server.round == 1


def test_per_level_buffers() -> None:
    """Parameters are shared; each level has its own statistics, and one that has none yet sees the average."""
    server = advance(start(), ServerRule(buffers="per-level"), upload(0, 0, 1.0), upload(1, 2, 4.0))
    assert [value(server.state(level), "conv1.weight") for level in range(3)] == [2.5] * 3
    assert [value(server.state(level), "bn1.running_mean") for level in range(3)] == [1.0, 2.5, 4.0]
    server = advance(server, ServerRule(buffers="per-level"), upload(0, 0, 3.0))
    # Level 0 has new statistics, level 2 keeps its own, the average follows whoever came.
    assert [value(server.state(level), "bn1.running_mean") for level in range(3)] == [3.0, 3.0, 4.0]


def test_per_architecture_shares_nothing() -> None:
    rule = ServerRule(buffers="per-level", separate=True)
    server = advance(start(), rule, upload(0, 0, 1.0), upload(1, 2, 4.0))
    assert [value(server.state(level), "conv1.weight") for level in range(3)] == [1.0, 0.0, 4.0]
    server = advance(server, rule, upload(0, 0, 1.0), upload(2, 1, 7.0))
    assert [value(server.state(level), "conv1.weight") for level in range(3)] == [2.0, 7.0, 4.0]
    assert value(server.shared, "conv1.weight") == 0.0


def test_running_variance_cannot_become_negative() -> None:
    """Buffers are averaged as states: from 1000 to 1e-8 exactly, where adding a difference would overshoot zero."""
    server = Server(MODEL.layout, {name: value.clone() for name, value in MODEL.initial.items()})
    server.shared["bn1.running_var"].fill_(1000.0)
    sent = upload(0, 2, 1e-8)
    for policy in ("average", "per-level"):
        moved = advance(server, ServerRule(buffers=policy), sent, sent, sent)
        assert float(moved.state(2)["bn1.running_var"].min()) > 0


def test_nothing_is_modified_in_place() -> None:
    server = advance(start(), ServerRule(), upload(0, 0, 1.0))
    shared, private = clone(server.shared), {level: clone(state) for level, state in server.private.items()}
    advance(server, ServerRule(), upload(0, 0, 2.0), upload(1, 2, 3.0))
    assert all(torch.equal(server.shared[name], shared[name]) for name in shared)
    assert all(torch.equal(server.private[0][name], private[0][name]) for name in private[0])


def test_a_round_without_uploads_changes_nothing() -> None:
    server = start()
    after = advance(server, ServerRule())
    assert all(torch.equal(after.shared[name], server.shared[name]) for name in server.shared)
    assert after.round == 1


def test_a_transform_cannot_move_what_nobody_held() -> None:
    """Whatever a transform writes there, the coverage decides."""
    weight = torch.tensor([1.0, 0.0])
    layout = Layout({"w": (None,)}, {"w": (2,)}, (), {}, frozenset())
    server = Server(layout, {"w": torch.tensor([1.0, 2.0])})
    changes = Changes(CoveredMean({"w": torch.tensor([3.0, 0.0])}, {"w": weight}))

    class Careless(Stateless):
        name = "careless"

        def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
            return {"w": torch.tensor([30.0, 40.0])}, state, {}

    changes, _ = changes.transformed(Careless(), server)
    after = server.advance(changes)
    assert after.shared["w"].tolist() == [31.0, 2.0]
