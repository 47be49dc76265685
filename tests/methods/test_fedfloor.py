"""FedFloor: the smallest level is that of ``allsmall``, and models that cannot start as one function are told so."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import incofl
from incofl.engine.build import build
from incofl.engine.progress import Lines
from incofl.errors import ConfigError
from tests.federations import FAMILIES, family_config, run_rounds, tiny_config, tiny_federation
from tests.texts import write_shakespeare

OPTIONS = {
    "depth": (),
    "width": ("split.kind=hetero",),
    "sgd": ("local.optimizer=sgd", "local.max_grad_norm=0.5"),
    "average": ("buffers=average", "anchor.beyond=1"),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", [family for family in FAMILIES if family not in ("tiny-transformer", "tiny-vit")])
def test_the_smallest_level_is_the_one_that_everybody_would_train(model: str, options: str, tmp_path: Path) -> None:
    """Its parameters and statistics after three rounds, bit for bit, whatever larger devices learn; dropout, too."""
    write_shakespeare(tmp_path)
    ends = {}
    for method in ("fedfloor", "allsmall", "heteroavg"):
        chosen = [key for key in OPTIONS[options] if "anchor" not in key or method == "fedfloor"]
        config = family_config(model, tmp_path, f"method={method}", "split.start=identity", *chosen)
        federation = build(config)
        server = run_rounds(federation, 3)[-1]
        ends[method] = federation.slice(0, 0).take(server.state(0))
    assert all(torch.equal(value, ends["allsmall"][name]) for name, value in ends["fedfloor"].items())
    assert not all(torch.equal(value, ends["heteroavg"][name]) for name, value in ends["fedfloor"].items())


def test_the_smallest_level_of_worker_processes_is_the_one_that_everybody_would_train(tmp_path: Path) -> None:
    """The accuracy of every round, at levels whose cost and number of examples would change the order of turns."""
    found = []
    for method in ("fedfloor", "allsmall"):
        config = tiny_config(f"method={method}", "engine.workers=2", "eval.every=1", "cohort=8", "model.width=0.5")
        rows = incofl.run(config, tmp_path / method, progress=False).history
        found.append([row["accuracy_by_level"][0] for row in rows])
    assert found[0] == found[1]


def test_larger_levels_learn() -> None:
    federation = tiny_federation("method=fedfloor")
    start, *_, end = run_rounds(federation, 2)
    beyond = federation.slice(2, 0).index.keys() - federation.slice(0, 0).index.keys()
    assert any(not torch.equal(start.shared[name], end.shared[name]) for name in beyond & start.layout.parameters)


def test_levels_of_one_width_share_statistics_but_for_the_smallest() -> None:
    federation = tiny_federation("method=fedfloor")
    end = run_rounds(federation, 2)[-1]
    name = next(n for n in federation.slice(0, 0).index if n.endswith("running_mean"))
    small, *large = (end.state(level)[name] for level in range(3))
    assert torch.equal(*large)
    assert not torch.allclose(small, large[0])


def test_it_runs_with_inco_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = tiny_config("method=fedfloor+inco")
    whole = incofl.run(config, tmp_path / "whole", progress=False)
    with incofl.Run(config, tmp_path / "parts", progress=False) as run:
        next(iter(run))
    parts = incofl.run(config, tmp_path / "parts", resume=True, progress=False)
    for level in range(3):
        ours, theirs = parts.model(level).state_dict(), whole.model(level).state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_worker_processes_know_the_statistics_of_the_smallest_level(tmp_path: Path) -> None:
    """Turns in workers are sent what turns in this process are, and end with the same bits."""
    ends = []
    for workers in (1, 2):
        config = tiny_config("method=fedfloor", f"engine.workers={workers}")
        ends.append(incofl.run(config, tmp_path / str(workers), progress=False).model(0).state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


class Heard(Lines):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_a_model_without_residual_branches_starts_at_random_and_says_so(tmp_path: Path) -> None:
    data = incofl.Data((torch.rand(60, 4), torch.arange(60) % 2), test=(torch.rand(10, 4), torch.arange(10) % 2))
    config = {"method": "fedfloor", "rounds": 1, "data": {"clients": 6}}
    heard = Heard()
    incofl.run(config, tmp_path / "run", model=Chain, data=data, progress=heard)
    (line,) = [line for line in heard.lines if "start at random" in line]
    assert line.startswith("warning: larger levels start at random, not as the smallest: blocks.")
    with pytest.raises(ConfigError, match=r"split\.start: got 'identity'"):
        incofl.run(config | {"split": {"start": "identity"}}, tmp_path / "strict", model=Chain, data=data)
