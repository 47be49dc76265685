"""Adapters on models of Hugging Face."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import incofl
from incofl.errors import ConfigError
from incofl.methods.adapters import adapters

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=12, num_labels=2, **sizes)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def gpt2() -> nn.Module:
    """Its layers are no ``nn.Linear``: in their weights the inputs come first."""
    config = transformers.GPT2Config(vocab_size=30, n_positions=12, n_embd=16, n_layer=2, n_head=2, num_labels=2)
    config.pad_token_id = 0
    model: nn.Module = transformers.GPT2ForSequenceClassification(config)
    return model


def layout(model: nn.Module, blocks: str, head: str) -> incofl.Layout:
    names = [f"{blocks}.{number}" for number in range(2)]
    return incofl.Layout.of(model, {head: (incofl.Axis("classes", 2, fixed=True), None)}, [names], {})


def texts(examples: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts of two classes that differ in their tokens."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (examples,), generator=rng)
    tokens = 2 + torch.randint(14, (examples, 8), generator=rng) + 14 * y[:, None]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, y


DATA = incofl.Data(texts(160, 0), texts(80, 1))
VALUES: dict[str, Any] = {
    "rounds": 3,
    "cohort": 3,
    "data": {"clients": 3, "partition": "iid"},
    "local": {"epochs": 2, "batch_size": 8, "lr": 0.01},
    "split": {"levels": [1, 2, 4]},
    "engine": {"workers": 1},
}


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("name", ["flexlora", "random-ranks"])
def test_a_classifier(kind: str, name: str, tmp_path: Path) -> None:
    """Learns, and peft loads what it has learned onto the model as it was."""
    torch.manual_seed(0)
    model, places = (
        (bert(), ("bert.encoder.layer", "classifier")) if kind == "bert" else (gpt2(), ("transformer.h", "score"))
    )
    pair = model, layout(model, *places)
    result = incofl.run(VALUES, tmp_path / "run", model=pair, data=DATA, method=name, progress=False)
    assert result["accuracy"] > 0.8
    found = incofl.Run(VALUES, tmp_path / "again", model=pair, data=DATA, method=name)
    with found:
        linear = 6 if kind == "bert" else 4
        assert len(adapters(found.server.layout)) == 2 * linear
        heads = {n for n in found.server.layout.parameters if ".lora_" not in n}
        assert {name.partition(".")[0] for name in heads} == {places[1]}
    incofl.export_adapter(tmp_path / "run", tmp_path / "adapter", 1, model=pair, data=DATA)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    inputs, _ = texts(5, 2)
    with torch.inference_mode():
        assert torch.allclose(loaded(**inputs).logits, result.model(1)(**inputs).logits, atol=1e-5)


def test_rules_that_change_such_weights_are_refused(tmp_path: Path) -> None:
    model = gpt2()
    pair = model, layout(model, "transformer.h", "score")
    with pytest.raises(ConfigError, match=r"cannot change 'transformer.h.0.attn.c_attn', whose weight has the inputs"):
        incofl.run(VALUES, tmp_path, model=pair, data=DATA, method="flora", progress=False)
