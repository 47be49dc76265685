"""Your own model, data, task and method: as objects in Python, and by name from a config and the command line."""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import incofl
from incofl import METHODS, Context, Data, InCo, Metric, Run, ServerAdam, ServerSchedule, Task
from incofl.client import Upload
from incofl.config import load_config, make_config
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.processes import WorkerProcesses
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError, DataError, IncoflError, RunError
from incofl.methods.heterofl import HeteroFL
from incofl.methods.noise import DeepNoise, UploadNoise
from incofl.task import Score
from incofl.tensors import Tensors
from incofl.transform import Record, Stateless
from tests.own import LanguageModel, Net, Segmenter, TwoInputs, points
from tests.own import method as own_method
from tests.shell import Shell

SMALL = {
    "method": "incoavg",
    "rounds": 3,
    "cohort": 4,
    "data": {"clients": 6},
    "split": {"levels": 2},
    "local": {"epochs": 1, "batch_size": 8, "lr": 0.01},
}


def small(**more: Any) -> dict[str, Any]:
    return SMALL | more


def weights(folder: Path) -> bytes:
    return (folder / "checkpoint" / "state.safetensors").read_bytes()


def test_own_tensors_model_and_method(tmp_path: Path) -> None:
    method = METHODS["heteroavg"].then(InCo(rule="theorem"))
    result = incofl.run(small(), tmp_path, model=Net, data=Data(points(), points(60, 1)), method=method)
    assert result["status"] == "done"
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert result.history[-1]["inco"]
    assert result.model(-1)(torch.zeros(2, 6)).shape == (2, 3)
    assert sum(p.numel() for p in result.model(0).parameters()) < sum(p.numel() for p in result.model(1).parameters())
    config = (tmp_path / "config.toml").read_text()
    assert 'name = "tests.own:Net"' in config
    assert 'rule = "theorem"' in config


def test_classes_that_are_no_whole_numbers_are_refused() -> None:
    x, y = points()
    config = make_config(small(), model=Net, data=Data((x, y.float()), classes=3))
    with pytest.raises(
        DataError, match=r"train: got targets of torch.float32, expected whole numbers, the classes: y.l"
    ):
        build(config)


def test_an_object_replaces_what_the_config_says() -> None:
    """But for options that the config sets: these are put into the parts that have them."""
    method = METHODS["heteroavg"].then(InCo(rule="theorem", eps=1e-5))
    values = small(method="fedprox", inco={"clip": 0.5}, prox={"mu": 1.0}, server={"lr": 0.5}, noise={"uploads": 0.1})
    config = make_config(values, method=method, model=Net(), data=data())
    assert config.method == "object:heteroavg+inco"
    built = build(config).method
    assert built.transforms == (ServerSchedule(lr=0.5), InCo(rule="theorem", eps=1e-5, clip=0.5))
    assert built.uploads == (UploadNoise(uploads=0.1),)
    assert make_config(config.to_dict(), **config.objects) == config
    assert make_config({"prox": {"mu": 0.7}}, method=METHODS["heteroprox"]).methods["prox"].mu == 0.7
    with pytest.raises(ConfigError, match="config: unknown key 'scaled'"):
        make_config({"scaled": {"factor": 1.0}}, method=method)


def test_an_object_for_a_finished_config() -> None:
    """What the config says differently than its own method applies, and nothing else of that method's options."""
    config = make_config({"method": "incoavg", "server": {"lr": 0.5}})
    assert config.methods["inco"].rule == "released"
    theorem = make_config(config, method=METHODS["heteroavg"].then(InCo(rule="theorem")))
    assert (theorem.methods["inco"].rule, theorem.methods["server"].lr) == ("theorem", 0.5)
    assert make_config(theorem) == theorem
    assert make_config(make_config(method=own_method), method="heteroavg").method == "heteroavg"
    with pytest.raises(ConfigError, match="unknown key 'scaled'"):
        make_config(make_config({"scaled": {"factor": 0.25}}, method=own_method), method="heteroavg")


def test_a_method_of_the_table_is_its_name() -> None:
    by_name, by_object = (make_config(method=method) for method in ("incoavg", METHODS["incoavg"]))
    assert by_name == by_object
    assert by_name.digest() == by_object.digest()


def test_parts_of_a_method_that_disagree() -> None:
    method = dataclasses.replace(METHODS["heterofl"], client=HeteroFL(mask=False))
    with pytest.raises(ConfigError, match=r"method: parts of heterofl have different \[heterofl\], expected the same"):
        make_config(method=method)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "allsmall", "largestonly"])
def test_inco_needs_one_server_model(name: str) -> None:
    """Whether it is added by name or in Python."""
    words = "expected one server model for all sizes, which this method does not have"
    for transform in (InCo(), DeepNoise()):
        with pytest.raises(ConfigError, match=words):
            METHODS[name].then(transform)
        with pytest.raises(ConfigError, match=words):
            make_config({"method": f"{name}+{transform.name}"})
        with pytest.raises(KeyError):
            METHODS[f"{name}+{transform.name}"]


@dataclasses.dataclass(frozen=True)
class Scale(Stateless):
    """A transform without a section in a config."""

    factor: float
    name: str = "scale"

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        return {key: self.factor * value for key, value in update.items()}, state, {"all": {"factor": self.factor}}


def test_a_run_is_not_resumed_with_another_method(tmp_path: Path) -> None:
    with Run(small(), tmp_path, model=Net, data=data(), method=METHODS["heteroavg"].then(Scale(0.5))) as run:
        next(iter(run))
    for factor in (0.1, 0.5):
        method = METHODS["heteroavg"].then(Scale(factor))
        again = Run(small(), tmp_path, model=Net, data=data(), method=method, resume=True, progress=False)
        if factor == 0.5:
            assert [row["round"] for row in again] == [2, 3]
        else:
            with pytest.raises(RunError, match="checkpoint of another config"):
                list(again)


def test_names_of_transforms(tmp_path: Path) -> None:
    """None hides another key of a row, nor a part of a checkpoint."""
    (row, *_) = incofl.run(small(), tmp_path, model=Net, data=data(), method="heteroavg", progress=False).history
    for name in (*row, "metrics", "accuracy_on_nodes", "a/b"):
        with pytest.raises(ConfigError, match=f"got a transform called '{name}', expected no key of metrics.jsonl"):
            METHODS["heteroavg"].then(Scale(0.5, name=name))


@pytest.mark.parametrize(("kind", "name"), [("data", "Data"), ("method", "Method"), ("task", "Task")])
def test_an_object_of_another_type(kind: str, name: str) -> None:
    objects: dict[str, Any] = {kind: (1, 2)}
    got = "a tuple" if kind == "data" else r"\(1, 2\)"
    with pytest.raises(ConfigError, match=rf"{kind}: got {got}, expected a name or an object of type {name}"):
        build(make_config(small(), **objects))


def data(**more: Any) -> Data:
    return Data(points(), points(60, 1), **more)


def test_a_module_keeps_its_weights_and_is_not_changed() -> None:
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    federation = build(make_config(small(), model=module, data=data()))
    assert all(torch.equal(federation.model.initial[name], before[name]) for name in before)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)


def test_an_identity_start_is_not_made_of_given_values_unless_it_is_asked_for() -> None:
    """They may be trained; a function that makes the module has none to lose."""
    module, config = Net(), {**small(), "method": "fedfloor"}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kept = build(make_config(config, model=module, data=data()))
    assert all(torch.equal(kept.model.initial[name], value) for name, value in before.items())
    assert "larger levels start with the values of the given module, not as the smallest: give a f" in kept.notes[-1]
    asked = build(make_config(config, ["split.start=identity"], model=module, data=data()))
    zeros = [name for name, value in asked.model.initial.items() if not torch.equal(value, before[name])]
    assert zeros
    assert not any(asked.model.initial[name].any() for name in zeros)
    made = build(make_config(config, model=Net, data=data()))
    assert not made.notes
    assert all(not made.model.initial[name].any() for name in zeros)


def test_a_module_with_its_own_layout() -> None:
    module = Net()
    layout = incofl.Layout.infer(module, torch.zeros(2, 6))
    assert build(make_config(small(), model=(module, layout), data=data())).model.layout == layout
    with pytest.raises(ConfigError, match="expected a module, or a pair of a module and its Layout"):
        make_config(small(), model=(module, "layout"), data=data())


def test_resuming_by_the_command_line_needs_the_script(tmp_path: Path, incofl: Shell) -> None:
    class Mine(Net):
        """Cannot be imported by its name."""

    with Run(small(), tmp_path, model=Mine, data=data(), progress=False) as run:
        next(iter(run))
    code, _, error = incofl("run", "--resume", "--out", str(tmp_path))
    assert code == 2
    assert "this run was made from an object in Python; resume it with the same script" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("form", ["list", "labels"])
def test_natural_clients(tmp_path: Path, form: str) -> None:
    names = [f"user {number % 5}" for number in range(120)]
    lists = [[at for at in range(120) if at % 5 == number] for number in range(5)]
    own = data(clients=names if form == "labels" else lists)
    config = make_config(small(data={}), model=Net, data=own)
    assert (config.data.partition, config.num_clients) == ("natural", 5)
    parts = sorted(sorted(part.tolist()) for part in build(config).partition)
    assert parts == lists
    fewer = build(make_config(small(data={"clients": 4}), model=Net, data=own)).partition
    assert len(fewer) == 4
    if form == "list":  # the first ones
        assert [part.tolist() for part in fewer] == lists[:4]
    assert incofl.run(config, tmp_path, progress=False)["status"] == "done"


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (["a"] * 7, "clients: got 7 labels, expected 120, one per training example"),
        ([[0, 1], [1, 2]], "clients: an example has two clients"),
        ([[0, 120]], "clients: an index is out of range, expected 0 to 119"),
        ("user", "clients: got 'user', expected a column of a Hugging Face dataset"),
    ],
)
def test_natural_clients_that_make_no_sense(clients: Any, words: str) -> None:
    with pytest.raises(DataError) as problem:
        data(clients=clients)
    assert words in str(problem.value)


class Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return torch.full((6,), float(at)), at % 3


def test_a_torch_dataset() -> None:
    own = Data(Pairs())
    assert own.train.x.shape == (40, 6)
    assert own.train.y.tolist() == [at % 3 for at in range(40)]
    assert (own.classes, len(own.test)) == (3, 0)


def test_a_hugging_face_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    x, y = points()
    table = {"x": x.tolist(), "label": y.tolist(), "user": [f"u{at % 4}" for at in range(len(y))]}
    train = datasets.Dataset.from_dict(table)
    own = Data(train, train.select(range(30)), clients="user")
    torch.testing.assert_close(own.train.x, x)
    assert torch.equal(own.train.y, y)
    assert own.natural_clients == 4
    assert incofl.run(small(data={}), tmp_path, model=Net, data=own, progress=False)["status"] == "done"
    both = datasets.Dataset.from_dict({"values": x.tolist(), "mask": torch.ones_like(x).tolist(), "label": y.tolist()})
    assert Data(both).train.x.keys() == {"values", "mask"}
    with pytest.raises(DataError, match="got the columns \\['x'\\], expected one of label"):
        Data(train.remove_columns(["label", "user"]))


def test_dict_inputs(tmp_path: Path) -> None:
    x, y = points()
    own = Data(({"values": x, "mask": torch.ones_like(x)}, y), ({"values": x, "mask": torch.zeros_like(x)}, y))
    for workers in (1, 2):
        result = incofl.run(
            small(engine={"workers": workers}), tmp_path / str(workers), model=TwoInputs, data=own, progress=False
        )
        assert result["status"] == "done"
    assert weights(tmp_path / "1") == weights(tmp_path / "2")


def test_regression_with_rmse(tmp_path: Path) -> None:
    """The error of a constant 0 on targets 3 and 4 is sqrt(12.5); parts of a test set give the same as the whole."""
    task = incofl.TASKS["regression"]
    output, target = torch.zeros(2, 1), torch.tensor([3.0, 4.0])
    whole = task.values(task.score(output, target))
    assert whole == pytest.approx({"rmse": math.sqrt(12.5), "mae": 3.5, "loss": 12.5})
    parts = task.score(output[:1], target[:1]) + task.score(output[1:], target[1:])
    assert task.values(parts) == pytest.approx(whole)
    x, _ = points()
    own = Data((x, x.sum(1)), (x, x.sum(1)))
    result = incofl.run(small(rounds=6), tmp_path, model=lambda: Net(outputs=1), data=own, task="regression")
    assert result["metric"] == "rmse"
    assert result.history[-1]["accuracy"] < result.history[0]["accuracy"]
    assert set(result.history[-1]["metrics"]) == {"mae"}
    assert result["accuracy_best"] == min(row["accuracy"] for row in result.history)
    assert make_config(small(), model=Net, data=own, task="regression").data.partition == "iid"


def test_multilabel(tmp_path: Path) -> None:
    """Of the labels (1, 0) and (1, 1) the logits find (1, 1) and (0, 1): 2 of 4 right, 2 found, 1 wrong, 1 missed."""
    task = incofl.TASKS["multilabel"]
    output, target = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    values = task.values(task.score(output, target))
    assert values["accuracy"] == 0.5
    assert values["f1"] == pytest.approx(4 / 6)
    x, _ = points()
    own = Data((x, (x[:, :3] > 0).float()), (x, (x[:, :3] > 0).float()))
    result = incofl.run(small(rounds=5), tmp_path, model=Net, data=own, task="multilabel", progress=False)
    assert result["accuracy"] > 0.55


def test_next_token_with_ignored_targets(tmp_path: Path) -> None:
    """Where targets are -100, logits change neither loss nor accuracy."""
    task = incofl.TASKS["next-token"]
    logits = torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[1, 2, -100, 3], [4, -100, -100, 5]])
    kept = target != -100
    values = task.values(task.score(logits, target))
    assert values["loss"] == pytest.approx(float(functional.cross_entropy(logits[kept], target[kept])), rel=1e-6)
    assert values["accuracy"] == float((logits[kept].argmax(1) == target[kept]).double().mean())
    tokens = torch.randint(11, (60, 5), generator=torch.Generator().manual_seed(0))
    own = Data((tokens[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100)), (tokens[:, :-1], tokens[:, 1:]))
    result = incofl.run(small(), tmp_path, model=LanguageModel, data=own, task="next-token", progress=False)
    assert result["status"] == "done"
    assert 0 <= result["accuracy"] <= 1


def test_segmentation(tmp_path: Path) -> None:
    """Classes 0 0 1 taken for 0 1 1: intersections 1 and 1, unions 2 and 2; a class that does not occur is left out."""
    task = incofl.TASKS["segmentation"]
    output = functional.one_hot(torch.tensor([[[0, 1, 1]]]), 3).permute(0, 3, 1, 2).float()
    values = task.values(task.score(output, torch.tensor([[[0, 0, 1]]])))
    assert values["accuracy"] == pytest.approx(2 / 3)
    assert values["iou"] == 0.5
    images = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    own = Data((images, (2.99 * images[:, 0]).long()), (images, (2.99 * images[:, 0]).long()))
    result = incofl.run(small(), tmp_path, model=Segmenter, data=own, task="segmentation", progress=False)
    assert result["status"] == "done"
    assert set(result.history[-1]["metrics"]) == {"iou"}


LOGITS = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
CASES = [  # outputs and targets, and where to cut them into parts that count 3 and 1 positions
    ("classification", LOGITS.view(8, 3)[:5], torch.tensor([2, 1, 0, -100, 1]), 3),
    ("next-token", LOGITS, torch.tensor([[1, 3, 2], [-100, 0, -100]]), 1),
    ("segmentation", LOGITS[:, :, None, :3], torch.tensor([[[1, 0, 2]], [[-100, 2, -100]]]), 1),
]


@pytest.mark.parametrize(("name", "output", "target", "at"), CASES)
def test_ignored_targets_count_nowhere(name: str, output: Tensor, target: Tensor, at: int) -> None:
    """Parts that count different numbers of positions give the same as the whole; a part without any adds nothing."""
    task, kept = incofl.TASKS[name], target != -100
    logits = (output if name == "next-token" else output.movedim(1, -1))[kept]
    whole = task.values(task.score(output, target))
    assert whole["loss"] == pytest.approx(float(functional.cross_entropy(logits, target[kept])), rel=1e-6)
    assert whole["accuracy"] == float((logits.argmax(1) == target[kept]).double().mean())
    nothing = task.score(output[:1], torch.full_like(target[:1], -100))
    parts = task.score(output[:at], target[:at]) + task.score(output[at:], target[at:]) + nothing
    assert task.values(parts) == pytest.approx(whole, rel=1e-5)
    assert task.count(target) == int(kept.sum()) < target.numel()


def test_iou_leaves_ignored_pixels_out() -> None:
    """Classes 0 0 1 taken for 0 1 1, as above, and a pixel that does not count, taken for 0."""
    task = incofl.TASKS["segmentation"]
    output = functional.one_hot(torch.tensor([[[0, 1, 1, 0]]]), 3).permute(0, 3, 1, 2).float()
    assert task.values(task.score(output, torch.tensor([[[0, 0, 1, -100]]])))["iou"] == 0.5


def test_regression_of_several_targets() -> None:
    """Errors 1 to 6 of three examples with two targets each: means over all six."""
    task, target = incofl.TASKS["regression"], torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    expected = {"rmse": math.sqrt(91 / 6), "mae": 3.5, "loss": 91 / 6}
    assert task.values(task.score(torch.zeros(3, 2), target)) == pytest.approx(expected)
    parts = task.score(torch.zeros(1, 2), target[:1]) + task.score(torch.zeros(2, 2), target[1:])
    assert task.values(parts) == pytest.approx(expected)


def test_a_batch_without_targets_and_a_rate_of_zero_are_part_of_a_run(tmp_path: Path) -> None:
    """The cosine reaches 0 after two rounds; half of the examples have no target."""
    x, y = points()
    own = Data((x, y.masked_fill(torch.arange(len(y)) < 60, -100)), points(60, 1), classes=3)
    local = SMALL["local"] | {"batch_size": 2, "schedule": "cosine", "decay_rounds": 2}  # type: ignore[operator]
    for method in ("heteroavg", "heteroscaffold"):
        config = small(rounds=4, local=local, method=method, data={"clients": 6, "partition": "iid"})
        with Run(config, tmp_path / method, model=Net, data=own, progress=False) as run:
            rows, before = [], run.server.shared
            for row in run:
                rows.append(row)
                moved = any(not torch.equal(run.server.shared[name], before[name]) for name in before)
                assert moved == (row["round"] <= 2)
                before = run.server.shared
        assert all(row["loss"] is not None and row["rejected"] == [] for row in rows)


def test_totals_of_a_metric_can_be_a_single_number() -> None:
    most = Task(functional.mse_loss, {"sum": Metric(lambda output, target: output.sum(), float)})
    score = sum((most.score(torch.full((2,), x), torch.zeros(2)) for x in (1.0, 2.0)), Score())
    assert most.values(score)["sum"] == 6.0
    np.testing.assert_equal((score + Score()).totals, score.totals)


def test_own_task_from_a_mean(tmp_path: Path) -> None:
    task = Task(functional.cross_entropy, {"error": lambda o, t: (o.argmax(1) != t).float().mean()})
    result = incofl.run(small(), tmp_path, model=Net, data=data(), task=task, progress=False)
    assert result["metric"] == "error"
    with Run(small(), tmp_path, model=Net, data=data(), task=task, resume=True, progress=False) as run:
        assert run.evaluate(1)["error"] == pytest.approx(result["accuracy_by_level"][1])
        with pytest.raises(ConfigError, match="level: got 7, expected 0 to 1"):
            run.evaluate(7)
        assert run.evaluate(data=points(9, 5))["error"] in [pytest.approx(wrong / 9) for wrong in range(10)]


@pytest.mark.parametrize("method", ["heterofl", "moon", "inclusivefl", "scalefl"])
def test_methods_that_need_classes_refuse_other_tasks(method: str) -> None:
    x, _ = points()
    images = Data((x.view(-1, 1, 2, 3).repeat(1, 1, 4, 3), x[:, 0]), classes=3)
    model = {"name": "resnet10", "width": 0.1}
    levels = {"levels": 2, "kind": "hetero"} if method in ("heterofl", "scalefl") else {"levels": 1}
    with pytest.raises(IncoflError) as problem:
        build(make_config(small(method=method, model=model, split=levels), data=images, task="regression"))
    assert "needs a task with classes" in str(problem.value)
    assert "the task is regression" in str(problem.value)


def test_names_from_a_config(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'method = "tests.own:method"\nrounds = 1\n[model]\nname = "tests.own:Net"\n[model.options]\nwidth = 8\n'
        '[data]\nname = "tests.own:data"\nclients = 4\n[split]\nlevels = 2\n[task]\nname = "tests.own:task"\n'
        '[local]\noptimizer = "torch.optim:RMSprop"\n[scaled]\nfactor = 0.25\n'
    )
    config = load_config(path)
    federation = build(config)
    scaled = build(load_config(path, ["server.lr=0.25", "noise.uploads=0.5"])).method
    assert (scaled.transforms, scaled.uploads) == ((ServerSchedule(lr=0.25),), (UploadNoise(uploads=0.5),))
    assert federation.model.layout.shapes["stem.weight"] == (8, 6)
    assert federation.method.client.factor == 0.25  # type: ignore[attr-defined]
    result = incofl.run(path, tmp_path / "run", progress=False)
    assert result["metric"] == "error"
    assert incofl.load_model(tmp_path / "run")(torch.zeros(1, 6)).shape == (1, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("method=tests.own:Net", "method: tests.own:Net is of type type, expected a Method"),
        ("method=tests.own:metod", "method: tests.own has no 'metod'; did you mean 'method'?"),
        ("task.name=tests.own:data", "task.name: tests.own:data is of type Data, expected a Task"),
        ("data.name=tests.own:points", "data.name: tests.own:points is of type tuple, expected Data"),
        ("data.name=tests.nowhere:data", "there is no module 'tests.nowhere'"),
        ("local.optimizer=lion", "local.optimizer: got 'lion', expected adam, adamw, sgd or package.module:attribute"),
        ("scaled.factor=2", "config: unknown key 'scaled'"),
        ("model.options.width=8", "model.options.width"),
    ],
)
def test_names_that_mean_nothing(settings: str, words: str) -> None:
    with pytest.raises(IncoflError) as problem:
        build(make_config({}, [settings]))
    assert words in str(problem.value)


@pytest.mark.slow
def test_an_own_method_in_a_comparison_with_two_jobs(tmp_path: Path, incofl: Shell) -> None:
    code, output, error = incofl(
        *("compare", "--methods", "heteroavg,tests.own:method", "--seeds", "0,1", "--jobs", "2", "--quiet"),
        *("--set", "model.name=tests.own:Net", "--set", "data.name=tests.own:data", "--set", "data.clients=4"),
        *("--set", "rounds=2", "--set", "split.levels=2", "--set", "local.epochs=1", "--out", str(tmp_path)),
    )
    assert (code, error) == (0, "")
    assert "tests.own:method" in output or "scaledavg" in output
    results = json.loads((tmp_path / "comparison.json").read_text())["results"]
    assert len(results) == 2
    assert len(results[1]["seeds"]) == 2


METHOD = METHODS["heteroavg"].then(ServerAdam(lr=0.05))


def test_a_run_left_in_the_middle_and_resumed_is_the_same(tmp_path: Path) -> None:
    """Bit for bit, with the moments of a server optimiser."""
    whole = incofl.run(small(), tmp_path / "whole", model=Net, data=data(), method=METHOD, progress=False)
    with Run(small(), tmp_path / "parts", model=Net, data=data(), method=METHOD, progress=False) as run:
        for row in run:
            assert row["round"] == 1
            break
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["status"] == "interrupted"
    run = Run(small(), tmp_path / "parts", model=Net, data=data(), method=METHOD, resume=True, progress=False)
    assert [row["round"] for row in run] == [2, 3]  # without a with statement, too
    assert run.result()["status"] == "done"
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    assert any(name.startswith("adam") for name in run.server.states)
    strip = [{k: v for k, v in row.items() if k != "seconds"} for row in whole.history]
    assert strip == [{k: v for k, v in row.items() if k != "seconds"} for row in run.rows]
    assert torch.equal(run.model().state_dict()["head.bias"], run.server.shared["head.bias"])


def frozen_net() -> Net:
    """A network whose stem and first block are not trained."""
    torch.manual_seed(0)
    net = Net()
    net.stem.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    return net


FROZEN = {"stem.weight", "stem.bias", *(f"blocks.0.{n}.{k}" for n in ("first", "second") for k in ("weight", "bias"))}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("method", ["heteroavg", "heteroscaffold", "heteromoon"])
def test_frozen_layers_are_neither_trained_nor_uploaded(tmp_path: Path, workers: int, method: str) -> None:
    check_frozen(tmp_path, method, {"workers": workers})


def check_frozen(tmp_path: Path, method: str, engine: dict[str, Any]) -> None:
    """Frozen layers keep their bits, and neither traffic nor plan counts them."""
    config = make_config(small(engine=engine, method=method), model=frozen_net, data=data())
    federation = build(config)
    layout = federation.model.layout
    assert layout.frozen == FROZEN
    with Run(config, tmp_path, progress=False) as run:
        rows = list(run)
        for name in layout.frozen:
            assert torch.equal(run.server.shared[name], federation.model.initial[name])
        assert not torch.equal(run.server.shared["head.bias"], federation.model.initial["head.bias"])
    copies = 2 if method == "heteroscaffold" else 1
    for row in rows:
        slices = [federation.slice(federation.level_of(client), 0) for client in row["clients"]]
        trained = [math.prod(s.shapes[n]) for s in slices for n in s.shapes if n in layout.parameters]
        assert row["bytes_up"] == row["bytes_down"] == 4 * copies * sum(trained)
    assert [cost.bytes_up for cost in federation.costs] == [
        4 * copies * sum(math.prod(shape) for n, shape in federation.slice(level, 0).shapes.items() if n not in FROZEN)
        for level in range(2)
    ]


def test_workers_freeze_what_the_server_has() -> None:
    """A resumed run builds its model without pretrained weights: these are in the checkpoint alone."""
    federation = build(make_config(small(), model=frozen_net, data=data()))
    server, jobs = federation.start(), federation.schedule(0, 2)
    server = dataclasses.replace(server, shared={name: value + 1 for name, value in server.shared.items()})
    executor = WorkerProcesses(federation, 1)
    try:
        made = [upload for group in executor.train(server, jobs) for upload in group if isinstance(upload, Upload)]
        losses = [upload.loss for group in InProcess(federation).train(server, jobs) for upload in group]
        assert [upload.loss for upload in made] == losses
    finally:
        executor.close()


def test_a_model_without_blocks_is_split_by_width() -> None:
    """If nothing is said about how."""
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    federation = build(make_config(small(split={}), model=model, data=data()))
    assert federation.splitter.shares == (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


def test_a_frozen_norm_keeps_its_statistics(tmp_path: Path) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.free = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
            self.norm.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.free(self.norm(x)))

    with Run(small(), tmp_path, model=Normed, data=data(), progress=False) as run:
        list(run)
        layout, shared = run.server.layout, run.server.shared
        assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= layout.frozen
        assert torch.equal(shared["norm.running_mean"], torch.zeros(6))
        assert "free.running_mean" in layout.buffers
        assert not torch.equal(shared["free.running_mean"], torch.zeros(6))


def test_the_default_folder_and_lines_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = incofl.run(small(), model=Net, data=data())
    assert result.folder.parent == Path("runs")
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"incoavg on .*: .*Net.* at width 1, .* splitting into 2 levels, 6 clients, .*, seed 0", lines[0]
    )
    assert [line.split("  ")[0] for line in lines[1:]] == ["round 1/3", "round 2/3", "round 3/3"]
    assert RunFolder(result.folder).summary.exists()


def test_public_names() -> None:
    for name in incofl.__all__:
        assert getattr(incofl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        incofl.nothing  # noqa: B018 (the access is what is tested)


def test_only_the_largest_take_part(tmp_path: Path) -> None:
    config = make_config(small(method="largestonly", cohort=6), model=Net, data=data())
    federation = build(config)
    others: Sequence[int] = [c for c in range(6) if federation.levels[c] < 1]
    assert federation.levels_in_use == [1]
    rows = incofl.run(config, tmp_path, progress=False).history
    assert all(row["clients"] == [c for c in range(6) if c not in others] for row in rows)
    same = build(dataclasses.replace(config, method="heteroavg"))
    assert all(torch.equal(a, b) for a, b in zip(same.partition, federation.partition, strict=True))
    with pytest.raises(ConfigError, match="no client can hold it"):
        build(make_config(small(method="largestonly", split={"levels": 2, "counts": [6, 0]}), model=Net, data=data()))


def test_everybody_small_trains_the_smallest_level_of_the_split_in_use() -> None:
    for kind in ("layer", "hetero"):
        config = make_config(small(method="allsmall", split={"levels": 2, "kind": kind}), model=Net, data=data())
        federation = build(config)
        assert federation.levels_in_use == [0]
        mixed = build(dataclasses.replace(config, method="heteroavg"))
        assert federation.slice(0, 0).shapes == mixed.slice(0, 0).shapes
