"""FIARSE: the largest entries, the slope of the threshold, and the mean of each entry over those that held it."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import incofl
from incofl.client import ClientInput, LocalSettings, train
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.methods.fiarse import Fiarse, FiarseClient, FiarseServer, SparseSlice, SparseSplitter, largest, matrices
from incofl.server import Server
from incofl.tensors import Tensors
from incofl.upload import Upload
from tests.federations import run_rounds, tiny_config, tiny_federation
from tests.methods.test_identities import near, plain_fedavg, same
from tests.shell import Shell

LAYER = nn.Linear(3, 2)
LAYOUT = Layout.of(LAYER, {}, [], {})
# Magnitudes 1 to 6, with signs, and a bias that is smaller than all of them.
STATE = {"weight": torch.tensor([[1.0, -6.0, 3.0], [-2.0, 5.0, -4.0]]), "bias": torch.tensor([0.1, 0.2])}


def sparse(*shares: float, threshold: str = "model") -> SparseSplitter:
    return SparseSplitter(shares, ((),) * len(shares), "largest", threshold=threshold)  # type: ignore[arg-type]


@pytest.mark.usefixtures("double")
def test_one_level_is_plain_fedavg() -> None:
    federation = tiny_federation("method=fiarse", "split.levels=1", "buffers=average", "aggregate.precision=float64")
    assert near(run_rounds(federation, 2)[-1].shared, plain_fedavg(federation, rounds=2, cohort=4))


def test_clients_that_hold_all_are_fedavg_bit_for_bit() -> None:
    settings = ["split.levels=[0.3,1.0]", "split.counts=[0,10]", "split.kind=hetero", "buffers=static"]
    sparse, plain = (run_rounds(tiny_federation(f"method={m}", *settings), 2)[-1] for m in ("fiarse", "heteroavg"))
    assert same(sparse.shared, plain.shared)


@given(
    values=st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=30),
    data=st.data(),
)
def test_exactly_the_largest_are_chosen(values: list[float], data: st.DataObject) -> None:
    """As many as asked for even among equals; none that is left out is larger than one that is chosen."""
    count = data.draw(st.integers(1, len(values)))
    tensor = torch.tensor(values)
    chosen = largest(tensor, count)
    assert int(chosen.sum()) == count
    assert count == len(values) or float(tensor[chosen].abs().min()) >= float(tensor[~chosen].abs().max())


def test_a_level_sees_its_largest_entries_and_whole_biases() -> None:
    half, layer = sparse(0.5).slice(LAYOUT, 0), sparse(1 / 6).slice(LAYOUT, 0)
    assert half.take(STATE)["weight"].tolist() == [[0, -6, 0], [0, 5, -4]]
    assert torch.equal(half.take(STATE)["bias"], STATE["bias"])
    assert layer.take(STATE)["weight"].tolist() == [[0, -6, 0], [0, 0, 0]]
    assert sparse(1.0).slice(LAYOUT, 0).take(STATE)["weight"].tolist() == STATE["weight"].tolist()


def test_the_threshold_is_that_of_the_model_or_of_each_layer() -> None:
    """Entries 1 to 4 and 5 to 8: of all eight the largest four are in the second layer; of each layer, its own."""
    layout = Layout.of(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), {}, [], {})
    state = {"0.weight": torch.arange(1.0, 5).view(2, 2), "1.weight": torch.arange(5.0, 9).view(2, 2)}
    held = {t: sparse(0.5, threshold=t).slice(layout, 0).take(state) for t in ("model", "layer")}
    assert [held["model"][name].flatten().tolist() for name in state] == [[0, 0, 0, 0], [5, 6, 7, 8]]
    assert [held["layer"][name].flatten().tolist() for name in state] == [[0, 0, 3, 4], [0, 0, 7, 8]]


def test_theta_is_the_smallest_magnitude_of_the_model_or_of_each_layer() -> None:
    received = {"a": torch.tensor([[0.0, -2.0, 5.0]]), "b": torch.tensor([[3.0, 0.0, -4.0]])}
    for threshold, expected in (("model", [2, 2]), ("layer", [2, 3])):
        found = FiarseClient(Fiarse(threshold=threshold))._thresholds(received, received.keys())  # type: ignore[arg-type]
        assert [float(found[name]) for name in received] == expected


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("threshold", ["model", "layer"])
def test_a_step_is_the_slope_of_the_masked_weights(threshold: str) -> None:
    """One step of SGD by hand: the gradient at the kept entries, times 1 + 2 t |w| / (|w| + t)^2 with t = 4."""
    slice_ = sparse(0.5, threshold=threshold).slice(LAYOUT, 0)
    received = slice_.take({name: value.double() for name, value in STATE.items()})
    layer, rule = nn.Linear(3, 2), FiarseClient(Fiarse(threshold=threshold))  # type: ignore[arg-type]
    rule.nest(layer, LAYOUT, sparse(0.5, threshold=threshold), 0)
    x, y = torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([0])
    settings = LocalSettings(optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.3)
    upload = train(layer, ClientInput(received), [(x, y)], rule, settings)
    weight = received["weight"].clone().requires_grad_()
    torch.autograd.backward(nn.functional.cross_entropy(x @ weight.T + received["bias"], y))
    assert weight.grad is not None
    size = weight.detach().abs()
    slope = (weight.grad * (1 + 2 * 4 * size / (size + 4) ** 2) + 0.3 * weight.detach()) * (size > 0)
    assert torch.allclose(upload.update["weight"], -0.1 * slope, atol=1e-12)
    assert bool((upload.update["weight"][size == 0] == 0).all())


@pytest.mark.usefixtures("double")
def test_what_falls_below_the_threshold_counts_no_more() -> None:
    """In the second step the entry that was 4 is 3.9, below the smallest received magnitude: its gradient is 0."""
    layer, rule = nn.Linear(3, 2), FiarseClient()
    rule.nest(layer, LAYOUT, sparse(0.5), 0)
    received = sparse(0.5).slice(LAYOUT, 0).take({name: value.double() for name, value in STATE.items()})
    x, y, seen = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([1]), list[Tensor]()

    class Watched(FiarseClient):
        def correct(self, local: object) -> None:
            with torch.no_grad():
                layer.weight[1, 2] = -3.9
            assert layer.weight.grad is not None
            seen.append(layer.weight.grad.clone())

    train(layer, ClientInput(received), [(x, y)] * 2, Watched(), LocalSettings(optimizer="sgd", momentum=0.0, lr=1e-3))
    assert float(seen[0][1, 2]) != 0
    assert float(seen[1][1, 2]) == 0
    assert float(seen[1].abs().sum()) == 0  # no other input is there


def test_each_entry_is_averaged_over_those_that_held_it() -> None:
    """By hand: two clients hold the three largest entries, one all six; what is sent of others does not count."""
    splitter = sparse(0.5, 1.0)
    small, large = (splitter.slice(LAYOUT, level) for level in (0, 1))
    uploads = [
        upload(0, small, torch.full((2, 3), 3.0)),
        upload(0, small, torch.full((2, 3), 6.0)),
        upload(1, large, torch.full((2, 3), 12.0)),
    ]
    server = Server(LAYOUT, STATE)
    changes = FiarseServer(buffers="static").aggregate(server, [uploads[:1], uploads[1:]])
    assert changes.shared.values["weight"].tolist() == [[12, 7, 12], [12, 7, 7]]
    assert changes.shared.weight["weight"].tolist() == [[1, 3, 1], [1, 3, 3]]
    assert changes.shared.values["bias"].tolist() == [7, 7]
    alone = FiarseServer(buffers="static").aggregate(server, [uploads[:2]])
    moved = server.advance(alone).shared["weight"]
    assert moved.tolist() == [[1, -1.5, 3], [-2, 9.5, 0.5]]  # nobody held 1, 3 and -2: they keep their values


def test_means_by_examples() -> None:
    """Weights 1 and 3: (3 + 3 * 12) / 4 where both hold an entry, 12 where one does."""
    splitter = sparse(0.5, 1.0)
    uploads = [
        upload(0, splitter.slice(LAYOUT, 0), torch.full((2, 3), 3.0), examples=1),
        upload(1, splitter.slice(LAYOUT, 1), torch.full((2, 3), 12.0), examples=3),
    ]
    rule = FiarseServer(weighting="samples", squares=True)
    changes = rule.aggregate(Server(LAYOUT, STATE), [uploads])
    assert changes.shared.values["weight"].tolist() == [[12, 9.75, 12], [12, 9.75, 9.75]]
    assert changes.squares["weight"].tolist() == [[144, 110.25, 144], [144, 110.25, 110.25]]


def upload(level: int, slice_: object, values: Tensor, examples: int = 1) -> Upload:
    assert isinstance(slice_, SparseSlice)
    update: Tensors = {"weight": values.clone(), "bias": values[0, :2].clone()}
    return Upload(level=level, slice=slice_, update=update, examples=examples, steps=1)


def test_a_round_moves_what_somebody_held(tmp_path: Path) -> None:
    """With small clients only, other entries keep their bits; the saved model of a level is the sparse one."""
    settings = ["method=fiarse", "split.levels=[0.1,0.4,1.0]", "split.counts=[5,5,0]"]
    federation = tiny_federation(*settings)
    before, after = run_rounds(federation, 1)
    held = federation.slice(1, 0)
    assert isinstance(held, SparseSlice)
    masks = held.masks(before.shared)
    assert masks.keys() == matrices(federation.model.layout)
    for name, mask in masks.items():
        assert torch.equal(after.shared[name][~mask], before.shared[name][~mask])
    total = sum(int(mask.sum()) for mask in masks.values())
    assert total == -(-2 * sum(mask.numel() for mask in masks.values()) // 5)  # 0.4 of all, rounded up
    result = incofl.run(tiny_config(*settings, "rounds=1"), tmp_path / "run", progress=False)
    model = incofl.load_model(result.folder, level=1)
    entries = [value for name, value in model.named_parameters() if name in masks]
    assert sum(int((value != 0).sum()) for value in entries) == total


@pytest.mark.slow
def test_workers_and_resumption_give_the_same_bits(tmp_path: Path) -> None:
    settings = ["method=fiarse+inco", "aggregate.precision=float64"]
    for name, workers, rounds in (("one", 1, 2), ("two", 2, 1), ("two", 2, 2)):
        config = tiny_config(*settings, f"engine.workers={workers}", f"rounds={rounds}")
        incofl.run(config, tmp_path / name, resume=True, progress=False)
    a, b = ((tmp_path / run / "checkpoint" / "state.safetensors").read_bytes() for run in ("one", "two"))
    assert a == b


@pytest.mark.slow
def test_the_plan_says_what_it_costs(incofl: Shell) -> None:
    """Every level costs what the whole model does, and one more copy of the weights than FedAvg."""
    words = ["--set", "model.name=tiny-resnet", "--set", "split.kind=hetero", "--json"]
    plan, other = (json.loads(incofl("plan", "--method", name, *words)[1]) for name in ("fiarse", "heteroavg"))
    costs = [{k: v for k, v in level.items() if k not in ("level", "width", "clients")} for level in plan["levels"]]
    assert all(cost == costs[0] for cost in costs)
    layout = tiny_federation("method=fiarse").model.layout
    copy = 4 * sum(math.prod(layout.shapes[name]) for name in matrices(layout))
    whole = {key: value for key, value in other["levels"][-1].items() if key in costs[0]}
    assert costs[0] == whole | {"memory": whole["memory"] + copy}
    said = "levels differ in which entries are zero: every client sends, holds and computes the whole model"
    assert plan["warnings"] == [said]


def test_refusals() -> None:
    for words, settings in {
        "split.kind: got 'stage', expected 'hetero': fiarse splits by width": ["split.kind=stage"],
        "fiarse.threshold: got 'no', expected 'model' or 'layer'": ["fiarse.threshold=no"],
        "method: fiarse+anchor moves what a level holds": ["method=fiarse+anchor"],
        "method: got fiarse+median, expected a method whose server rule is a mean": ["method=fiarse+median"],
        "method: got fiarse+privacy, expected a method whose mean is plain": [
            "method=fiarse+privacy",
            "privacy.noise=1",
        ],
        "buffers: got 'per-level', expected 'static' or 'average': fiarse moves a window": ["buffers=per-level"],
    }.items():
        with pytest.raises(ConfigError) as problem:
            tiny_federation("method=fiarse", *settings)
        assert words in str(problem.value)
