"""The rules of federated LoRA against dense matrices, in float64, and what holds of every rule in a run."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import incofl
from incofl.anchor import SmallestPath
from incofl.client import Upload
from incofl.engine.build import build, outline, plan_fleet
from incofl.engine.run_folder import RunFolder
from incofl.engine.worker import Worker
from incofl.errors import ConfigError, LayoutError
from incofl.layout import Layout
from incofl.method import Method
from incofl.methods import ADAPTERS, METHODS
from incofl.methods.adapters import Adapter, Lora, RankRule, adapters
from incofl.methods.factors import Factors, cut_ranks, svd_of_sum
from incofl.methods.pruning import Pruned, SelfPruning
from incofl.models import Model, as_model
from incofl.server import Server
from incofl.split import Splitter, submodel
from incofl.tensors import Tensors
from tests.federations import run_rounds, tiny_config
from tests.own import Net
from tests.shell import Shell

pytest.importorskip("peft")
RANKS = (2, 4, 8)
MERGING = ("flora", "fedex")


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclasses.dataclass
class Case:
    """A server between rounds, some uploads, and the factors that each client ends with."""

    method: Method
    server: Server
    uploads: list[Upload]

    @property
    def layout(self) -> Layout:
        return self.server.layout

    @property
    def adapters(self) -> list[Adapter]:
        return adapters(self.layout)

    def factors(self, adapter: Adapter) -> list[tuple[Tensor, Tensor]]:
        """A_k and B_k of each client."""
        found = []
        for upload in self.uploads:
            received = upload.slice.take(self.server.shared)
            a, b = (received[name] + upload.update.get(name, 0) for name in adapter[:2])
            found.append((a, b))
        return found

    def mean_product(self, adapter: Adapter, weights: Sequence[float]) -> Tensor:
        total: Tensor = sum(p * (b @ a) for p, (a, b) in zip(weights, self.factors(adapter), strict=True))  # type: ignore[assignment]
        return total / sum(weights)

    def banded_product(self, adapter: Adapter, weights: Sequence[float]) -> Tensor:
        """The sum over ranks of the mean of their products over those that hold them; what nobody holds stays."""
        dense = torch.zeros(12, 12)
        for rank in range(8):
            held = [(p, a, b) for p, (a, b) in zip(weights, self.factors(adapter), strict=True) if rank < len(a)]
            held = held or [(1, self.server.shared[adapter.a], self.server.shared[adapter.b])]
            for p, a, b in held:
                dense += p / sum(p for p, _, _ in held) * torch.outer(b[:, rank], a[rank])
        return dense

    def after(self) -> Server:
        return self.server.advance(self.method.server.aggregate(self.server, [self.uploads]))


def model_of(rule: RankRule, levels: Sequence[int] = RANKS) -> Model:
    torch.manual_seed(0)
    net = Net(inputs=6, outputs=3, width=12, blocks=2)
    return as_model(net, rule.extend(net, layout_of_net(), levels), torch.zeros(3, 6))


@functools.cache
def layout_of_net() -> Layout:
    return Layout.infer(Net(6, 3, 12, 2), torch.zeros(3, 6))


def case(name: str, levels: Sequence[int] = RANKS, clients: Sequence[int] = (0, 1, 1, 2), round: int = 0) -> Case:
    """Clients of some levels that each move everything at random."""
    method = METHODS[name]
    method = dataclasses.replace(method, server=dataclasses.replace(method.server, precision="float64"))
    assert isinstance(method.split, RankRule)
    model = model_of(method.split, levels)
    splitter = method.split.splitter(model.layout, "rank", levels)
    rng = torch.Generator().manual_seed(1)
    shared = {
        name: torch.randn(value.shape, generator=rng) if name in model.layout.parameters else value
        for name, value in model.initial.items()
    }
    server = Server(model.layout, shared, round=round)
    uploads = []
    for client, level in enumerate(clients):
        piece = splitter.slice(model.layout, level, round, client)
        names = [name for name in piece.index if name in model.layout.parameters - piece.given]
        update = {name: torch.randn(piece.shapes[name], generator=rng) for name in names}
        uploads.append(Upload(client, level, piece, update, examples=10 * (1 + client), steps=1))
    return Case(method, server, uploads)


WEIGHTS = (10, 20, 30, 40)


def close(a: Tensor, b: Tensor, at: float = 1e-10) -> bool:
    return torch.allclose(a, b, rtol=0, atol=at)


def test_qr_and_svd_are_the_dense_svd() -> None:
    rng = torch.Generator().manual_seed(0)
    for outputs, inputs, ranks in ((30, 20, (2, 4, 8)), (9, 40, (8, 8, 8)), (12, 12, (1,))):
        parts = [
            Factors(torch.randn(r, inputs, generator=rng), torch.randn(outputs, r, generator=rng), 1 / (1 + r))
            for r in ranks
        ]
        dense = sum(part.weight * part.b @ part.a for part in parts)
        assert isinstance(dense, Tensor)
        u, s, v = svd_of_sum(parts)
        assert close(u @ s.diag() @ v, dense)
        expected = torch.linalg.svdvals(dense)
        assert close(s[: len(expected)], expected[: len(s)])
        for kept in (1, 3, 8):
            du, ds, dv = torch.linalg.svd(dense)
            truncated = du[:, :kept] @ ds[:kept].diag() @ dv[:kept]
            old = Factors(torch.randn(kept, inputs, generator=rng), torch.randn(outputs, kept, generator=rng))
            for balanced in (True, False):
                new = cut_ranks(parts, old, balanced)
                assert close(new.b @ new.a, truncated)
                assert float(new.a.norm(dim=1).min()) > 1e-3  # an A of zeros, beside a B of zeros, would never learn
                live = slice(0, min(kept, sum(ranks)))
                if balanced:
                    assert close(new.a[live].norm(dim=1), new.b[:, live].norm(dim=0)) or sum(ranks) < kept
            assert parts[0].norm == pytest.approx(float((parts[0].b @ parts[0].a).norm()))


def test_covered_is_the_mean_by_hand() -> None:
    c = case("covered")
    after = c.after().shared
    for adapter in c.adapters:
        for dim, name in enumerate(adapter[:2]):
            for rank in range(8):
                held = [
                    (p, pair[dim].select(dim, rank))
                    for p, pair in zip(WEIGHTS, c.factors(adapter), strict=True)
                    if rank < pair[0].shape[0]
                ]
                expected = sum(p * x for p, x in held) / sum(p for p, _ in held)
                assert isinstance(expected, Tensor)
                assert close(after[name].select(dim, rank), expected)
    assert all(torch.equal(after[name], c.server.shared[name]) for name in c.layout.frozen)


def test_with_equal_ranks_fedit_covered_and_hetlora_are_one() -> None:
    """HetLoRA weighs by norms: with equal ones it is the plain mean."""
    cases = [case(name, (4,), (0, 0, 0)) for name in ("fedit", "covered", "hetlora")]
    for c in cases:
        c.uploads = [
            dataclasses.replace(u, update=_turned(c, u, number), examples=5) for number, u in enumerate(c.uploads)
        ]
    fedit, covered, hetlora = (c.after().shared for c in cases)
    for name, value in fedit.items():
        assert torch.equal(value, covered[name])
        assert close(value, hetlora[name])


def _turned(c: Case, upload: Upload, number: int) -> Tensors:
    """An update after which the products of all clients have one norm: the first client's, with signs changed."""
    update, first = dict(upload.update), c.uploads[0].update
    for adapter in c.adapters:
        for name in adapter[:2]:
            old = c.server.shared[name]
            new = old + first[name]
            update[name] = (new.flip(1 if name == adapter.a else 0) if number else new) - old
    return update


def test_hetlora_by_hand() -> None:
    c = case("hetlora")
    weights = [sum(float((c.factors(x)[k][1] @ c.factors(x)[k][0]).norm()) for x in c.adapters) for k in range(4)]
    after = c.after().shared
    for adapter in c.adapters:
        a, b = torch.zeros(8, 12), torch.zeros(12, 8)
        for weight, (a_k, b_k) in zip(weights, c.factors(adapter), strict=True):
            a[: len(a_k)] += weight / sum(weights) * a_k
            b[:, : len(a_k)] += weight / sum(weights) * b_k
        assert close(after[adapter.a], a)
        assert close(after[adapter.b], b)
    few = case("hetlora", clients=(0, 0))  # ranks that nobody held
    kept = few.after().shared
    for adapter in few.adapters:
        assert torch.equal(kept[adapter.a][2:], few.server.shared[adapter.a][2:])


def test_flexlora_is_the_dense_truncated_svd() -> None:
    c = case("flexlora")
    after = c.after().shared
    for adapter in c.adapters:
        u, s, v = torch.linalg.svd(c.mean_product(adapter, WEIGHTS))
        for rank in (1, 2, 4, 8):  # what each level gets is the best of its rank
            dense = u[:, :rank] @ s[:rank].diag() @ v[:rank]
            assert close(after[adapter.b][:, :rank] @ after[adapter.a][:rank], dense)


def test_raflora_weighs_each_band_over_its_holders() -> None:
    for clients, weights in (((0, 1, 1, 2), WEIGHTS), ((0, 1), WEIGHTS[:2])):
        c = case("raflora", clients=clients)
        after = c.after().shared
        for adapter in c.adapters:
            u, s, v = torch.linalg.svd(c.banded_product(adapter, weights))
            assert close(after[adapter.b] @ after[adapter.a], u[:, :8] @ s[:8].diag() @ v[:8])


@pytest.mark.parametrize("name", MERGING)
@pytest.mark.parametrize("levels", [(8,), RANKS])
def test_flora_and_fedex_are_the_dense_mean_of_products(name: str, levels: tuple[int, ...]) -> None:
    """The server's full model after the round: W + s B A."""
    clients = (0, 1, 1, 2) if len(levels) > 1 else (0, 0, 0, 0)
    c = case(name, levels, clients)
    after, scale = c.after().shared, Lora().scale(8)
    assert c.layout.given == {adapter.base for adapter in c.adapters}
    for adapter in c.adapters:
        product = (c.banded_product if name == "fedex" else c.mean_product)(adapter, WEIGHTS)
        dense = c.server.shared[adapter.base] + scale * product
        assert close(after[adapter.base] + scale * after[adapter.b] @ after[adapter.a], dense)
        if name == "flora":
            assert not after[adapter.b].any()
            assert 0.9 / math.sqrt(12) < float(after[adapter.a].abs().max()) <= 1 / math.sqrt(12)
    assert all(torch.equal(after[name], c.server.shared[name]) for name in c.layout.frozen)


@pytest.mark.parametrize("clients", [(0, 1, 1, 2), (0, 1)])
@pytest.mark.parametrize("name", ["covered", "raflora", "fedex", "ffa", "rolora"])
def test_where_nobody_learns_the_model_stays(name: str, clients: tuple[int, ...]) -> None:
    """Else what few clients hold, or nobody in this round, would fade away or blow up round after round."""
    c = case(name, clients=clients)
    c.uploads = [dataclasses.replace(u, update={n: 0 * x for n, x in u.update.items()}) for u in c.uploads]
    before, after, scale = c.server.shared, c.after().shared, Lora().scale(8)
    for adapter in c.adapters:
        was, now = (state[adapter.base] + scale * state[adapter.b] @ state[adapter.a] for state in (before, after))
        assert close(was, now)
        assert name == "raflora" or close(before[adapter.base], after[adapter.base])


@pytest.mark.parametrize("name", ["hetlora", "flexlora", "flora"])
def test_rules_that_count_missing_ranks_as_zeros_shrink_them(name: str) -> None:
    """As published: the part of a product that a client does not hold is 0 in the mean."""
    c = case(name)
    c.uploads = [dataclasses.replace(u, update={n: 0 * x for n, x in u.update.items()}) for u in c.uploads]
    before, after, scale = c.server.shared, c.after().shared, Lora().scale(8)
    for adapter in c.adapters:
        was, now = (state[adapter.base] + scale * state[adapter.b] @ state[adapter.a] for state in (before, after))
        assert not close(was, now, 0.1)


@pytest.mark.parametrize(("name", "round"), [("ffa", 0), ("ffa", 1), ("rolora", 0), ("rolora", 1)])
def test_one_factor_at_a_time_is_the_dense_mean(name: str, round: int) -> None:
    c = case(name, (4,), (0, 0, 0, 0), round)
    after = c.after().shared
    for adapter in c.adapters:
        assert close(after[adapter.b] @ after[adapter.a], c.mean_product(adapter, WEIGHTS))
        other = adapter.b if name == "rolora" and round else adapter.a
        assert torch.equal(after[other], c.server.shared[other])
        assert (adapter.a in c.layout.frozen) == (name == "ffa")


def test_a_product_of_means_is_not_the_mean_of_products() -> None:
    """Else none of the other rules would be needed."""
    c = case("covered", (4,), (0, 0, 0, 0))
    after = c.after().shared
    assert not any(close(after[x.b] @ after[x.a], c.mean_product(x, WEIGHTS), 0.1) for x in c.adapters)


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_every_level_has_the_scale_of_the_full_model(alpha: float | None) -> None:
    """A level of rank r computes what the full model computes with its other ranks at zero."""
    rule = RankRule(lora=Lora(alpha=alpha))
    model = model_of(rule)
    layout = model.layout
    splitter = rule.splitter(layout, "rank", RANKS)
    torch.manual_seed(2)
    state = {name: torch.randn_like(value) for name, value in model.initial.items()}
    x = torch.randn(5, 6)
    for level, rank in enumerate(RANKS):
        piece = splitter.slice(layout, level)
        small = submodel(model.template, layout, piece)
        small.load_state_dict(piece.take(state))
        assert small.get_submodule("blocks.0.first").scaling == {"default": (16 if alpha is None else alpha) / 8}
        zeroed = {name: value.clone() for name, value in state.items()}
        for adapter in adapters(layout):
            assert piece.shapes[adapter.a][0] == piece.shapes[adapter.b][1] == rank
            zeroed[adapter.b][:, rank:] = 0
        full = submodel(model.template, layout, splitter.slice(layout, 2))
        full.load_state_dict(zeroed)
        assert close(small(x), full(x))


def test_random_ranks_train_beside_all_others() -> None:
    """At the start of a turn a client computes what the full model computes."""
    c = case("random-ranks")
    model = model_of(RankRule())
    x = torch.randn(5, 6)
    full = submodel(model.template, c.layout, Splitter((1.0,), ((2,),)).slice(c.layout, 0))
    full.load_state_dict(c.server.shared)
    drawn = set()
    for upload in c.uploads:
        own = submodel(model.template, c.layout, upload.slice)
        state = upload.slice.take(c.server.shared)
        own.load_state_dict(state)
        assert not close(own(x), full(x), 0.01) or upload.level == 2
        extra = upload.slice.look(c.method.server.extra_for_client(c.server, upload.level))
        given = incofl.client.ClientInput(state, extra)
        c.method.client.begin(incofl.client.Local(own, given, incofl.client.LocalSettings()))
        assert torch.allclose(own(x), full(x), rtol=1e-10)
        index = upload.slice.index[c.adapters[0].a][0]
        assert isinstance(index, Tensor)
        assert len(index) == RANKS[upload.level]
        drawn.add(tuple(index.tolist()))
    assert len(drawn) == 4  # other ranks for each client
    evaluated = c.method.split.splitter(c.layout, "rank", RANKS).slice(c.layout, 0)
    assert evaluated.shapes == c.layout.shapes


SMALL = ("model.name=tiny-mlp", "split.levels=[2, 4, 8]", "data.clients=6", "data.limit=300", "engine.workers=1")


def config(name: str, *overrides: str) -> incofl.Config:
    torch.set_default_dtype(torch.float32)
    return tiny_config(f"method={name}", "rounds=2", "local.lr=0.01", *SMALL, *overrides)


def test_drawn_ranks_follow_the_seed_of_the_run() -> None:
    def ranks(seed: int) -> list[object]:
        federation = outline(config("random-ranks", f"seed={seed}"))
        index = [federation.splitter.slice(federation.model.layout, 0, 1, client).index for client in range(6)]
        name = adapters(federation.model.layout)[0].a
        return [tuple(each[name][0].tolist()) for each in index]  # type: ignore[union-attr]  # drawn, so a tensor

    assert ranks(0) == ranks(0) != ranks(1)


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_runs(name: str, tmp_path: Path) -> None:
    """What is frozen keeps its bits, only what is trained is sent and counted, and a run can be resumed."""
    chosen = config(name)
    federation = build(chosen)
    layout = federation.model.layout
    result = incofl.run(chosen, tmp_path / "whole", progress=False)
    assert not any(row["rejected"] for row in result.history)
    with incofl.Run(chosen, tmp_path / "parts", progress=False) as first:
        next(iter(first))
    with incofl.Run(chosen, tmp_path / "parts", progress=False, resume=True) as again:
        (_,) = again
    whole, parts = (RunFolder(tmp_path / part).checkpoint.read_bytes() for part in ("whole", "parts"))
    assert whole == parts
    for key, value in federation.model.initial.items():
        restarted = name == "flora" and key in {x.b for x in adapters(layout)}  # at zero, as before the first round
        assert torch.equal(value, again.server.shared[key]) == (key in layout.frozen or restarted), key
    assert {x.base for x in adapters(layout)} <= (layout.given if name in MERGING else layout.frozen)
    level = federation.level_of
    for key in ("bytes_down", "bytes_up"):
        planned = sum(getattr(federation.costs[level(client)], key) for client in result.history[0]["clients"])
        assert result.history[0][key] == planned
    adapted = sum(math.prod(layout.shapes[x.base]) for x in adapters(layout))
    largest, factors = federation.costs[2], sum(math.prod(layout.shapes[n]) for x in adapters(layout) for n in x[:2])
    head = 4 * (outline(config("covered")).costs[2].parameters - factors)
    expected = {"ffa": 4 * factors // 2, "rolora": 4 * factors}.get(name, 4 * factors)
    assert largest.bytes_down - head == expected + {"random-ranks": 4 * factors}.get(name, 0) + (
        4 * adapted if name in MERGING else 0
    )
    half = [x.b for x in adapters(layout)] if name in ("ffa", "rolora") else []
    uploaded = 4 * sum(math.prod(layout.shapes[b]) for b in half) if half else 4 * factors
    assert largest.bytes_up - head == uploaded


@pytest.mark.parametrize("name", ["covered", "flexlora", "random-ranks", "flora"])
def test_adapters_learn(name: str) -> None:
    """Around a network that knows nothing, with a head that stays as it is."""
    federation = build(config(name, "lora.head=frozen", "local.epochs=3", "data.partition=iid"))
    *_, last = run_rounds(federation, 6, 6)
    module = federation.module(last, -1)
    test = federation.data.test
    right = module(federation.data.pipeline.test(test.x)).argmax(1) == test.y
    assert float(right.float().mean()) > 0.3


def test_ranks_and_blocks() -> None:
    federation = build(config("covered", "split.depth=[2, 4, 6]"))
    assert [cost.blocks for cost in federation.costs] == [(2,), (4,), (6,)]
    assert [cost.width for cost in federation.costs] == [0.25, 0.5, 1]
    *_, last = run_rounds(federation, 2)
    assert last.round == 2
    flexible = build(config("flexlora", "split.depth=scaled", "lora.rank=16"))
    assert [cost.blocks for cost in flexible.costs] == [(1,), (2,), (3,)]
    run_rounds(flexible, 2)
    halves = outline(config("covered", "split.levels=3", "lora.rank=12"))
    assert halves.splitter.shares == (0.25, 0.5, 1)


def test_a_private_head_is_that_of_a_level() -> None:
    federation = build(config("hetlora", "lora.head=private"))
    *_, last = run_rounds(federation, 3, 6)
    heads = [last.state(level)["head.weight"] for level in range(3)]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    assert torch.equal(last.shared["head.weight"], federation.model.initial["head.weight"])


def test_inco_mixes_factors_across_blocks() -> None:
    layout = outline(config("covered")).model.layout
    for deep, shallow in layout.shallow.items():
        assert deep.partition(".lora_")[2] == shallow.partition(".lora_")[2]
        assert layout.block_of[shallow] == layout.blocks[0]
    assert len(layout.shallow) == 2 * len(adapters(layout)) * 5 // 6
    plain, mixed = (run_rounds(build(config(name)), 1)[-1] for name in ("covered", "covered+inco"))
    moved = {name for name, value in plain.shared.items() if not torch.equal(value, mixed.shared[name])}
    assert moved
    assert moved <= layout.shallow.keys()


def test_what_is_adapted_and_what_else_is_trained() -> None:
    chosen = outline(config("covered", 'lora.targets=["fc1"]', 'lora.also=["stem"]', "lora.dropout=0.1")).model.layout
    assert chosen.parameters > {"stem.weight", "head.weight"}
    rule = RankRule(lora=Lora(targets=("second",)))
    assert [x.base for x in adapters(model_of(rule).layout)] == [f"blocks.{n}.second.base_layer.weight" for n in (0, 1)]


def test_torch_encoders_compute_with_their_adapters() -> None:
    """In evaluation, too, where torch has a faster way that knows nothing of them."""
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    RankRule().attach(net, Layout.of(net, {}, (), {}), 4)
    with torch.inference_mode():
        before = net(x)
        nn.init.ones_(net.get_parameter("linear1.lora_B.default.weight"))
        assert not torch.equal(before, net(x))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["split.levels=[4, 32]", "lora.rank=16"], "split.levels: level 1 is 32, expected a rank from 1 to 16"),
        (["split.levels=[0.5, 1.0]"], "split.levels: level 0 is 0.5, expected a rank from 1 to 16"),
        (["split.kind=layer"], "split.kind: got 'layer', expected 'rank': covered splits by rank"),
        (["lora.targets=['query']"], "lora.targets: got ('query',), which no layer of the model is, expected names of"),
        (
            ["lora.targets=['0']"],
            "lora.targets: got 'blocks.0', which is ResidualBlock, expected linear layers or conv",
        ),
        (["lora.dropout=1.0"], "lora.dropout: got 1.0, expected a number >= 0 and < 1"),
        (["split.depth=[2, 4, 6]", "split.start=identity"], "split.start: got 'identity', expected 'random': blocks."),
        (["method=heteroavg", "split.kind=rank"], "split.kind: got 'rank', expected another: the method adds no"),
        (
            ["model.name=tiny-resnet"],
            "lora.targets: got 'all', which no layer of the model is, expected names of layers",
        ),
    ],
)
def test_refusals(overrides: list[str], problem: str) -> None:
    with pytest.raises((ConfigError, LayoutError)) as caught:
        build(config("covered", *overrides))
    assert problem in str(caught.value)


def test_a_model_that_has_adapters_is_refused() -> None:
    model: Any = model_of(RankRule())
    with pytest.raises(ConfigError, match="model: it has adapters already, expected the model without"):
        RankRule().extend(model.template, model.layout, 3)


@pytest.mark.parametrize(
    "name", ["random-ranks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flora", "rolora"))]
)
def test_worker_processes_give_the_same_bits(name: str, tmp_path: Path) -> None:
    """Also where the adapted weights change, where a slice is a client's own, and where one factor is uploaded."""
    for workers in (1, 2):
        incofl.run(config(name, f"engine.workers={workers}"), tmp_path / str(workers), progress=False)
    one, two = (RunFolder(tmp_path / str(workers)).checkpoint.read_bytes() for workers in (1, 2))
    assert one == two


def test_pretrained_weights_are_put_inside(tmp_path: Path) -> None:
    """Under the names that they have in a model without adapters."""
    plain = outline(config("heteroavg", "split.levels=1")).model.initial
    file = tmp_path / "model.safetensors"
    save_file({name: value + 1 for name, value in plain.items()}, file)
    adapted, chosen = config("flexlora"), config("flexlora", f"model.pretrained={file}")
    fresh, model = build(adapted).model.initial, build(chosen).model.initial
    for name, value in model.items():
        source = plain.get(name.replace(".base_layer", ""))
        assert torch.equal(value, fresh[name] if source is None else source + 1)


def test_the_smallest_path_has_the_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``+anchor``, what larger clients train in addition is the model of the smallest level."""
    federation = build(config("covered+anchor", "local.batch_size=8"))
    worker, server = Worker(federation), federation.start()
    seen: list[tuple[Any, Tensor]] = []

    def compared(self: SmallestPath, model: nn.Module, task: Any, x: Any, y: Tensor, step: int) -> Tensor | None:
        loss = original(self, model, task, x, y, step)
        small = federation.module(server, 0)
        if step == 0:
            seen.append((loss, task.loss(small(x), y)))
        return loss

    original = SmallestPath.loss
    monkeypatch.setattr(SmallestPath, "loss", compared)
    job = federation.schedule(0, 6)[0]
    assert job.level == 2
    assert torch.isfinite(torch.tensor(worker.train(server, job).loss))
    ((loss, expected),) = seen
    assert torch.allclose(loss, expected, atol=1e-5)


def test_plan_names_the_ranks(incofl: Shell) -> None:
    words = [word for setting in SMALL for word in ("--set", setting)]
    code, out, _ = incofl("plan", "--method", "flexlora", *words)
    assert code == 0
    assert re.search(r"level +blocks +rank +params", out)
    assert re.findall(r"^ +\d +6 +(\d) ", out, re.MULTILINE) == ["2", "4", "8"]
    code, out, _ = incofl("plan", "--method", "flexlora", "--json", *words)
    assert [level["rank"] for level in json.loads(out)["levels"]] == [2, 4, 8]


def test_devices_get_the_largest_rank_that_fits(tmp_path: Path) -> None:
    memories = [cost.memory for cost in build(config("covered")).costs]
    tables = [f'[[device]]\nname = "of {size} B"\ncount = 2\nmemory = "{size} B"\n' for size in (10**6, *memories)]
    (tmp_path / "devices.toml").write_text("".join(tables))
    settings = ["method=covered", "local.batch_size=16", *(setting for setting in SMALL if "clients" not in setting)]
    _, federation, trained = plan_fleet(None, settings, tmp_path / "devices.toml", ignore_limits=False)
    assert [level for _, level in trained] == [2, 0, 1, 2]
    assert federation.clients_by_level == [2, 2, 4]


@pytest.mark.parametrize("name", ["flexlora+inco", "raflora+adam", "flora+momentum", "fedex+coverage", "flexlora"])
def test_values_are_not_transformed(name: str) -> None:
    step = [] if "+" in name else ["server.lr=0.5"]
    odd = name.partition("+")[2] or "schedule"
    with pytest.raises(ConfigError, match=rf"sets values, which {odd} would spoil, expected no such transform"):
        build(config(name, *step))
    build(config(name.partition("+")[0], "server.lr=1.0"))


def test_rslora_divides_by_the_root_of_the_rank() -> None:
    assert Lora(alpha=12.0, rslora=True).scale(16) == 3.0
    assert Lora(alpha=12.0).scale(16) == 0.75
    assert Lora(rslora=True).scale(16) == Lora().scale(16) == 2.0
    module = model_of(RankRule(lora=Lora(alpha=12.0, rslora=True, rank=16))).template
    assert module.get_submodule("blocks.0.first").scaling == {"default": 3.0}


def pruned_turn(before: float, steps: Sequence[float], gamma: float = 0.5) -> tuple[Tensors, Tensors, float]:
    """A turn of a client of 4 ranks: what it remembers, its update, and the loss beside that of the batch."""
    c = case("hetlora", (4,), (0,))
    rule = Pruned(SelfPruning(gamma, weight=2.0))
    model = model_of(RankRule(lora=Lora(rank=4)))
    own = submodel(model.template, c.layout, c.uploads[0].slice)
    state = {
        n: torch.ones_like(v) if n in {x for a in c.adapters for x in a[:2]} else v for n, v in model.initial.items()
    }
    own.load_state_dict(state)
    memory = {}
    if before < 4:
        memory = {c.adapters[0].a: torch.ones_like(state[c.adapters[0].a])}
        memory[c.adapters[0].a][int(before) :] = 0
    local = incofl.client.Local(own, incofl.client.ClientInput(state, memory=memory), incofl.client.LocalSettings())
    rule.begin(local)
    x, y = torch.randn(5, 6), torch.zeros(5, dtype=torch.long)
    extra = float((rule.loss(local, x, y) - incofl.client.ClientRule().loss(local, x, y)).detach())
    with torch.no_grad():
        for name, parameter in local.parameters.items():
            if name.endswith("lora_B.default.weight"):
                for rank, factor in enumerate(steps):
                    parameter[:, rank] *= factor
    update = {n: p.detach() - state[n] for n, p in local.parameters.items()}
    return rule.finish(local, {})[1], update, extra


def test_a_client_drops_the_last_ranks_when_they_shrink() -> None:
    """Gamma 0.5 of 4 ranks: the last two; all factors are 1, each layer 12 x 12."""
    layers = len(case("hetlora").adapters)
    held, _, extra = pruned_turn(4, (1, 1, 0.9, 0.9))
    assert [value[:, 0].tolist() for value in held.values()] == [[1, 1, 0, 0]]
    assert extra == pytest.approx(2.0 * layers * (2 * 12))  # weight ||B|| ||A||, each sqrt(2 x 12)
    held, _, _ = pruned_turn(4, (0.1, 0.1, 1.1, 1.1))  # only the last count
    assert [value[:, 0].tolist() for value in held.values()] == [[1, 1, 1, 1]]
    held, update, extra = pruned_turn(2, (1, 0.9, 5, 5))
    assert [value[:, 0].tolist() for value in held.values()] == [[1, 0, 0, 0]]
    assert extra == pytest.approx(2.0 * layers * 12)
    for name, change in update.items():  # what was dropped before is uploaded as zeros: 1 + (-1)
        if name.endswith("lora_A.default.weight"):
            assert torch.equal(change[2:], -torch.ones_like(change[2:]))
            assert not change[:2].any()
    held, _, _ = pruned_turn(1, (0.1, 1, 1, 1))  # one stays
    assert [value[:, 0].tolist() for value in held.values()] == [[1, 0, 0, 0]]
    assert [SelfPruning(0.99).last(ranks) for ranks in (16, 2, 1)] == [(15, 16), (1, 2), (1, 1)]


def test_without_pruning_clients_remember_nothing(tmp_path: Path) -> None:
    layout = outline(config("hetlora")).model.layout
    assert not Pruned().memory(layout)
    runs = {}
    for gamma in (1.0, 0.6):
        chosen = config("hetlora", f"hetlora.gamma={gamma}", "hetlora.weight=1", "rounds=3", "cohort=6")
        runs[gamma] = incofl.run(chosen, tmp_path / str(gamma), progress=False)
        clients = list((tmp_path / str(gamma) / "checkpoint" / "clients").glob("*"))
        assert bool(clients) == (gamma < 1)
    assert runs[1.0].history[-1]["loss"] != runs[0.6].history[-1]["loss"]


def test_rounding_does_not_choose_the_signs_of_singular_vectors() -> None:
    """The same sum with its parts in another order, and factors with both signs turned."""
    torch.manual_seed(0)
    parts = [Factors(torch.randn(3, 6).double(), torch.randn(5, 3).double(), 1 / k) for k in (1, 2, 3)]
    u, s, v = svd_of_sum(parts)
    turned = [Factors(-part.a, -part.b, part.weight) for part in reversed(parts)]
    for ours, theirs in zip((u, s, v), svd_of_sum(turned), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert bool((u.gather(0, u.abs().argmax(0, keepdim=True)) > 0).all())
