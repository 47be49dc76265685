"""Robust means of each position, by hand, against the rules for equal vectors, and in runs."""

import dataclasses
import functools
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import incofl
from incofl.aggregate import CoveredMean
from incofl.client import Setting
from incofl.engine.federation import Federation
from incofl.engine.worker import Worker
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import Method
from incofl.methods import METHODS, find_method
from incofl.methods.clipping import Centred, Clipping
from incofl.methods.holders import Holders
from incofl.methods.krum import GeometricMedian, Krum
from incofl.methods.trimmed import Median, Trimmed, sort_rows, trimmed_mean
from incofl.server import Changes, Server
from incofl.tensors import Tensors
from incofl.transform import Context
from incofl.upload import Upload, UploadStack
from tests.federations import run_rounds, tiny_config, tiny_federation
from tests.shell import Shell

RULES = ("clipping", "centred", "trimmed", "median", "krum", "geomedian")


@functools.cache
def federation() -> Federation:
    return tiny_federation("method=heteroavg", 'model.options={norm="group"}')


def layout() -> Layout:
    return federation().model.layout


def upload(client: int, level: int, value: float | Callable[[tuple[int, ...]], Tensor]) -> Upload:
    """An upload whose values are all the same, or made by a function of the shape."""
    piece = federation().slice(level, 0)
    names = sorted(federation().model.layout.parameters & piece.index.keys())
    make = value if callable(value) else lambda shape: torch.full(shape, value)
    return Upload(client, level, piece, {n: make(piece.shapes[n]) for n in names}, {}, 10, 1)


def num_parameters() -> int:
    return sum(math.prod(layout().shapes[name]) for name in layout().parameters)


def aggregated(mean: Any, uploads: Sequence[Upload], server: Server | None = None) -> Changes:
    method: Method = mean.added_to(METHODS["heteroavg"])
    return method.aggregate(server or federation().start(), [uploads])


def level_of_positions(name: str) -> Tensor:
    """The smallest level that holds each position of a tensor."""
    found = torch.full(federation().model.layout.shapes[name], 9.0)
    for level in (2, 1, 0):
        piece = federation().slice(level, 0)
        if name in piece.index:
            piece.write({name: torch.full(piece.shapes[name], float(level))}, {name: found})
    return found


def assert_by_level(changes: Changes, expected: Sequence[float | None]) -> None:
    """That positions which levels from 0, 1 and 2 on hold have certain values; None: whatever they are."""
    for name, value in changes.shared.values.items():
        for level, want in enumerate(expected):
            if want is not None:
                got = value[level_of_positions(name) == level]
                torch.testing.assert_close(got, torch.full_like(got, want))


def test_extremes_of_each_position_are_left_out() -> None:
    """Positions of all have 1, 2, 3, 4, 100: without one at either end 3. Those of level 1 have 3, 4, 100: 4.

    The largest level's own have 100 alone, with which nothing can be done.
    """
    uploads = [upload(0, 0, 1.0), upload(1, 0, 2.0), upload(2, 1, 3.0), upload(3, 1, 4.0), upload(4, 2, 100.0)]
    assert_by_level(aggregated(Trimmed(share=0.2), uploads), [3.0, 4.0, 100.0])
    assert_by_level(aggregated(Trimmed(share=0.0), uploads), [22.0, 107 / 3, 100.0])
    assert_by_level(aggregated(Median(), uploads), [3.0, 4.0, 100.0])
    assert_by_level(aggregated(Median(), uploads[:4]), [2.5, 3.5])


def test_two_holders_are_averaged() -> None:
    uploads = [upload(0, 0, 1.0), upload(3, 2, 4.0), upload(4, 2, 100.0)]
    for mean in (Trimmed(share=0.4), Median()):
        assert_by_level(aggregated(mean, uploads), [4.0, 52.0, 52.0])


def test_a_long_upload_is_shortened() -> None:
    """A whole model of N ones has the norm sqrt(N): with half of that as bound it counts half, and so does a slice."""
    size = sum(math.prod(federation().model.layout.shapes[n]) for n in federation().model.layout.parameters)
    rule = Clipping(bound=math.sqrt(size) / 2)
    assert_by_level(aggregated(rule, [upload(0, 0, 1.0), upload(9, 2, 1.0)]), [0.5, 0.5, 0.5])
    assert_by_level(aggregated(rule, [upload(0, 0, 0.1), upload(9, 2, -1e9)]), [-0.2, -0.5, -0.5])


def test_the_bound_follows_the_fleet() -> None:
    """In the first round the median of its own norms, 2 sqrt(N); then that of the round before."""
    size = sum(math.prod(federation().model.layout.shapes[n]) for n in federation().model.layout.parameters)
    first = [upload(0, 0, 1.0), upload(1, 1, 2.0), upload(2, 2, 1e6)]
    changes = aggregated(Clipping(), first)
    assert_by_level(changes, [5 / 3, 2.0, 2.0])
    assert float(changes.extra["clipping"]["update"]) == pytest.approx(2 * math.sqrt(size))
    record = changes.records["clipping"]["update"]
    assert record["clipped"] == pytest.approx(1 / 3)
    server = federation().start().advance(changes)
    again = aggregated(Clipping(), [upload(0, 0, 3.0), upload(2, 2, -9.0), upload(3, 2, 9.0)], server)
    assert_by_level(again, [2 / 3, 0.0, 0.0])
    assert float(again.extra["clipping"]["update"]) == pytest.approx(9 * math.sqrt(size))


def test_the_bound_may_follow_another_quantile() -> None:
    """Of norms of 1, 2, 3, 5, 9 (times sqrt(N)) the 0.25 quantile is 2, and 0.75 gives 5."""
    size = num_parameters()
    for quantile, bound, mean in ((0.25, 2.0, 9 / 5), (0.75, 5.0, 16 / 5)):
        uploads = [upload(k, 2, value) for k, value in enumerate((1.0, 2.0, 3.0, 5.0, 9.0))]
        changes = aggregated(Clipping(quantile=quantile), uploads)
        assert_by_level(changes, [mean, mean, mean])
        assert float(changes.extra["clipping"]["update"]) == pytest.approx(bound * math.sqrt(size))


def test_statistics_are_bounded_too() -> None:
    """One client claims running means of 1e6; the others moved theirs by 0.5: it counts as they do."""
    batch_norm = tiny_federation("method=heteroavg+clipping", "split.counts=[10,0,0]", "buffers=average")
    server, piece = batch_norm.start(), batch_norm.slice(0, 0)
    uploads = []
    for client, moved in enumerate((0.5, 0.5, 1e6)):
        state = piece.take(server.shared)
        parameters = {n: torch.ones(s) for n, s in piece.shapes.items() if n in server.layout.parameters}
        buffers = {n: v + moved if v.is_floating_point() else v for n, v in state.items() if n in server.layout.buffers}
        uploads.append(Upload(client, 0, piece, parameters, buffers, 10, 1))
    changes = batch_norm.method.aggregate(server, [uploads])
    for name in server.layout.buffers & piece.index.keys():
        old, new = (table[name] for table in (server.shared, changes.shared.values))
        if old.is_floating_point():
            torch.testing.assert_close(piece.look({name: new})[name], piece.look({name: old + 0.5})[name])


def trained(federation: Federation) -> list[Upload]:
    """What all clients send in the first round."""
    server, worker = federation.start(), Worker(federation)
    return [worker.train(server, job) for job in federation.schedule(0, 10)]


@pytest.mark.parametrize("rule", ["clipping", "centred"])
def test_variates_are_bounded_from_the_first_round(rule: str) -> None:
    """Those of one client a million times as long move the server's by no more than honest ones."""
    federation = tiny_federation(f"method=heteroscaffold+{rule}")
    uploads = trained(federation)
    longer = {name: 1e6 * value for name, value in uploads[0].extra.items()}
    liar = dataclasses.replace(uploads[0], extra=longer)

    def largest(uploads: Sequence[Upload]) -> float:
        changes = federation.method.aggregate(federation.start(), [uploads])
        assert math.isfinite(changes.records[rule]["extra"]["bound"])
        return max(float(value.abs().max()) for value in changes.extra["variate"].values())

    assert largest([liar, *uploads[1:]]) < 2 * largest(uploads)


def test_variates_have_the_weights_of_their_uploads() -> None:
    """Of 1, twice, and 1e6, not at all, the sum is 2; the variate moves by it over the number of holders."""
    federation = tiny_federation("method=heteroscaffold")
    server = federation.start()
    one, other = [upload for upload in trained(federation) if upload.level == 0][:2]
    sent = [
        dataclasses.replace(one, weight=2.0, extra={n: torch.ones_like(v) for n, v in one.extra.items()}),
        dataclasses.replace(other, weight=0.0, extra={n: 1e6 * torch.ones_like(v) for n, v in other.extra.items()}),
    ]
    variate = federation.method.aggregate(server, [sent]).extra["variate"]
    for name, value in one.slice.look(variate).items():
        expected = 2 / one.slice.look({name: server.holders(name)})[name]
        torch.testing.assert_close(value, expected.to(value.dtype).expand_as(value))


def test_statistics_of_the_smallest_path_are_bounded_too() -> None:
    """A larger client claims running means of 1e6 for the smallest path in its model."""
    federation = tiny_federation("method=fedfloor+clipping")
    uploads = trained(federation)
    at = next(at for at, upload in enumerate(uploads) if upload.smallest)
    claimed = {n: v + 1e6 if v.is_floating_point() else v for n, v in uploads[at].smallest.items()}
    liar = dataclasses.replace(uploads[at], smallest=claimed)
    honest, lied = (
        federation.method.aggregate(federation.start(), [sent]).private[0].values
        for sent in (uploads, [*uploads[:at], liar, *uploads[at + 1 :]])
    )
    for name, value in lied.items():
        assert float((value - honest[name]).abs().max()) < 10, name


@pytest.mark.parametrize("method", ["scaffold+clipping", "heteroscaffold+centred"])
def test_bounds_of_variates_are_recorded(method: str, tmp_path: Path) -> None:
    result = incofl.run(tiny_config(f"method={method}"), tmp_path / "run", progress=False)
    for row in result.history:
        record = row[method.partition("+")[2]]
        assert record.keys() == {"update", "buffers", "extra"}
        assert all(math.isfinite(part["bound"]) for part in record.values())


def test_centred_clipping_by_hand() -> None:
    """Round 1, around 0: bound sqrt(N), ones and a three: (1 + 1 + 1) / 3. Round 2, around 1: 1.5 and 11, both bounded.

    1 + (0.5 + 1) / 2 = 1.75, and where the second alone holds a position, 2.
    """
    size = sum(math.prod(federation().model.layout.shapes[n]) for n in federation().model.layout.parameters)
    rule = Centred(bound=math.sqrt(size))
    first = aggregated(rule, [upload(0, 0, 1.0), upload(1, 2, 1.0), upload(2, 2, 3.0)])
    assert_by_level(first, [1.0, 1.0, 1.0])
    server = federation().start().advance(first)
    second = aggregated(rule, [upload(0, 0, 1.5), upload(2, 2, 11.0)], server)
    assert_by_level(second, [1.75, 2.0, 2.0])
    third = aggregated(rule, [upload(0, 0, 1.75)], server.advance(second))  # larger levels have no upload
    assert_by_level(third, [1.75])
    assert third.extra["centred-mean"].keys() == second.extra["centred-mean"].keys()  # blocks that nobody held, too
    kept = {n: v for n, v in third.extra["centred-mean"].items() if bool((level_of_positions(n) == 2).any())}
    for name, centre in kept.items():
        assert bool((centre[level_of_positions(name) == 2] == 2).all())


def test_levels_that_share_nothing_have_centres_of_their_own() -> None:
    """Both levels are 0.5 from the centre of their own round before; around 0, or that of others, they would not be."""
    method = Centred(bound=math.sqrt(num_parameters())).added_to(METHODS["fedavg"])
    server = tiny_federation("method=fedavg", 'model.options={norm="group"}').start()
    first = method.aggregate(server, [[upload(0, 0, -1.0), upload(9, 2, 1.0)]])
    second = method.aggregate(server.advance(first), [[upload(0, 0, -1.5), upload(9, 2, 1.5), upload(8, 2, 11.0)]])
    for level, want in ((0, -1.5), (2, 1.75)):
        piece, found = federation().slice(level, 0), second.private[level].values
        for value in piece.look({n: found[n] for n in found}).values():
            torch.testing.assert_close(value, torch.full_like(value, want))


def test_a_position_knows_its_number_of_holders() -> None:
    """Whatever is left out of their values: five hold what is small, three what level 1 adds, and one the rest."""
    uploads = [upload(0, 0, 1.0), upload(1, 0, 2.0), upload(2, 1, 3.0), upload(3, 1, 4.0), upload(4, 2, 100.0)]
    for mean in (Trimmed(share=0.2), Median()):
        changes = aggregated(mean, uploads)
        weight = {n: changes.shared.weight[n].expand(v.shape).float() for n, v in changes.shared.values.items()}
        assert_by_level(dataclasses.replace(changes, shared=CoveredMean(weight, weight)), [5.0, 3.0, 1.0])


def test_normalised_updates_are_trimmed() -> None:
    """FedNova by hand: 2, 4, 6, 8, 500 over 1, 2, 2, 4, 1 steps are 2, 2, 3, 2, 500: (2 + 2 + 3) / 3, times 2 steps."""
    sent = zip((2.0, 4.0, 6.0, 8.0, 500.0), (1.0, 2.0, 2.0, 4.0, 1.0), strict=True)
    uploads = [dataclasses.replace(upload(k, 2, value), normaliser=n) for k, (value, n) in enumerate(sent)]
    assert_by_level(aggregated(Trimmed(share=0.2), uploads), [14 / 3, 14 / 3, 14 / 3])


def test_uploads_that_come_together_are_trimmed_as_those_that_do_not() -> None:
    uploads, _ = vectors(5)
    stacked = {name: torch.stack([u.update[name] for u in uploads]) for name in uploads[0].update}
    ones = [1] * len(uploads)
    stack = UploadStack(range(5), 2, uploads[0].slice, stacked, {}, ones, ones, [0.0] * 5, {}, {}, None, [1.0] * 5)
    method = Trimmed(share=0.2).added_to(METHODS["heteroavg"])
    together = method.aggregate(federation().start(), [stack]).shared.values
    apart = aggregated(Trimmed(share=0.2), uploads).shared.values
    assert together.keys() == apart.keys()
    assert all(torch.equal(together[name], apart[name]) for name in apart)


def test_krum_leaves_out_less_than_half() -> None:
    """Of four at most one, though two fifths, rounded up, would be two; an upload that counts double still does."""
    uploads = [upload(k, 0, value) for k, value in enumerate((1.0, 2.0, 2.5, 50.0))]
    assert_by_level(aggregated(Krum(share=0.4), uploads), [5.5 / 3])
    double = [dataclasses.replace(uploads[0], weight=2.0), *uploads[1:]]
    assert_by_level(aggregated(Krum(share=0.4), double), [6.5 / 4])


def test_krum_leaves_out_who_has_no_neighbours() -> None:
    """Level 0 has 1, 2, 2.5, 50: without the last the mean is 11/6. Level 2 has two that disagree, and both count."""
    uploads = [upload(k, 0, value) for k, value in enumerate((1.0, 2.0, 2.5, 50.0))]
    uploads += [upload(8, 2, 10.0), upload(9, 2, -10.0)]
    expected = (4 * 5.5 / 3 + 0) / 6  # the three share the weight of four
    assert_by_level(aggregated(Krum(share=0.25), uploads), [expected, 0.0, 0.0])
    # Krum itself, with scores of the mean squared distances from the two nearest: 1.625, 0.625, 1.25
    assert_by_level(aggregated(Krum(share=0.25, select=1), uploads), [4 * 2.0 / 6, 0.0, 0.0])


def test_krum_among_all_clients() -> None:
    """Of five the liar is left out; the blocks of which it is the only holder do not move."""
    uploads = [upload(k, 0, value) for k, value in enumerate((1.0, 2.0, 2.5))]
    uploads += [upload(5, 1, 1.5), upload(9, 2, 50.0)]
    assert_by_level(aggregated(Krum(share=0.2, among="all"), uploads), [7 / 4, 1.5, 0.0])
    assert_by_level(aggregated(Krum(share=0.2), uploads), [(3 * 2.25 + 51.5) / 5, 51.5 / 2, 50.0])


@pytest.mark.parametrize(
    "keys", [["model.name=tiny-vit"], ["model.name=tiny-resnet"], ["model.name=tiny-resnet", "split.kind=stage"]]
)
def test_what_krum_compares_is_what_the_smallest_level_holds(keys: list[str]) -> None:
    """Also where that lies scattered in what a larger level holds, as of the heads of an attention."""
    kind = [] if "split.kind=stage" in keys else ["split.kind=hetero", "split.levels=[0.5,0.75,1.0]"]
    federation = tiny_federation("method=heteroavg+krum", "krum.among=all", *kind, *keys)
    server, rule = federation.start(), Krum(among="all")
    full = {n: torch.arange(v.numel(), dtype=v.dtype).view_as(v) for n, v in server.shared.items()}
    want = federation.slice(0, 0).look({n: full[n] for n in server.layout.parameters})
    for level in federation.levels_in_use:
        held = federation.slice(level, 0)
        update = held.take({n: full[n] for n in server.layout.parameters})
        found = rule.part(Upload(0, level, held, update, {}, 1, 1), server)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)


def test_the_geometric_median_of_a_level() -> None:
    """Of points on a line it is the median, 2, whatever the last one says; a level's sole client counts as it is."""
    uploads = [upload(0, 0, 1.0), upload(1, 0, 2.0), upload(2, 0, 1e4), upload(9, 2, 6.0)]
    changes = aggregated(GeometricMedian(iterations=100), uploads)
    assert_by_level(changes, [(3 * 2.0 + 6) / 4, 6.0, 6.0])


def test_positions_of_few_holders() -> None:
    """Two hold what is small, one the rest: the steps of that are 0, or at most as large as half of the others'."""
    layout = federation().model.layout
    changes = aggregated(Clipping(bound=1e9), [upload(0, 0, 1.0), upload(9, 2, 7.0)])
    tens = {name: 10 * weight for name, weight in changes.shared.weight.items()}  # every holder has 10 examples
    for bound, want, weight, unit in ((0.0, 0.0, changes.shared.weight, changes.unit), (0.5, 2.0, tens, 10.0)):
        context = Context(layout, weight=weight, unit=unit)
        update = {n: v.clone() for n, v in changes.shared.values.items()}
        new, _, record = Holders(least=2, bound=bound)(update, {}, context)
        assert_by_level(
            dataclasses.replace(changes, shared=dataclasses.replace(changes.shared, values=new)), [4.0, want]
        )
        assert record["all"]["most"] == pytest.approx(want)
    new, _, _ = Holders(least=3, bound=5.0)(update, {}, context)  # nowhere are there three
    assert all(not value.any() for value in new.values())


def test_rows_in_order() -> None:
    for n in range(1, 40):
        rows = torch.randn(n, 50, generator=torch.Generator().manual_seed(n))
        assert torch.equal(torch.stack(sort_rows(list(rows))), rows.sort(0).values)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=30), st.integers(0, 100), st.data())
def test_few_liars_cannot_leave_the_range_of_the_honest(honest: list[float], seed: int, data: st.DataObject) -> None:
    liars = data.draw(st.integers(0, len(honest) // 4))  # at most a fifth of all
    lies = torch.randn(liars, generator=torch.Generator().manual_seed(seed)) * 1e14
    values = torch.cat([torch.tensor(honest), lies])[:, None]
    number = torch.tensor([float(len(values))])
    for share in (0.2, 0.5):
        result = float(trimmed_mean(values, number, share))
        assert min(honest) - 1e-3 <= result <= max(honest) + 1e-3


# Rules on n equal vectors, as numpy says them


def numpy_trimmed(x: Any, f: int) -> Any:
    return np.sort(x, axis=0)[f : len(x) - f].mean(0)


def numpy_krum(x: Any, f: int, select: int) -> Any:
    distances = np.sort(((x[:, None] - x[None]) ** 2).sum(2), axis=1)[:, 1 : len(x) - f].mean(1)
    return x[np.argsort(distances, kind="stable")[:select]].mean(0)


def numpy_geomedian(x: Any, nu: float, steps: int) -> Any:
    z = np.zeros_like(x[0])
    for _ in range(steps):
        near = 1 / np.maximum(np.linalg.norm(x - z, axis=1), nu)
        z = (x * near[:, None]).sum(0) / near.sum()
    return z


def numpy_clipped(x: Any, centre: Any, tau: float) -> Any:
    away = x - centre
    return centre + (away * np.minimum(1, tau / np.linalg.norm(away, axis=1))[:, None]).mean(0)


def vectors(n: int) -> tuple[list[Upload], Any]:
    """Uploads of clients that all hold the whole model, and the same as rows."""
    rng = torch.Generator().manual_seed(n)
    uploads = [upload(k, 2, lambda shape: torch.randn(shape, generator=rng)) for k in range(n)]
    uploads[-1] = upload(n - 1, 2, lambda shape: 50 * torch.randn(shape, generator=rng))
    return uploads, np.stack([flat(u.update) for u in uploads])


def flat(table: Tensors) -> Any:
    return torch.cat([table[name].flatten() for name in sorted(table)]).double().numpy()


@pytest.mark.parametrize("n", [3, 5, 8, 11])
def test_with_full_coverage_they_are_the_known_rules(n: int) -> None:
    uploads, x = vectors(n)
    wrong = min(math.ceil(0.2 * n), (n + 1) // 2 - 1)
    for mean, expected in (
        (Trimmed(share=0.2), numpy_trimmed(x, wrong)),
        (Median(), np.median(x, axis=0)),
        (Krum(share=0.2, select=1), numpy_krum(x, wrong, 1)),
        (Krum(share=0.2), numpy_krum(x, wrong, n - wrong)),
        (GeometricMedian(iterations=3, smoothing=0.1), numpy_geomedian(x, 0.1, 3)),
        (Clipping(bound=20.0), numpy_clipped(x, 0 * x[0], 20.0)),
        (Centred(bound=20.0), numpy_clipped(x, 0 * x[0], 20.0)),
    ):
        changes = aggregated(mean, uploads)
        np.testing.assert_allclose(flat(changes.shared.values), expected, rtol=1e-6, atol=1e-6, err_msg=str(mean))
        if isinstance(mean, Centred):
            centre, server = flat(changes.shared.values), federation().start().advance(changes)
            again = flat(aggregated(mean, uploads, server).shared.values)
            np.testing.assert_allclose(again, numpy_clipped(x, centre, 20.0), rtol=1e-5, atol=1e-6)


def of_byzfl() -> tuple[Any, Any]:
    """The rules of the package byzfl and what it does before them, without its parts that need torchvision."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("byzfl is not installed: pip install --no-deps byzfl")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    rules, before = (importlib.import_module(f"byzfl.aggregators.{part}aggregators") for part in ("", "pre"))
    return rules, before


def test_with_full_coverage_they_are_those_of_byzfl() -> None:
    (rules, before), (uploads, x) = of_byzfl(), vectors(9)
    for mean, theirs in (
        (Trimmed(share=0.2), rules.TrMean(2)),
        (Median(), rules.Median()),
        (Krum(share=0.2, select=1), rules.Krum(2)),
        (Krum(share=0.2), rules.MultiKrum(2)),
        (Krum(share=0.2, among="all"), rules.MultiKrum(2)),
        (GeometricMedian(iterations=3, smoothing=0.1), rules.GeometricMedian(0.1, 3)),
        (Centred(bound=20.0), rules.CenteredClipping(None, 1, 20.0)),
        (Clipping(bound=20.0), lambda x: np.mean(before.Clipping(20.0)(x), axis=0)),
    ):
        ours = flat(aggregated(mean, uploads).shared.values)
        np.testing.assert_allclose(ours, theirs(x), rtol=1e-6, atol=1e-6, err_msg=str(mean))


OTHERS = ("incoavg", "fedavg", "heteronova", "heteroscaffold", "heterofl", "depthfl")


@pytest.mark.parametrize(
    ("base", "rule"),
    [("heteroavg", rule) for rule in RULES]
    + [(base, rule) for base in OTHERS for rule in ("centred", "trimmed", "krum")]
    + [("fedrand", "centred"), ("fedrolex", "krum"), ("fedecover", "trimmed")],
)
def test_methods_with_each_rule(base: str, rule: str) -> None:
    federation = tiny_federation(f"method={base}+{rule}", "aggregate.weighting=uniform", "model.name=tiny-mlp")
    *_, server = run_rounds(federation, 2, cohort=10)
    assert all(bool(torch.isfinite(value).all()) for value in server.shared.values())


@pytest.mark.parametrize("rule", RULES)
def test_a_mad_client_changes_little(rule: str) -> None:
    honest = [upload(k, k % 2, lambda shape: 0.01 * torch.ones(shape)) for k in range(9)]
    with_it = aggregated(METHODS[f"heteroavg+{rule}"].server.mean, [*honest, upload(9, 1, -1e12)])
    for value in with_it.shared.values.values():
        assert float(value.abs().max()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_and_other_workers_give_the_same_bits(rule: str, tmp_path: Path) -> None:
    config = ["model.name=tiny-mlp", f"method=incoavg+{rule}+holders", "cohort=9", "holders.bound=1"]
    whole = incofl.run(tiny_config(*config, "engine.workers=1"), tmp_path / "whole", progress=False)
    with incofl.Run(tiny_config(*config, "engine.workers=1"), tmp_path / "parts", progress=False) as first:
        next(iter(first))
    workers = 2 if rule in ("centred", "trimmed") else 1
    again = incofl.run(
        tiny_config(*config, f"engine.workers={workers}"), tmp_path / "parts", progress=False, resume=True
    )
    assert [dict(row, seconds=0) for row in again.history] == [dict(row, seconds=0) for row in whole.history]
    one, other = (result.model().state_dict() for result in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["method=heteroavg+trimmed+krum"], "got heteroavg+trimmed+krum, expected one way to average, and not two"),
        (["method=heteroavg+clipping+privacy", "privacy.noise=1"], "expected one way to average, and not two"),
        (
            ["method=heteroavg+median", "aggregate.weighting=samples"],
            "aggregate.weighting: got 'samples', expected 'un",
        ),
        (["method=heteroavg+holders", "aggregate.weighting=samples"], "every client counts once, whatever examples it"),
        (
            ["method=fedavg+krum", "krum.among=all"],
            "krum.among: got 'all', expected 'level' with fedavg+krum: its levels",
        ),
        (["method=fedrolex+krum", "krum.among=all"], "krum.among: got 'all', expected 'level' with fedrolex+krum"),
        (["method=fedrand+krum"], "expected clients of a level that hold the same channels"),
        (["method=heteroavg+median+coverage", "coverage.kind=signal"], "coverage.kind: got 'signal', expected 'count'"),
        (["method=heteroavg+trimmed", "trimmed.share=0.6"], "trimmed.share: got 0.6, expected"),
    ],
)
def test_what_does_not_fit_is_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        tiny_federation(*keys)
    assert message in str(problem.value)


def test_rules_of_factors_have_no_trimmed_mean() -> None:
    method, setting = find_method("flexlora+trimmed"), Setting(torch.nn.Identity(), torch.zeros(1), layout())
    with pytest.raises(ConfigError, match="expected a method whose server rule is a mean"):
        method.server.mean.check(method, setting)


def test_the_plan_says_what_must_be_kept(incofl: Shell) -> None:
    code, out, _ = incofl("plan", "--method", "heteroavg+median", "--set", "model.name=tiny-mlp")
    assert code == 0
    assert "the server keeps the uploads of a round" in out
