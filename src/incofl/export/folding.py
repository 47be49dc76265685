"""Batch norms after convolutions and linear layers, folded into their weights: fewer operations, the same function."""

from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

LAYERS = ("conv1d", "conv2d", "conv3d", "linear")


def fold_batch_norms(module: nn.Module, program: ExportedProgram) -> int:
    """Folds, in place, each batch norm that is the only reader of a layer's output; returns how many there were.

    ``program`` is the module as ``torch.export`` sees it, in evaluation mode: it says who reads what.
    """
    pairs = [found for node in program.graph.nodes if (found := _pair(node, program)) is not None]
    for layer_name, norm_name in pairs:
        layer, norm = module.get_submodule(layer_name), module.get_submodule(norm_name)
        if norm.weight is None:  # a norm without scale and shift has ones and zeros
            mean: Any = norm.running_mean
            norm.weight, norm.bias = nn.Parameter(torch.ones_like(mean)), nn.Parameter(torch.zeros_like(mean))
        fuse: Any = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
        module.set_submodule(layer_name, fuse(layer, norm))
        module.set_submodule(norm_name, nn.Identity())
    return len(pairs)


def _pair(node: Node, program: ExportedProgram) -> tuple[str, str] | None:
    """The names of a layer and its batch norm, if a node of the graph is such a norm and both are used once."""
    if _operator(node) != "batch_norm" or not isinstance(made := node.args[0], Node):
        return None
    if _operator(made) not in LAYERS or len(made.users) != 1:
        return None
    if _operator(made) == "linear" and made.meta["val"].dim() != 2:  # the norm is over another dimension
        return None
    weight, mean = made.args[1], node.args[3]
    if not isinstance(weight, Node) or not isinstance(mean, Node) or len(weight.users) != 1 or len(mean.users) != 1:
        return None
    signature = program.graph_signature
    parameter, buffer = signature.inputs_to_parameters.get(weight.name), signature.inputs_to_buffers.get(mean.name)
    return (parameter.rpartition(".")[0], buffer.rpartition(".")[0]) if parameter and buffer else None


def _operator(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)
