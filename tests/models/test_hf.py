"""Models of transformers by name: from a folder, with random weights, and what is said when there are none."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import incofl
from incofl.errors import ConfigError
from incofl.models import Model, ModelOptions, make_model

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
IMAGES = SIZES | {"patch_size": 4, "image_size": 8, "num_channels": 1}
DIGITS = ModelOptions(shape=(1, 8, 8))
TEXTS = ModelOptions(shape=(7,), classes=2, vocabulary=30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny ViT of three classes, as its authors would publish it."""
    config = transformers.AutoConfig.for_model("vit", **IMAGES, num_labels=3)
    transformers.AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def made(kind: str, data: ModelOptions, **changes: Any) -> Model:
    return make_model(f"hf:AutoModelFor{kind}", replace(data, **changes))


def test_weights_of_a_folder_with_a_head_for_other_classes(folder: Path) -> None:
    model = made("ImageClassification", DIGITS, pretrained=str(folder))
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder).state_dict()
    assert model.layout.depth == (3,)
    assert model.initial["classifier.weight"].shape == (10, 16)
    same = {name for name, value in model.initial.items() if torch.equal(value, theirs[name])}
    assert model.initial.keys() - same <= {"classifier.weight", "classifier.bias"}


def test_a_run_from_a_folder(folder: Path, tmp_path: Path) -> None:
    config = {
        "rounds": 1,
        "cohort": 2,
        "data": {"clients": 3, "limit": 60},
        "model": {"name": "hf:AutoModelForImageClassification", "pretrained": str(folder)},
        "local": {"epochs": 1},
    }
    result = incofl.run(config, tmp_path / "run", progress=False)
    assert len(result.history) == 1
    assert incofl.load_model(tmp_path / "run")(torch.rand(2, 1, 8, 8)).logits.shape == (2, 10)


@pytest.mark.parametrize("method", ["heteroavg+anchor", "fedfloor"])
def test_a_smallest_path_in_a_model_of_transformers(method: str, folder: Path, tmp_path: Path) -> None:
    """Its outputs are objects that hold logits; with ``share = 0`` the smallest level is that of ``allsmall``."""
    model = {"name": "hf:AutoModelForImageClassification", "pretrained": str(folder)}
    ends = {}
    for name in (method, "allsmall"):
        config = {"method": name, "rounds": 1, "cohort": 4, "data": {"clients": 10, "limit": 100}, "model": model}
        if name == "heteroavg+anchor":  # the logits are compared, too, but to no effect that can be seen
            config["anchor"] = {"share": 0, "distil": 1e-9}
        ends[name] = incofl.run(config, tmp_path / name, progress=False).model(0).state_dict()
    for entry, value in ends[method].items():
        torch.testing.assert_close(value, ends["allsmall"][entry], rtol=1e-3, atol=1e-4)


def test_code_that_lies_beside_the_weights_is_never_run(folder: Path, tmp_path: Path) -> None:
    """Neither because an option asks for it, nor because the folder does."""
    shutil.copytree(folder, tmp_path / "theirs")
    (tmp_path / "theirs" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    written = json.loads((folder / "config.json").read_text())
    name = "AutoModelForImageClassification"
    changed = written | {"auto_map": {"AutoConfig": "own.Config", name: "own.Model"}, "attn_implementation": "a/kernel"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(changed))
    made("ImageClassification", DIGITS, pretrained=str(tmp_path / "theirs"))
    for option in ("trust_remote_code", "auto_map", "cache_dir", "num_labls"):
        with pytest.raises(ConfigError, match=rf"model.options: got '{option}', expected an option of "):
            made("ImageClassification", DIGITS, pretrained=str(tmp_path / "theirs"), options={option: True})
    assert not (tmp_path / "ran").exists()


def test_options_of_pretrained_models_are_those_of_their_config(folder: Path) -> None:
    model = made("ImageClassification", DIGITS, pretrained=str(folder), options={"layer_norm_eps": 0.5})
    assert any(getattr(layer, "eps", None) == 0.5 for layer in model.template.modules())
    named_otherwise = {"num_labels": 10, "torch_dtype": "float32", "attn_implementation": "eager"}
    eager: Any = made("ImageClassification", DIGITS, pretrained=str(folder), options=named_otherwise).template
    assert eager.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match=r"model.options: got 'attn_implementation'"):
        made("ImageClassification", DIGITS, pretrained=str(folder), options={"attn_implementation": "their/kernel"})


def test_random_weights_of_an_architecture() -> None:
    model = made("SequenceClassification", TEXTS, options={"model_type": "bert", **SIZES})
    assert model.initial["bert.embeddings.word_embeddings.weight"].shape == (30, 16)
    assert model.layout.depth == (3,)
    tokens = made(
        "CausalLM", ModelOptions(shape=(7,), classes=30, vocabulary=30, sequence=True),
        options={"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2},
    )  # fmt: skip
    assert tokens.layout.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in tokens.initial


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        ("ImageClasification", {}, "expected a class such as hf:AutoModelForSequenceClassification; did you mean"),
        ("ImageClassification", {}, "model.pretrained: got none, expected a folder or a name on the Hub, or model.opt"),
        ("ImageClassification", {"pretrained": "./nowhere"}, "model.pretrained: ./nowhere: no such folder"),
        ("ImageClassification", {"options": {"model_type": "vitt"}}, "model.options: 'vitt' cannot be made: "),
        (
            "ImageClassification",
            {"pretrained": "some/model"},
            r"cannot get 'some/model' from the Hub \(no network\); or ",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    kind: str, changes: Any, line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fails)
    with pytest.raises(ConfigError, match=line) as caught:
        made(kind, DIGITS, **changes)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_model_that_knows_fewer_tokens_than_the_data(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("bert", **SIZES, vocab_size=20)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="knows 20 tokens, expected at least the 30 of the data"):
        made("SequenceClassification", TEXTS, pretrained=str(tmp_path))
