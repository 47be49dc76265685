"""What must be equal is equal, and what must differ differs."""

import dataclasses

import pytest
import torch
from torch import nn

from incofl.data.pipeline import local_batches
from incofl.engine.federation import Federation
from incofl.engine.worker import one_thread
from incofl.inco import InCo
from incofl.methods.server_optimizers import ServerSchedule
from incofl.path import image_format
from incofl.seeds import Purpose, torch_rng
from incofl.split import Splitter, submodel
from incofl.tensors import Tensors, clone
from tests.federations import run_rounds, tiny_config, tiny_federation


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def near(a: Tensors, b: Tensors) -> bool:
    """Equal but for the last bits of float64: torch's optimisers round the end of a tensor in another way than ours."""
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=1e-11, atol=1e-13) for name in a)


@one_thread()
def plain_fedavg(federation: Federation, rounds: int, cohort: int) -> Tensors:
    """FedAvg as in McMahan et al., with a loop of its own: whole models, every client alike."""
    layout, template = federation.model.layout, federation.model.template
    whole = Splitter((1.0,), (layout.depth,)).slice(layout, 0, 0)
    weights = clone(federation.model.initial)
    for round in range(rounds):
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}
        for job in federation.schedule(round, cohort):
            model: nn.Module = submodel(template, layout, whole)
            model.load_state_dict(weights)
            model.to(memory_format=image_format(model))  # type: ignore[call-overload]
            optimizer = torch.optim.Adam(model.parameters(), lr=federation.local.lr, fused=True)
            rng = torch_rng(federation.seed, Purpose.TRAINING, round, job.client)
            data = federation.data
            for x, y in local_batches(
                data.train, federation.partition[job.client], data.pipeline, federation.local, rng
            ):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.to(memory_format=image_format(model))), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, value in model.state_dict().items():
                sums[name] += value - weights[name] if name in layout.parameters else value
        for name in weights:
            mean = sums[name] / cohort
            weights[name] = weights[name] + mean if name in layout.parameters else mean.to(weights[name].dtype)
    return weights


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["fedavg", "heteroavg", "alllarge"])
@pytest.mark.parametrize("buffers", ["average", "per-level"])
def test_one_level_everywhere_is_plain_fedavg(method: str, buffers: str) -> None:
    """In float64, whatever the policy: with one level there is nothing to tell apart."""
    federation = tiny_federation(
        f"method={method}", f"buffers={buffers}", "split.levels=1", "aggregate.precision=float64"
    )
    expected = plain_fedavg(federation, rounds=2, cohort=4)
    server = run_rounds(federation, 2)[-1]
    assert near(server.state(0), expected)


@pytest.mark.usefixtures("double")
def test_alllarge_is_fedavg_of_the_large_level() -> None:
    expected = plain_fedavg(tiny_federation("split.levels=1", "method=alllarge"), rounds=2, cohort=4)
    federation = tiny_federation("method=alllarge", "aggregate.precision=float64")
    assert federation.levels_in_use == [2]
    assert near(run_rounds(federation, 2)[-1].state(2), expected)


def test_allsmall_trains_the_smallest_level_only() -> None:
    federation = tiny_federation("method=allsmall", "split.kind=stage")
    first, last = (run_rounds(federation, 2)[i] for i in (0, -1))
    held = federation.slice(0, 0).index
    for name in first.shared:
        assert torch.equal(first.shared[name], last.shared[name]) == (name not in held), name


@pytest.mark.usefixtures("double")
def test_extract_then_put_back_changes_nothing() -> None:
    """Clients that send their slice back untrained leave the server as it was, bit for bit, in every splitting."""
    from incofl.client import Upload
    from incofl.method import ServerRule

    for split in ("split.kind=stage", "split.kind=hetero"):
        federation = tiny_federation(split)
        server = run_rounds(federation, 1)[-1]
        uploads = []
        for client, level in enumerate([0, 1, 2, 1]):
            piece = federation.slice(level, 0)
            sent = piece.take(server.state(level))
            update = {n: torch.zeros_like(v) for n, v in sent.items() if n in server.layout.parameters}
            buffers = {n: v for n, v in sent.items() if n in server.layout.buffers}
            uploads.append(Upload(client, level, piece, update, buffers, 10, 1, 0.0))
        after = server.advance(ServerRule().aggregate(server, [uploads]))
        assert all(torch.equal(after.shared[name], server.shared[name]) for name in server.layout.parameters)
        for level in range(3):
            piece = federation.slice(level, 0)
            assert same(piece.take(after.state(level)), piece.take(server.state(level)))


@pytest.mark.usefixtures("double")
def test_inco_without_counterparts_is_heteroavg() -> None:
    plain, inco = tiny_federation("method=heteroavg"), tiny_federation("method=incoavg")
    layout = dataclasses.replace(inco.model.layout, shallow={})
    inco = dataclasses.replace(inco, model=dataclasses.replace(inco.model, layout=layout))
    assert same(run_rounds(plain, 2)[-1].shared, run_rounds(inco, 2)[-1].shared)


def test_inco_changes_exactly_its_targets_in_the_first_round() -> None:
    plain, inco = (run_rounds(tiny_federation(f"method={m}"), 1)[-1] for m in ("heteroavg", "incoavg"))
    changed = {name for name in plain.shared if not torch.equal(plain.shared[name], inco.shared[name])}
    assert changed == set(plain.layout.shallow)
    assert {level: same(plain.private[level], inco.private[level]) for level in plain.private} == dict.fromkeys(
        plain.private, True
    )


@pytest.mark.parametrize("counts", [[2, 2, 2, 2, 2], [3, 3, 2, 2, 0]])
def test_resnet26_end_to_end(counts: list[int]) -> None:
    """A real round of the paper's five ResNets: InCo changes its 16 tensors and nothing else.

    Without a client of the largest level the third blocks of stages 1 and 2, which only it holds, keep every bit.
    """
    resnet = ("model.name=resnet26", "model.width=0.0625", "split.levels=5", f"split.counts={counts}")
    runs = {m: run_rounds(tiny_federation(*resnet, f"method={m}"), 1, cohort=10) for m in ("heteroavg", "incoavg")}
    before, plain = (server.shared for server in runs["heteroavg"])
    mixed = runs["incoavg"][-1].shared
    sixteen = {f"layer{s}.{b}.conv{c}.weight" for s in (1, 2, 3, 4) for b in (1, 2) for c in (1, 2)}
    only_large = {name for name in before if name.startswith(("layer1.2.", "layer2.2."))} if counts[-1] == 0 else set()
    assert {name for name in plain if not torch.equal(plain[name], mixed[name])} == sixteen - only_large
    assert {name for name in before if torch.equal(before[name], mixed[name])} == only_large


def test_incoavg_is_heteroavg_plus_inco() -> None:
    first, second = (run_rounds(tiny_federation(f"method={m}"), 2)[-1] for m in ("incoavg", "HeteroAvg+InCo"))
    assert same(first.shared, second.shared)


def test_inco_options_reach_the_server() -> None:
    released, theorem = (run_rounds(tiny_federation(f"inco.rule={r}"), 1)[-1] for r in ("released", "theorem"))
    assert not same(released.shared, theorem.shared)
    federation = tiny_federation("inco.rule=theorem", "inco.clip=none")
    assert federation.method.transforms == (ServerSchedule(), InCo(rule="theorem", clip=None))


def test_nobody_of_the_largest_level_was_drawn() -> None:
    """The run goes on, and what only that level holds keeps every bit, with and without InCo."""
    for method in ("heteroavg", "incoavg"):
        federation = tiny_federation(f"method={method}", "split.counts=[5,5,0]")
        first, last = (run_rounds(federation, 2)[i] for i in (0, -1))
        only_large = federation.slice(2, 0).index.keys() - federation.slice(1, 0).index.keys()
        assert only_large
        for name in first.shared:
            assert torch.equal(first.shared[name], last.shared[name]) == (name in only_large), name


def test_fedavg_levels_do_not_touch_each_other() -> None:
    """Training the large level only leaves the small one at its initial weights, unlike heteroavg."""
    for buffers in ("average", "per-level"):
        fedavg = tiny_federation("method=fedavg", "split.counts=[0,0,10]", f"buffers={buffers}")
        hetero = tiny_federation("method=heteroavg", "split.counts=[0,0,10]", f"buffers={buffers}")
        initial = fedavg.slice(0, 0).take(fedavg.start().state(0))
        small = fedavg.slice(0, 0).take(run_rounds(fedavg, 1)[-1].state(0))
        shared = hetero.slice(0, 0).take(run_rounds(hetero, 1)[-1].state(0))
        assert same(small, initial)
        assert not any(torch.equal(shared[name], initial[name]) for name in shared)


def test_a_server_learning_rate_scales_the_step() -> None:
    """Half the rate, half the step; ``1/epochs`` is what the paper's code does for ViTs."""
    full, half = (run_rounds(tiny_federation("method=heteroavg", f"server.lr={rate}"), 1) for rate in (1.0, 0.5))
    layout = full[0].layout
    for name in layout.parameters:
        step, smaller = (servers[1].shared[name] - servers[0].shared[name] for servers in (full, half))
        assert torch.allclose(smaller, step / 2, atol=1e-7)
    for name in layout.buffers:
        assert torch.equal(full[1].shared[name], half[1].shared[name])
    config = tiny_config("server.lr=1/epochs", "local.epochs=5")
    assert config.methods["server"].lr == 0.2
