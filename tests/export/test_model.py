"""Exported models, read by the programs that they are made for."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import incofl as library
from incofl.errors import ConfigError, RunError
from incofl.export import formats
from incofl.export.folding import fold_batch_norms
from incofl.export.formats import Logits, trace
from incofl.export.model import export_model
from tests.federations import family_config, tiny_config
from tests.shell import Shell
from tests.texts import write_sst2

ResNet, ViT, LSTM, INFERRED = "tiny-resnet", "tiny-vit", "tiny-lstm", "tests.own_models:encoder"


def trained(model: str, tmp_path: Path) -> library.Result:
    if model == LSTM:
        write_sst2(tmp_path)
        texts = ["data.name=sst2", "data.length=12", f"data.root={tmp_path}", "data.clients=6"]
        config = tiny_config(f"model.name={model}", "rounds=2", *texts)
    else:
        config = family_config(model, tmp_path, "rounds=2")
    return library.run(config, tmp_path / "run", progress=False)


def some_inputs(model: str) -> Tensor:
    """A hundred inputs that no run has seen."""
    draw = torch.Generator().manual_seed(1)
    return torch.randint(20, (100, 12), generator=draw) if model == LSTM else torch.randn(100, 1, 8, 8, generator=draw)


@pytest.mark.slow
@pytest.mark.parametrize("model", [ResNet, ViT, LSTM, INFERRED])
def test_onnx_computes_what_ours_computes(model: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result, x = trained(model, tmp_path), some_inputs(model)
    made = export_model(tmp_path / "run", tmp_path / "out", (1,), ("onnx", "torch"))
    assert [each.file for each in made] == ["", "level-1.onnx", "level-1.pt2"]
    assert all(each.batches for each in made)
    assert all(each.folded > 0 for each in made if each.file) == (model == ResNet)
    expected = result.model(1)(x).detach()
    session = onnxruntime.InferenceSession(tmp_path / "out" / "level-1.onnx")
    (logits,) = session.run(["logits"], {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=0)
    program = torch.export.load(tmp_path / "out" / "level-1.pt2").module()
    torch.testing.assert_close(program(x[:7]), expected[:7], atol=1e-4, rtol=0)
    assert (result.model(0)(x) - expected).abs().max() > 1e-3  # the check could have failed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [ResNet, ViT, LSTM, INFERRED])
def test_executorch_computes_what_ours_computes(model: str, tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    from executorch.runtime import Runtime

    result, x = trained(model, tmp_path), some_inputs(model)
    export_model(tmp_path / "run", tmp_path / "out", (0,), ("executorch",))
    method = Runtime.get().load_program(tmp_path / "out" / "level-0.pte").load_method("forward")
    got = torch.cat([method.execute([one])[0].clone() for one in x[:, None]])
    torch.testing.assert_close(got, result.model(0)(x).detach(), atol=1e-4, rtol=0)


def test_the_command(incofl: Shell, tmp_path: Path) -> None:
    result = trained("tiny-mlp", tmp_path)
    command = ("export", tmp_path / "run", "-o", tmp_path / "out")
    code, out, err = incofl(*command, "--level", "all", "--format", "safetensors")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines() if "safetensors" in line] == [
        [str(level), "safetensors", f"level-{level}.safetensors"] for level in range(3)
    ]
    state, ours = load_file(tmp_path / "out" / "level-1.safetensors"), result.model(1).state_dict()
    assert state.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in state.items())
    page = (tmp_path / "out" / "README.md").read_text()
    assert "# tiny-mlp, trained by incoavg on digits" in page
    assert "float32 (N, 1, 8, 8), made from stored examples: `examples / 16`, then `(x - mean) / std`" in page
    assert 'safetensors.torch.load_file("level-2.safetensors")' in page
    assert "on 100 examples of the data set" in page
    assert incofl(*command, "--format", "onxx")[::2] == (2, "incofl: format: got 'onxx'; did you mean 'onnx'?\n")
    assert "--level: got 'x', expected whole numbers such as 0,2, or all" in incofl(*command, "--level", "x")[2]
    assert "level: got 3, expected 0 to 2, or -1 for the largest" in incofl(*command, "--level", "3")[2]
    assert "exit: got 0, expected none: the model has no early exits" in incofl(*command, "--exit", "0")[2]
    assert "holds no checkpoint" in incofl("export", tmp_path)[2]
    assert incofl(*command, "--level", "0")[0] == 0  # once more into the same folder
    assert library.export_model(tmp_path / "run", tmp_path / "one", levels=0, formats="safetensors")[-1].level == 0
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("mine")
    for folder, words in {
        "project": "README.md: is not of an export of this run; choose another folder with --out",
        "run": "run: is the folder of a run, expected one for the export",
        "run/config.toml": "config.toml: is a file, expected a folder for the export",
    }.items():
        code, _, err = incofl("export", tmp_path / "run", "-o", tmp_path / folder)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err
    assert (tmp_path / "project" / "README.md").read_text() == "mine"


@pytest.mark.slow
def test_early_exits_leave_too(tmp_path: Path) -> None:
    config = tiny_config("method=depthfl", "rounds=1", "model.name=tiny-mlp")
    result = library.run(config, tmp_path / "run", progress=False)
    export_model(tmp_path / "run", tmp_path / "out", formats=("torch",), exit=0)
    x, program = torch.randn(5, 1, 8, 8), torch.export.load(tmp_path / "out" / "level-2-exit-0.pt2").module()
    torch.testing.assert_close(program(x), result.model(exit=0)(x), atol=1e-5, rtol=0)
    assert not torch.allclose(program(x), result.model()(x), atol=1e-3)


def test_without_its_data_a_model_is_checked_on_drawn_inputs(tmp_path: Path) -> None:
    trained(LSTM, tmp_path)
    shutil.rmtree(tmp_path / "sst2")
    export_model(tmp_path / "run", tmp_path / "out")
    assert "on 100 random tokens, for the data set was not found" in (tmp_path / "out" / "README.md").read_text()


def test_a_file_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trained("tiny-mlp", tmp_path)
    state = result.model(2).state_dict()
    state["head.bias"] = state["head.bias"] + 1e-3
    monkeypatch.setattr(formats, "load_file", lambda path: state)
    with pytest.raises(RunError, match=r"its logits differ from ours by up to 1\.0e-03, expected at most 0\.0001"):
        export_model(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / "level-2.safetensors").exists()
    with pytest.raises(ConfigError, match="format: got 'pickle'"):
        export_model(tmp_path / "run", tmp_path / "out", formats=("pickle",))


class Norms(nn.Module):
    """A norm that can be folded, one whose input has another reader, and one without scale after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm_1 = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.second, self.norm_2 = nn.Conv2d(4, 4, 3, padding="same"), nn.BatchNorm2d(4)
        self.head, self.norm_3 = nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm_1(self.first(x)).relu())
        out: Tensor = self.norm_3(self.head((x + self.norm_2(x)).mean((2, 3))))
        return out


def test_norms_are_folded_where_nobody_else_reads_the_layer(double: None) -> None:
    model = Norms()
    for _ in range(3):
        model(torch.randn(8, 1, 8, 8))  # statistics other than 0 and 1
    model, x = model.eval(), torch.randn(5, 1, 8, 8)
    folded = Logits(copy.deepcopy(model)).eval()
    assert fold_batch_norms(folded, trace(folded, x)) == 2
    kinds = [type(folded.model.get_submodule(f"norm_{number}")) for number in (1, 2, 3)]
    assert kinds == [nn.Identity, nn.BatchNorm2d, nn.Identity]
    torch.testing.assert_close(folded(x), model(x), atol=1e-12, rtol=0)


class CountsItsBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) + torch.zeros(len(range(x.shape[0])), 1)


def test_a_model_that_counts_its_batch_is_exported_for_one_example() -> None:
    x = torch.randn(5, 2, 3)
    program = trace(Logits(CountsItsBatch()).eval(), x)
    assert not formats.any_batch(program, x)
    assert torch.equal(program.module()(x[:1]), x[:1].flatten(1))
