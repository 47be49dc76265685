"""The adapters of a trained level as a folder that peft loads onto the model that they were trained on."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from incofl.engine.files import atomic_write
from incofl.engine.finished import open_run
from incofl.errors import ConfigError, RunError
from incofl.methods.adapters import A, B, adapters
from incofl.models.pretrained import with_pretrained
from incofl.tensors import Tensors

PREFIX = "base_model.model."  # of every name in peft's files


def export_adapter(folder: str | Path, out: str | Path, level: int = -1, **objects: Any) -> dict[str, int]:
    """Writes what a level has learned for ``peft.PeftModel.from_pretrained``; returns the rank of each adapted layer.

    ``level`` and ``objects`` are as in ``load_model``. Where the run has changed the adapted weights, too (FLoRA), the
    whole difference is written, with as many ranks as it has.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError("export-adapter: needs peft: pip install 'incofl[lora]'") from None
    config, federation, server = open_run(folder, level, **objects)
    layout, module = federation.model.layout, federation.module(server, level)
    layer_of: Any = module.get_submodule
    if not (known := adapters(layout)):
        raise RunError(f"{folder}: {config.method} trains no adapters")
    if missing := layout.axes.keys() - module.state_dict().keys():
        what = f"level {federation.level_number(level)} leaves out blocks ({min(missing)}), which no adapter can"
        raise RunError(f"{folder}: {what}; choose a level that has them all")
    state, model = module.state_dict(), federation.model
    if layout.given and config.model.pretrained is not None:
        model = with_pretrained(model, config.model.pretrained)
    tensors, ranks, alphas = Tensors(), dict[str, int](), dict[str, Any]()  # alpha may be a fraction
    for adapter in known:
        layer = adapter.a.removesuffix(A)
        scale: Any = layer_of(layer).scaling["default"]
        a, b = state[adapter.a], state[adapter.b]
        if layout.given:
            moved = (state[adapter.base] - model.initial[adapter.base]).flatten(1)
            a, b = _factors(moved + scale * b.flatten(1) @ a.flatten(1), a, b)
            scale = 1.0
        ranks[layer], alphas[layer] = len(a), scale * len(a)
        tensors |= {f"{PREFIX}{layer}.lora_A.weight": a, f"{PREFIX}{layer}.lora_B.weight": b}
    whole = {name.rpartition(".")[0] for name in layout.parameters if not name.endswith((A, B))}
    tensors |= {PREFIX + name: value for name, value in state.items() if name.rpartition(".")[0] in whole}
    largest = max(ranks, key=lambda layer: ranks[layer])
    saved = LoraConfig(
        r=ranks[largest],
        lora_alpha=alphas[largest],
        rank_pattern={layer: rank for layer, rank in ranks.items() if rank != ranks[largest]},
        alpha_pattern={layer: alphas[layer] for layer, rank in ranks.items() if rank != ranks[largest]},
        target_modules=sorted(ranks),
        modules_to_save=sorted(whole) or None,
        fan_in_fan_out=any(getattr(layer_of(layer), "fan_in_fan_out", False) for layer in ranks),
        base_model_name_or_path=config.model.pretrained,
        inference_mode=True,
    )
    saved.save_pretrained(str(out))
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    atomic_write(Path(out) / "adapter_model.safetensors", save(contiguous, {"format": "pt"}))
    return ranks


def _factors(change: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """V' and U S of a change of a weight, in the shapes of its factors."""
    u, s, v = torch.linalg.svd(change.double(), full_matrices=False)
    rank = max(1, int((s > s.max() * torch.finfo(change.dtype).eps).sum()))
    made = v[:rank].reshape(rank, *a.shape[1:]), (u * s)[:, :rank].reshape(len(b), rank, *b.shape[2:])
    return made[0].to(a.dtype).contiguous(), made[1].to(b.dtype).contiguous()
