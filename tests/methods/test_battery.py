"""One battery over every method and every model: whatever joins the table is checked by it."""

import pytest
import torch

from incofl.config import make_config
from incofl.engine.executor import InProcess
from incofl.engine.round import Tally, run_round
from incofl.errors import ConfigError
from incofl.methods import METHODS, find_method
from incofl.tensors import all_finite, clone
from tests.federations import run_rounds, tiny_federation

MODELS = {"tiny-resnet": "split.kind=stage", "tiny-mlp": "split.kind=layer"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", METHODS)
def test_method(name: str, model: str) -> None:
    federation = tiny_federation(f"method={name}", f"model.name={model}", MODELS[model])
    first, middle, last = run_rounds(federation, 2)

    # A round modifies nothing that it is handed: repeated from the same server, it gives the same bits.
    shared = clone(middle.shared)
    again = run_rounds(federation, 1, server=middle)[-1]
    assert all(torch.equal(middle.shared[n], shared[n]) for n in shared)
    for level in federation.levels_in_use:
        assert all(torch.equal(again.state(level)[n], last.state(level)[n]) for n in last.state(level))

    # Finite, and not standing still: the update on a CPU is not zero.
    levels = federation.levels_in_use
    assert all(all_finite(last.state(level)) for level in levels)
    for level in levels:
        moved = [
            n for n in federation.slice(level, 0).index if not torch.equal(first.state(level)[n], last.state(level)[n])
        ]
        assert moved

    # A position held by nobody in a round keeps its value.
    held = {n for job in federation.schedule(0, 4) for n in federation.slice(job.level, 0).index}
    assert all(torch.equal(first.shared[n], middle.shared[n]) for n in first.shared if n not in held)

    # Its name and options survive the config file; it says what it is.
    method = METHODS[name]
    assert make_config({"method": name.upper()}).method == method.name
    assert method.summary


def test_methods_differ_from_each_other() -> None:
    results = {name: run_rounds(tiny_federation(f"method={name}"), 2)[-1].state(1) for name in METHODS}
    names = list(results)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert any(not torch.equal(results[a][n], results[b][n]) for n in results[a]), (a, b)


def test_two_rounds_in_one_go_or_with_a_new_executor() -> None:
    federation = tiny_federation()
    _, middle, last = run_rounds(federation, 2)
    jobs = federation.schedule(1, 4)
    alone = run_round(middle, federation.method, jobs, InProcess(federation), Tally())
    assert all(torch.equal(alone.shared[n], last.shared[n]) for n in last.shared)


def test_table() -> None:
    assert {"fedavg", "heteroavg", "incoavg", "allsmall", "alllarge"} <= set(METHODS)
    assert METHODS["IncoAvg"] is METHODS["heteroavg+inco"]
    assert "heteroavg+inco" in METHODS
    assert len(METHODS) == len(list(METHODS))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("incavg", "method: got 'incavg'; did you mean 'incoavg'"),
        ("zzz", "method: got 'zzz'; expected one of: "),
        ("fedavg+inco", "InCo mixes the layers of one shared server model"),
        ("heteroavg+icno", "did you mean"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_method(name)
