"""Adapters that peft loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import incofl
from incofl.engine.build import build_data, build_model
from incofl.errors import RunError
from incofl.models import ModelOptions, build_module
from tests.federations import tiny_config
from tests.shell import Shell

peft = pytest.importorskip("peft")
SMALL = ("rounds=2", "model.name=tiny-mlp", "split.levels=[2, 4, 8]", "data.clients=6", "local.lr=0.01")


def base(config: incofl.Config) -> Any:
    """The model before the first round, without adapters."""
    model = build_model(config)
    options = ModelOptions(shape=(1, 8, 8), classes=10, width=config.model.width or 1.0)
    module, _ = build_module(config.model.name, options)
    module.load_state_dict({n.replace(".base_layer", ""): v for n, v in model.initial.items() if ".lora_" not in n})
    return module


@pytest.mark.parametrize("name", ["covered", "flexlora", "random-ranks", "flora", "fedex"])
def test_peft_computes_what_the_level_computes(name: str, tmp_path: Path) -> None:
    config = tiny_config(f"method={name}", *SMALL)
    result = incofl.run(config, tmp_path / "run", progress=False)
    x = build_data(config).test.x[:20]
    x = x.float() / x.max()
    for level, rank in enumerate((2, 4, 8)):
        ranks = incofl.export_adapter(tmp_path / "run", tmp_path / "adapter", level)
        if name not in ("flora", "fedex"):
            assert set(ranks.values()) == {8 if name == "random-ranks" else rank}
            said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
            assert said["lora_alpha"] / said["r"] == 2
        loaded = peft.PeftModel.from_pretrained(base(config), tmp_path / "adapter").eval()
        with torch.inference_mode():
            expected = result.model(level)(x)
            assert torch.allclose(loaded(x), expected, atol=1e-5)
            assert not torch.allclose(base(config).eval()(x), expected, atol=1e-2)


def test_command(incofl: Shell, tmp_path: Path) -> None:
    import incofl as library

    library.run(tiny_config("method=hetlora", *SMALL), tmp_path / "run", progress=False)
    code, out, err = incofl("export-adapter", tmp_path / "run", "--level", "1", "-o", tmp_path / "adapter")
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'adapter'}: adapters of rank 4 on 12 layers, ")
    library.run(tiny_config("method=heteroavg", "rounds=1", "model.name=tiny-mlp"), tmp_path / "other", progress=False)
    code, _, err = incofl("export-adapter", tmp_path / "other", "-o", tmp_path / "adapter")
    assert (code, err) == (2, f"incofl: {tmp_path / 'other'}: heteroavg trains no adapters\n")
    assert incofl("export-adapter", tmp_path)[0] == 2


def test_levels_without_blocks_are_refused(tmp_path: Path) -> None:
    incofl.run(tiny_config("method=covered", *SMALL, "split.depth=[2, 4, 6]"), tmp_path / "run", progress=False)
    with pytest.raises(RunError, match=r"level 0 leaves out blocks .* choose a level that has them all"):
        incofl.export_adapter(tmp_path / "run", tmp_path / "adapter", 0)
    incofl.export_adapter(tmp_path / "run", tmp_path / "adapter", 2)
