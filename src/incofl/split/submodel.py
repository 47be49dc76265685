"""The module that a client trains: the server's module with blocks left out and tensors cut to its slice."""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.split.slices import Slice

# Sizes that modules keep beside their tensors and compute with, by tensor and dimension.
SIZES = {
    ("weight", 0): ("out_features", "num_embeddings", "num_features", "num_channels"),
    ("weight", 1): ("in_features", "embedding_dim", "nf"),
    ("running_mean", 0): ("num_features",),
    ("weight_ih_l0", 1): ("input_size",),
    ("weight_hh_l0", 1): ("hidden_size",),
}


class Skip(nn.Identity):
    """Takes the place of a block that was left out: returns its first input, where the block does in a tuple.

    The other elements of the tuple are arguments that the block passes on, by position or name, or ``None``. The
    block's attributes are kept, for a model may ask for them.
    """

    def __init__(self, block: nn.Module, results: tuple[int | str | None, ...] = ()) -> None:
        super().__init__()
        vars(self).update({key: value for key, value in vars(block).items() if key[0] != "_" and key != "forward"})
        self.results = results

    def forward(self, *inputs: Any, **options: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(inputs)), **options}
        if not self.results:
            return next(iter(given.values()))
        return tuple(given.get(place) for place in self.results)


def list_tied_once(module: nn.Module, tied: Mapping[str, str]) -> None:
    """Leaves one name of each tied tensor in the module's state dict, now and in its copies."""
    if tied:
        module.register_state_dict_post_hook(partial(_leave_out, tied))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(partial(_add, tied))  # type: ignore[no-untyped-call]


def _leave_out(tied: Mapping[str, str], module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
    for name in tied:
        state.pop(name, None)


def _add(tied: Mapping[str, str], module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
    state.update({name: state[first] for name, first in tied.items() if first in state})


def submodel(template: nn.Module, layout: Layout, slice_: Slice) -> nn.Module:
    """A module of the slice's shape, with undefined values; load a state of the slice before using it.

    The template may live on the meta device, where it costs nothing. Buffers that are no part of its state, such as
    fixed position encodings, are kept as they are.
    """
    model = copy.deepcopy(template)
    held = {layout.block_of[name] for name in slice_.index}
    leave_out(model, layout, [block for block in (*layout.blocks, *layout.exits) if block not in held])
    for prefix, module in model.named_modules():
        _shrink(module, prefix + "." if prefix else "", slice_)
    for name, first in layout.tied.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, attrgetter(first)(model))
    return model


def leave_out(model: nn.Module, layout: Layout, blocks: Iterable[str]) -> None:
    """Puts an identity in the place of some blocks or exits, which keeps the names of those around them."""
    for block in blocks:
        model.set_submodule(block, Skip(model.get_submodule(block), layout.results.get(block, ())))


def end_at(model: nn.Module, layout: Layout, slice_: Slice, exit: int) -> nn.Module:
    """A model with early exits, changed in place to end at one of those that its slice has."""
    held = {layout.block_of[name] for name in slice_.index}
    positions = sorted({position for head, position in layout.exits.items() if head in held})
    if not -len(positions) <= exit < len(positions):
        known = f"0 to {len(positions) - 1}, or -1 for the last" if positions else "none: the model has no early exits"
        raise ConfigError(f"exit: got {exit}, expected {known}")
    later = [head for head, position in layout.exits.items() if head in held and position > positions[exit]]
    leave_out(model, layout, [*(block for block in layout.blocks[positions[exit] :] if block in held), *later])
    vars(model)["answer"] = "last"  # and not the mean of all that it holds
    return model


def _shrink(module: nn.Module, prefix: str, slice_: Slice) -> None:
    for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if (shape := slice_.shapes.get(prefix + name)) is None:
            continue
        # By assignment: recurrent layers keep a list of their weights, which follows it.
        if isinstance(value, nn.Parameter):
            setattr(module, name, nn.Parameter(torch.empty(shape, dtype=value.dtype), value.requires_grad))
        else:
            setattr(module, name, torch.zeros(shape, dtype=value.dtype))
        for dim, length in enumerate(shape):
            for size in SIZES.get((name, dim), ()):
                if getattr(module, size, None) == value.shape[dim]:
                    setattr(module, size, length)
    match module:
        case nn.modules.conv._ConvTransposeNd():
            module.in_channels, module.out_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        case nn.modules.conv._ConvNd():
            if module.groups == module.in_channels > 1:  # a filter per channel
                module.groups = module.weight.shape[0] * module.in_channels // module.out_channels
            module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        case nn.LayerNorm() | nn.RMSNorm() if module.elementwise_affine:
            module.normalized_shape = tuple(module.weight.shape)
