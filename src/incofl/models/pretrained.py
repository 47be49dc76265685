"""Initial weights from a safetensors file, a run folder or the Hugging Face Hub: adapted, or refused in one line.

A run folder gives what its largest level ended with; a file has the names of timm (ViTs) or torchvision (ResNets), or
those of ``incofl.load_model(RUN).state_dict()``. What may differ from the model:

1. The head: with another number of classes, or none, the model keeps its own, freshly initialised; so with exits.
2. The positions of a ViT: those of the patches are interpolated to the model's grid, that of the class token is kept.
3. Colour: a model of grey images gets the sum of the three colours' filters, so grey means the same as before.
4. Depth: of a deeper model the first blocks of each stage are taken, as in the paper.
5. Adapters (LoRA): they start as they do, around the weights of the file.
"""

import dataclasses
import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.models.model import Model, first_line
from incofl.models.vit import VisionTransformer
from incofl.split import RANK
from incofl.tensors import Tensors, all_finite, clone

CHECKPOINT = Path("checkpoint", "state.safetensors")  # of a run folder
FILE = "model.safetensors"  # timm's name for it on the Hub
EXAMPLE = "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"
CONVERT = f"safetensors.torch.save_file(torch.load(FILE, weights_only=True), '{FILE}')"
PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".pkl")
COLOURS = 3


def with_pretrained(model: Model, where: str) -> Model:
    """The model with the initial weights of a file, a run folder, or a repository of the Hub such as ``timm/name``."""
    found, initial = _read(where), dict(model.initial)
    found = {_name_here(name, model): value for name, value in found.items()}
    for name, fresh in model.initial.items():
        if not _stays_fresh(name, found, model):
            if name not in found:
                raise _refused(f"{where} lacks {name!r}; does it hold a smaller or another model?")
            initial[name] = _fitted(name, found[name], model, where).to(fresh.dtype)
    for name in found:
        if name not in initial and name not in model.layout.tied and not _in_deeper_block(name, model.layout):
            raise _refused(f"{where} holds {name!r}, which the model lacks; is it another model?")
    if not all_finite(initial):
        raise _refused(f"{where} holds values that are not finite")
    return dataclasses.replace(model, initial=clone(initial))


def _refused(problem: str) -> ConfigError:
    return ConfigError(f"model.pretrained: {problem}")


def _read(where: str) -> Tensors:
    """The tensors of a safetensors file; a repository of the Hub is downloaded unless it is in the cache."""
    path = Path(where).expanduser()
    if (path / CHECKPOINT).is_file():
        return _largest_level(load_file(path / CHECKPOINT))
    if path.suffix in PICKLED:
        why = f"pickled files can run code; convert it with {CONVERT}"
        raise _refused(f"got {where!r}, expected a .safetensors file: {why}")
    if path.suffix != ".safetensors" and not path.is_file():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", where):
            want = f"a .safetensors file or a name on the Hub such as {EXAMPLE}, or a run folder"
            raise _refused(f"got {where!r}, expected {want} with a finished round")
        path = _download(where)
    if not path.is_file():
        raise _refused(f"{path}: no such file")
    try:
        return load_file(path)
    except SafetensorError as problem:
        raise _refused(f"{path}: not a safetensors file ({problem})") from None


def _largest_level(state: Tensors) -> Tensors:
    """The model of the largest level of a checkpoint: what all levels share, and what is its own."""
    parts = {name: name.split("/", 2) for name in state}
    largest = max((int(part[1]) for part in parts.values() if part[0] == "private"), default=0)
    shared = {part[-1]: state[name] for name, part in parts.items() if part[0] == "shared"}
    return shared | {part[-1]: state[name] for name, part in parts.items() if part[:2] == ["private", str(largest)]}


def _download(name: str) -> Path:
    by_hand = f"; or download {FILE} from huggingface.co/{name} elsewhere and set model.pretrained to that file"
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise _refused(f"{name!r} is on the Hub, which needs: pip install 'incofl[hub]'{by_hand}") from None
    try:
        return Path(hf_hub_download(name, FILE))
    except Exception as problem:  # of the network, the server, the name or the disk: many types
        raise _refused(f"cannot get {name!r} from the Hub ({first_line(problem)}){by_hand}") from None


def _name_here(name: str, model: Model) -> str:
    """The name of an entry of a file in the model, where a layer may have an adapter around it."""
    layer, _, entry = name.rpartition(".")
    inside = f"{layer}.base_layer.{entry}"
    return inside if inside in model.initial else name


def _stays_fresh(name: str, found: Tensors, model: Model) -> bool:
    """Whether an entry keeps its initial value: it has other classes, or a file may lack it and does."""
    layout, fresh = model.layout, model.initial[name]
    axes = {axis.name for axis in layout.axes[name] if axis is not None}
    per_class = "classes" in axes
    if name in found:
        return per_class and found[name].shape[:1] != fresh.shape[:1]
    counter = not fresh.is_floating_point()  # of a batch norm; older files have none
    return per_class or counter or layout.block_of[name] in layout.exits or RANK in axes


def _fitted(name: str, value: Tensor, model: Model, where: str) -> Tensor:
    """An entry of the file in the shape that the model needs."""
    shape = model.initial[name].shape
    if name == "pos_embed" and isinstance(model.template, VisionTransformer) and value.dim() == 3:
        value = resize_positions(value, model.template.grid)
    if value.dim() == 4 and value.shape[1] == COLOURS and shape[1] == 1:
        value = value.sum(1, keepdim=True)
    if value.shape != shape:
        sizes = f"{name!r} has shape {tuple(value.shape)}, the model's {tuple(shape)}"
        raise _refused(f"{where}: {sizes}; set the model's sizes (section model) to those of the file")
    return value


def resize_positions(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Positions (1, 1 + patches, dim) for another grid of patches; the first, the class token's, is kept."""
    side = math.isqrt(positions.shape[1] - 1)
    if (side, side) == grid or side**2 != positions.shape[1] - 1:
        return positions
    of_class, of_patches = positions[:, :1].float(), positions[:, 1:].float()
    image = of_patches.transpose(1, 2).reshape(1, -1, side, side)
    image = functional.interpolate(image, size=grid, mode="bicubic", align_corners=False, antialias=True)
    return torch.cat([of_class, image.flatten(2).transpose(1, 2)], dim=1)


def _in_deeper_block(name: str, layout: Layout) -> bool:
    """Whether an entry belongs to a block that a stage does not have: ``blocks.9.norm1.weight`` in a model of eight."""
    siblings = [re.escape(stage[0].rpartition(".")[0]) for stage in layout.stages]
    found = [re.match(rf"({parent}\.\d+)\.", name) for parent in siblings]
    return any(block is not None and block[1] not in layout.blocks for block in found)
