"""The parameters that close the residual branches of a block: with these at zero, the block is the identity."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from incofl.tensors import Inputs, call, map_inputs

# Of the gates of a recurrent layer, the third is what it adds: (i, f, g, o) of an LSTM, (r, z, n) of a GRU.
_CANDIDATE, _GATES = 2, {nn.LSTM: 4, nn.GRU: 3}


def find_closing(module: nn.Module, blocks: Iterable[str], example: Inputs) -> dict[str, slice]:
    """For each block that can be made the identity, the entries, and the rows of each, that must be zero.

    The module is not changed; its values do not matter.

    Found by trying: the layers of a block are set to zero one after the other, the last one first, until the block
    returns what it was called with; what was not necessary is put back.
    """
    copied = copy.deepcopy(module).double().eval()
    called: dict[str, tuple[Any, Any]] = {}
    closing: dict[str, slice] = {}
    hooks = [
        copied.get_submodule(block).register_forward_pre_hook(
            lambda _, args, kwargs, block=block: called.setdefault(block, (args, kwargs)) and None, with_kwargs=True
        )
        for block in blocks
    ]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in copied.parameters():
            parameter.uniform_(-0.5, 0.5)  # whatever the model starts with
        call(copied, map_inputs(_values, example))
        for hook in hooks:
            hook.remove()
        for block, inputs in called.items():
            layers = _close(copied.get_submodule(block), *tree_map(_values, inputs))
            for name, layer in layers.items():
                gates = next((number for kind, number in _GATES.items() if isinstance(layer, kind)), None)
                for key, parameter in layer.named_parameters(recurse=False):
                    size = 0 if gates is None else len(parameter) // gates
                    rows = slice(None) if gates is None else slice(_CANDIDATE * size, (_CANDIDATE + 1) * size)
                    closing[".".join(filter(None, (block, name, key)))] = rows
    return closing


def _values(value: Any) -> Any:
    """Positive numbers in place of those that come from an input of zeros: behind a ReLU there are no others."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.rand(value.shape, dtype=torch.float64) + 0.1


def _close(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, nn.Module]:
    """The layers, by name, that must be zero for the block to be the identity; none if it cannot be."""
    layers = {name: layer for name, layer in block.named_modules() if layer._parameters}
    order: dict[str, int] = {}
    (x,) = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()][:1]

    def output(zeros: Iterable[str]) -> Tensor:
        """What the block returns with some layers set to zero."""
        owned = [own for name in zeros for own in layers[name].named_parameters(name, recurse=False)]
        zeroed = {name: torch.zeros_like(parameter) for name, parameter in owned}
        found = tree_leaves(functional_call(block, zeroed, args, kwargs))
        return next(leaf for leaf in found if isinstance(leaf, Tensor))

    def place(name: str) -> int:  # a layer that is not called by itself belongs to the one around it
        while name not in order and name:
            name = name.rpartition(".")[0]
        return order.get(name, -1)

    hooks = [
        layer.register_forward_hook(lambda *_, name=name: order.update({name: len(order)}))
        for name, layer in block.named_modules()
    ]
    before, zeros = output(()), list[str]()
    for hook in hooks:
        hook.remove()
    for name in sorted(layers, key=place)[::-1]:  # the last one first
        after = output([*zeros, name])
        if not torch.equal(after, before):  # else it has no say any more
            zeros, before = [*zeros, name], after
    if before.shape != x.shape or not torch.equal(before, x):
        return {}
    for name in zeros:
        others = [other for other in zeros if other != name]
        zeros = others if torch.equal(output(others), x) else zeros
    return {name: layers[name] for name in zeros}
