"""``incofl analyze`` as a user meets it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from incofl import METHODS, InCo, ServerMomentum, analyze, compare, write_report
from incofl.analysis.clients import Member
from incofl.analysis.features import own_neighbours, three_sizes
from incofl.engine.federation import Federation
from incofl.engine.run import run as run_federation
from tests.federations import tiny_config
from tests.own import Net, data
from tests.shell import Shell
from tests.texts import text_config, write_shakespeare

FEW = ("--clients", 4, "--examples", 40, "--history", 3)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods and two seeds, as ``incofl compare`` leaves them."""
    out = tmp_path_factory.mktemp("comparison")
    for method in ("heteroavg", "incoavg"):
        for seed in (0, 1):
            config = tiny_config(f"method={method}", f"seed={seed}", "data.limit=120", "rounds=3", "record.every=1")
            run_federation(config, out / f"{method}-s{seed}", progress=False)
    return out


def pictures(folder: Path) -> set[str]:
    """The figures in a folder; each is a picture in which something is drawn."""
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            assert min(image.size) > 300, path
            assert len(set(np.asarray(image.convert("L")).flat)) > 20, path
    return {path.name for path in folder.glob("*.png")}


def test_one_run(comparison: Path, tmp_path: Path, incofl: Shell) -> None:
    run = shutil.copytree(comparison / "incoavg-s0", tmp_path / "run")
    code, out, err = incofl("analyze", run, *FEW, "--only", "similarity,features")
    assert (code, err) == (0, "")
    assert "layer2" in out
    assert f"wrote {run}/analysis/similarity.json" in out.replace("\n", "")
    expected = {"similarity.png", "similarity-heatmaps.png", "similarity-accuracy.png", "features.png"}
    assert pictures(run / "analysis") == expected
    found = json.loads((run / "analysis" / "similarity.json").read_text())
    assert (found["round"], found["examples"], found["points"]) == (3, 40, ["layer1", "layer2"])
    assert [entry["round"] for entry in found["history"]] == [1, 2, 3]
    assert len(found["cka"]) == 2
    assert [len(row) for row in found["cka"][0]] == [4] * 4
    assert [client["level"] for client in found["clients"]] == [0, 0, 1, 2]
    assert found["within_level"][0] == pytest.approx(found["cka"][0][0][1])
    features = json.loads((run / "analysis" / "features.json").read_text())
    assert [client["level"] for client in features["clients"]] == [0, 1, 2]
    assert 0 <= features["own_neighbours"] <= 1


def test_several_runs(comparison: Path, tmp_path: Path, incofl: Shell) -> None:
    code, _, err = incofl("analyze", comparison, *FEW, "--only", "similarity", "-o", tmp_path / "figures")
    assert (code, err) == (0, "")
    assert pictures(tmp_path / "figures") == {"similarity.png", "similarity-heatmaps.png", "similarity-accuracy.png"}
    found = json.loads((tmp_path / "figures" / "similarity.json").read_text())
    assert list(found["settings"]) == ["heteroavg", "incoavg"]
    assert found["settings"]["incoavg"]["runs"] == ["incoavg-s0", "incoavg-s1"]
    own = [
        json.loads((comparison / f"{name}-s{seed}" / "analysis" / "similarity.json").read_text())["mean_by_depth"]
        for name in ("heteroavg", "incoavg")
        for seed in (0, 1)
    ]
    gaps = [np.subtract(own[2], own[0]), np.subtract(own[3], own[1])]
    setting = found["settings"]["incoavg"]
    assert [entry["mean"] for entry in setting["by_depth"]] == pytest.approx(np.mean(own[2:], 0))
    # Two seeds: Student's t with one degree of freedom, and half their distance as the standard error.
    half = 12.7062047364 * np.abs(np.subtract(own[2], own[3])) / 2
    assert [entry["half_width"] for entry in setting["by_depth"]] == pytest.approx(half)
    differences = setting["minus_first_by_depth"]
    assert setting["seeds_compared"] == 2
    assert [entry["mean"] for entry in differences] == pytest.approx(np.mean(gaps, 0))
    assert [entry["wins"] for entry in differences] == [int(count) for count in np.sum(np.array(gaps) > 0, 0)]
    assert {entry["mean"] for entry in found["settings"]["heteroavg"]["minus_first_by_depth"]} == {0.0}
    assert found["deep_similarity_and_accuracy"]["points"] == 4


def test_what_cannot_be_analysed_is_said(tmp_path: Path, incofl: Shell) -> None:
    """Without recorded rounds there is no course; texts without classes have no features of a class."""
    write_shakespeare(tmp_path)
    run_federation(text_config(tmp_path, "tiny-lstm", "rounds=1"), tmp_path / "run", progress=False)
    code, out, err = incofl("analyze", tmp_path / "run", *FEW, "--only", "similarity,features")
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "1 recorded round(s), too few for its course; run it with record.every" in said
    assert "its examples have no class of their own" in said
    assert pictures(tmp_path / "run" / "analysis") == {"similarity.png", "similarity-heatmaps.png"}


def test_a_run_that_recorded_no_rounds_says_so_and_gets_the_other_analyses(tmp_path: Path, incofl: Shell) -> None:
    run_federation(tiny_config("method=incoavg", "data.limit=120", "rounds=2"), tmp_path / "mine", progress=False)
    code, out, err = incofl("analyze", tmp_path / "mine", *FEW)
    assert (code, err) == (0, "")
    said = f"not analysed: updates: {tmp_path}/mine: no states of two consecutive rounds were recorded"
    assert said in " ".join(out.split())
    assert "record.every=1" in out
    assert "environments" not in out  # nobody asked for two settings
    made = {"similarity.png", "similarity-heatmaps.png", "similarity-accuracy.png", "features.png", "coefficients.png"}
    assert pictures(tmp_path / "mine" / "analysis") == made - {"similarity-accuracy.png"}
    code, _, err = incofl("analyze", tmp_path / "mine", "--only", "updates")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"incofl: {tmp_path}/mine: no states of two consecutive rounds were recorded")


OWN = """
import torch
from torch import nn

from incofl import Data


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(4, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, a, b):
        x = self.start(a * b)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).squeeze(1)


stream = torch.Generator().manual_seed(0)
inputs = {"a": torch.randn(90, 4, generator=stream), "b": torch.randn(90, 4, generator=stream)}
data = Data((inputs, inputs["a"].sum(1)), (inputs, inputs["a"].sum(1)))
"""


def test_own_model_and_data_of_another_task(tmp_path: Path, incofl: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named inputs and a regression: no classes, so no features of one, and RMSE in the place of the accuracy."""
    (tmp_path / "ours.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    config = {"rounds": 3, "cohort": 4, "task": {"name": "regression"}, "record": {"every": 1}}
    config |= {"model": {"name": "ours:Net"}, "data": {"name": "ours:data", "clients": 4, "partition": "iid"}}
    run_federation(config | {"split": {"levels": 2}, "local": {"epochs": 1}}, tmp_path / "run", progress=False)
    code, out, err = incofl("analyze", tmp_path / "run", *FEW)
    assert (code, err) == (0, "")
    assert "its examples have no class of their own" in " ".join(out.split())
    found = json.loads((tmp_path / "run" / "analysis" / "similarity.json").read_text())
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["history"][-1]["accuracy"] == row["accuracy"] > 0
    assert found["history"][-1]["client_accuracy"] > 0
    assert {"similarity.png", "updates.png"} <= pictures(tmp_path / "run" / "analysis")


def test_runs_from_objects(tmp_path: Path, incofl: Shell) -> None:
    """A comparison of objects is analysed and reported with the same objects, and refused without them."""
    own: dict[str, Any] = {"model": lambda: Net(blocks=4), "data": data}
    theorem = METHODS["heteroavg"].then(InCo(rule="theorem"))
    config = {"rounds": 2, "cohort": 4, "data": {"clients": 6}, "split": {"levels": 2}, "record": {"every": 1}}
    compare([theorem, "heteroavg"], config, tmp_path, seeds=1, **own, progress=False)
    code, _, err = incofl("analyze", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "this run was made from an object in Python" in err
    told: list[object] = []
    other = METHODS["heteroavg"].then(ServerMomentum())  # of no run here
    found = analyze(tmp_path, clients=4, examples=40, method=[other, theorem], watch=told.append, **own)
    assert [one for one in told if not isinstance(one, str)] == found
    assert [one.title.partition(" ")[0] for one in found] == ["CKA", "features", "updates:", "updates", "what"]
    mixed = json.loads((tmp_path / "heteroavg+inco-s0" / "analysis" / "coefficients.json").read_text())
    assert mixed["kind"] == "inco"
    assert {"similarity.json", "cross_environment.json"} <= {path.name for path in (tmp_path / "analysis").iterdir()}
    only = analyze([tmp_path / "heteroavg-s0"], only=["similarity"], clients=4, examples=40, **own)
    assert [path.name for path in only[0].files][:2] == ["similarity.json", "similarity.png"]
    page = tmp_path / "page.html"
    groups = write_report(tmp_path, page, method=theorem, **own)
    assert [isinstance(run.federation_or_reason, Federation) for run in groups.runs] == [True, True]
    assert [isinstance(run.federation_or_reason, str) for run in write_report([tmp_path], page).runs] == [True, True]


@pytest.mark.parametrize(("module", "package"), [("matplotlib", "matplotlib"), ("sklearn", "sklearn")])
def test_a_missing_extra_is_one_line(
    comparison: Path, incofl: Shell, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = incofl("analyze", comparison / "incoavg-s0")
    assert (code, err) == (2, f"incofl: analyze: needs {package}; try: pip install 'incofl[analysis]'\n")


def test_numbers_need_no_matplotlib() -> None:
    """What other rooms import of the analyses draws nothing."""
    names = ", ".join(f"incofl.analysis.{name}" for name in ("analyze", "similarity", "updates", "runs", "features"))
    code = f"import sys, {names}; sys.exit('matplotlib' in sys.modules or 'sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_are_one_line(comparison: Path, tmp_path: Path, incofl: Shell) -> None:
    run = comparison / "heteroavg-s0"
    empty = tmp_path / "empty"
    empty.mkdir()
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "config.toml", begun)
    broken = shutil.copytree(run, tmp_path / "broken")
    text = (broken / "config.toml").read_text()
    (broken / "config.toml").write_text(
        text.replace('name = "digits"', 'name = "mnist"').replace('"data"', '"nowhere"')
    )
    for arguments, expected in (
        ((tmp_path / "nowhere",), "nowhere: no such folder"),
        ((run, tmp_path / "nowhere"), "nowhere: no such folder"),
        ((empty,), "holds no run"),
        ((begun,), "holds no finished round"),
        ((broken,), "nowhere"),
        ((run, "--round", 7), "round 7 was not recorded, only 0, 1, 2, 3"),
        ((run, "--only", "similarty"), "did you mean 'similarity'?"),
        ((run, "--only", ""), "--only: got ''"),
        ((run, "--examples", 5000), "--examples: got 5000"),
    ):
        code, _, err = incofl("analyze", *arguments, *(() if "--only" in arguments else ("--only", "similarity")))
        assert code == 2, arguments
        assert expected in err
        assert err.count("\n") == 1


def test_three_sizes_are_the_ends_and_the_middle() -> None:
    members = [Member(client, level) for client, level in enumerate((0, 0, 1, 2, 3, 4))]
    assert [member.level for member in three_sizes(members)] == [0, 2, 4]
    assert [member.client for member in three_sizes(members[:2])] == [0, 1]
    assert [member.level for member in three_sizes(members[:3])] == [0, 1]


def test_neighbours() -> None:
    """Two heaps far apart have only neighbours of their own; equal heaps have half, the point itself left out."""
    g = np.random.default_rng(0)
    heap, owner = g.normal(size=(40, 3)), np.repeat([0, 1], 40)
    assert own_neighbours(np.concatenate([heap, heap + 100]), owner)[0] == 1
    share, chance = own_neighbours(g.normal(size=(80, 3)), owner)
    assert chance == 39 / 79
    assert share == pytest.approx(chance, abs=0.08)
