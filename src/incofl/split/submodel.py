"""The module a client trains: the server's module with blocks left out and tensors cut to its slice.

Nothing here knows an architecture: a model that has a Layout can be split.
"""

import copy

import torch
from torch import nn

from incofl.layout import Layout
from incofl.split.slice import Slice


def submodel(template: nn.Module, layout: Layout, piece: Slice) -> nn.Module:
    """A module of the slice's shape, with undefined values; load a state of the slice before using it.

    The template may live on the meta device, where it costs nothing.
    """
    model = copy.deepcopy(template)
    held = {layout.block_of[name] for name in piece.index}
    for block in (*layout.blocks, *layout.exits):
        if block not in held:
            parent, _, child = block.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())  # keeps the names of the blocks around it
    for prefix, module in model.named_modules():
        _shrink(module, prefix + "." if prefix else "", piece)
    return model


def _shrink(module: nn.Module, prefix: str, piece: Slice) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(torch.empty(piece.shapes[prefix + name], dtype=parameter.dtype)))
    for name, buffer in list(module.named_buffers(recurse=False)):
        module.register_buffer(name, torch.zeros(piece.shapes.get(prefix + name, buffer.shape), dtype=buffer.dtype))
    # The sizes that modules remember besides their tensors; only LayerNorm computes with them.
    match module:
        case nn.Conv2d():
            module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            module.num_features = module.weight.shape[0]
        case nn.LayerNorm():
            module.normalized_shape = tuple(module.weight.shape)
