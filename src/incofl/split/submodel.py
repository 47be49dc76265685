"""The module that a client trains: the server's module with blocks left out and tensors cut to its slice.

Nothing here knows an architecture: any model with a Layout can be split.
"""

import copy

import torch
from torch import Tensor, nn

from incofl.layout import Layout
from incofl.split.slice import Slice


class Skip(nn.Identity):
    """Takes the place of a block that was left out: returns its first input and ignores the others."""

    def forward(self, input: Tensor, *others: object, **options: object) -> Tensor:
        """Returns the input."""
        return input


def submodel(template: nn.Module, layout: Layout, slice_: Slice) -> nn.Module:
    """A module of the slice's shape, with undefined values; load a state of the slice before using it.

    The template may live on the meta device, where it costs nothing. Buffers that are no part of its state, such as
    fixed position encodings, are kept as they are.
    """
    model = copy.deepcopy(template)
    held = {layout.block_of[name] for name in slice_.index}
    for block in (*layout.blocks, *layout.exits):
        if block not in held:
            parent, _, child = block.rpartition(".")
            setattr(model.get_submodule(parent), child, Skip())  # keeps the names of the blocks around it
    for prefix, module in model.named_modules():
        _shrink(module, prefix + "." if prefix else "", slice_)
    return model


def _shrink(module: nn.Module, prefix: str, slice_: Slice) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        # By assignment: recurrent layers keep a list of their weights, which follows it.
        empty = torch.empty(slice_.shapes[prefix + name], dtype=parameter.dtype)
        setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if prefix + name in slice_.shapes:
            module.register_buffer(name, torch.zeros(slice_.shapes[prefix + name], dtype=buffer.dtype))
    # Some modules compute with the sizes that they keep beside their tensors.
    match module:
        case nn.modules.conv._ConvTransposeNd():
            module.in_channels, module.out_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        case nn.modules.conv._ConvNd():
            if module.groups == module.in_channels > 1:  # a filter per channel
                module.groups = module.weight.shape[0] * module.in_channels // module.out_channels
            module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case nn.Embedding():
            module.num_embeddings, module.embedding_dim = module.weight.shape
        case nn.modules.batchnorm._BatchNorm() if module.affine:
            module.num_features = module.weight.shape[0]
        case nn.modules.batchnorm._BatchNorm() if module.running_mean is not None:
            module.num_features = module.running_mean.shape[0]
        case nn.LayerNorm() if module.elementwise_affine:
            module.normalized_shape = tuple(module.weight.shape)
        case nn.GroupNorm() if module.affine:
            module.num_channels = module.weight.shape[0]
        case nn.RNNBase():
            weight = module.get_parameter("weight_hh_l0")
            module.hidden_size = weight.shape[1]
            module.input_size = module.get_parameter("weight_ih_l0").shape[1]
