"""Which tensors InCo changes, and what it records."""

import dataclasses

import pytest
import torch

from incofl.errors import ConfigError
from incofl.inco import InCo, mix
from incofl.layout import Layout
from incofl.models import ModelOptions, make_model
from incofl.seeds import Purpose, torch_rng
from incofl.tensors import Tensors, clone
from incofl.transform import Context

SIXTEEN = {f"layer{stage}.{block}.conv{conv}.weight" for stage in (1, 2, 3, 4) for block in (1, 2) for conv in (1, 2)}


@pytest.fixture(scope="module")
def layout() -> Layout:
    return make_model("resnet26", ModelOptions(width=0.125)).layout


@pytest.fixture
def update(layout: Layout) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(layout.shapes[name], generator=generator) * 0.01 for name in sorted(layout.parameters)}


def test_exactly_sixteen_tensors_of_resnet26_change(layout: Layout, update: Tensors) -> None:
    mixed, _, record = InCo()(clone(update), {}, Context(layout))
    changed = {name for name in update if not torch.equal(mixed[name], update[name])}
    assert changed == SIXTEEN == set(record)
    assert mixed.keys() == update.keys()


def test_a_layer_that_is_mixed_itself_serves_others_as_it_was(layout: Layout, update: Tensors) -> None:
    """A chain a -> b -> c: a is mixed with the unmixed b, whatever the order of the pairs."""
    a, b, c = (f"layer1.{block}.conv1.weight" for block in (2, 1, 0))
    for pairs in ({a: b, b: c}, {b: c, a: b}):
        mixed, _, _ = InCo()(clone(update), {}, Context(dataclasses.replace(layout, shallow=pairs)))
        assert torch.equal(mixed[a], mix(clone(update)[a], clone(update)[b]))
        assert torch.equal(mixed[b], mix(clone(update)[b], clone(update)[c]))


def test_each_is_mixed_with_the_second_convolution_of_its_stage(layout: Layout, update: Tensors) -> None:
    """From the unmixed update: no chain."""
    mixed, _, _ = InCo(rule="algorithm1")(clone(update), {}, Context(layout))
    update = clone(update)
    for name in SIXTEEN:
        expected = mix(update[name], update[f"{name[:6]}.0.conv2.weight"], rule="algorithm1")
        assert torch.equal(mixed[name], expected)


def test_absent_layers_are_skipped(layout: Layout, update: Tensors) -> None:
    """When no client of the largest level was drawn, its own tensors are absent and the others are mixed."""
    held = {name: value for name, value in update.items() if ".2." not in name}
    mixed, _, record = InCo()(held, {}, Context(layout))
    assert mixed.keys() == held.keys()
    assert set(record) == {name for name in SIXTEEN if ".2." not in name}
    without_reference = {name: value for name, value in update.items() if name != "layer1.0.conv2.weight"}
    _, _, record = InCo()(without_reference, {}, Context(layout))
    assert set(record) == {name for name in SIXTEEN if not name.startswith("layer1")}


def test_a_layout_without_counterparts_gives_the_identity(layout: Layout, update: Tensors) -> None:
    mixed, _, record = InCo()(update, {}, Context(dataclasses.replace(layout, shallow={})))
    assert record == {}
    assert all(mixed[name] is update[name] for name in update)


def test_the_papers_wording_adds_one_pair(layout: Layout) -> None:
    """In stage 1 the first layer of the shape is layer1.0.conv1, so layer1.0.conv2 is mixed too; stages 2-4 agree."""
    pairs = layout.first_same_shape
    assert set(pairs) == SIXTEEN | {"layer1.0.conv2.weight"}
    assert {pairs[name] for name in pairs if name.startswith("layer1")} == {"layer1.0.conv1.weight"}
    for name in SIXTEEN:
        if not name.startswith("layer1"):
            assert pairs[name] == layout.shallow[name]


def test_record_leaves_out_what_nobody_held(layout: Layout, update: Tensors) -> None:
    """With half of the channels untouched the shares are those of the other half."""
    name = "layer4.1.conv1.weight"
    half = dict(update)
    for key in (name, layout.shallow[name]):
        half[key] = update[key].clone()
        half[key][32:] = 0
        half[key][:, 32:] = 0
    small = {key: half[key][:32, :32] for key in (name, layout.shallow[name])}
    deep, shallow = small[name], small[layout.shallow[name]]
    p = InCo().products(deep, shallow, *InCo().inner(shallow, shallow))
    _, _, record = InCo()(half, {}, Context(layout))
    assert record[name]["beta_positive"] == pytest.approx(float((p.beta > 0).float().mean()))
    assert record[name]["theta"] == pytest.approx(float(p.theta.mean()), rel=1e-4)


def test_record_without_optimisation(layout: Layout, update: Tensors) -> None:
    _, _, record = InCo(optimise=False)(update, {}, Context(layout))
    assert {entry["theta"] for entry in record.values()} == {1.0}


def test_record_by_hand() -> None:
    """Two 1x1 kernels: beta = 2*1 and 3*(-1); theta = 2/1 and 3/1; the norms are sqrt(13) and sqrt(2).

    The mixed update is 3 * 1.5 and -2 * 2, clipped to 0.1 and -0.1: it changes by 1.9 and 3.1.
    """
    layout = Layout(
        axes={"a": (None,) * 4, "b": (None,) * 4},
        shapes={"a": (2, 1, 1, 1), "b": (2, 1, 1, 1)},
        stages=(("s.0", "s.1"),),
        shallow={"b": "a"},
        buffers=frozenset(),
    )
    update = {
        "a": torch.tensor([1.0, -1.0]).view(2, 1, 1, 1),
        "b": torch.tensor([2.0, 3.0]).view(2, 1, 1, 1),
    }
    _, _, record = InCo()(update, {}, Context(layout))
    assert record["b"] == pytest.approx(
        {
            "theta": 2.5,
            "beta": -0.5,
            "beta_positive": 0.5,
            "norm_deep": 13**0.5,
            "norm_shallow": 2**0.5,
            "norm_change": (1.9**2 + 3.1**2) ** 0.5,
        },
        rel=1e-6,
    )


def test_norm_only_changes_lengths_and_no_direction(layout: Layout, update: Tensors) -> None:
    """Against an oracle: each kernel gets the mean of its own norm and that of its counterpart."""
    mixed, _, _ = InCo(rule="norm-only", clip=None)(clone(update), {}, Context(layout))
    for name in SIXTEEN:
        deep, shallow = update[name].double(), update[f"{name[:6]}.0.conv2.weight"].double()
        norms = [g.flatten(2).norm(dim=2)[:, :, None, None] for g in (deep, shallow)]
        expected = deep / norms[0] * (norms[0] + norms[1]) / 2
        torch.testing.assert_close(mixed[name].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("granularity", ["kernel", "tensor"])
def test_shuffled_references_against_an_oracle(layout: Layout, update: Tensors, granularity: str) -> None:
    """The kernels of a reference are the same in another order, another one in another round and seed."""
    inco = InCo(shuffle=True, granularity=granularity)  # type: ignore[arg-type]
    name, shallow = "layer1.1.conv1.weight", "layer1.0.conv2.weight"
    kernels = update[shallow].flatten(0, 1)
    seen = []
    for seed, round in ((0, 0), (0, 0), (0, 1), (1, 0)):
        mixed, _, _ = inco(clone(update), {}, Context(layout, round, seed))
        rng = torch_rng(seed, Purpose.SHUFFLE, round)
        orders = [torch.randperm(len(kernels), generator=rng)]  # that of the first reference
        permuted = kernels[orders[0]].view(update[shallow].shape)
        assert torch.equal(mixed[name], mix(update[name], permuted, granularity=granularity))  # type: ignore[arg-type]
        seen.append(mixed[name])
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[3])


def test_only_chosen_stages_are_mixed(layout: Layout, update: Tensors) -> None:
    _, _, record = InCo(stages=(2, 4))(clone(update), {}, Context(layout))
    assert set(record) == {name for name in SIXTEEN if name.startswith(("layer2", "layer4"))}
    with pytest.raises(ConfigError, match=r"inco\.stages: got 5, expected at most 4"):
        InCo(stages=(5,))(clone(update), {}, Context(layout))
