"""An identity start: before the first round every level computes the function of the smallest one.

A block that not every level holds begins as the identity: the parameters that close its residual branches are zero
(``Layout.closing``), as Goyal et al. (2017) do for the stability of large batches. A channel that not every level holds
begins without effect on those before it: its outgoing weights to them are zero, as in function-preserving growth
(Net2Net, Chen et al. 2016). What a level adds starts from there, and disturbs nobody.
"""

import torch
from torch import Tensor, nn

from incofl.errors import ConfigError
from incofl.layout import Axis, Layout
from incofl.split import Splitter
from incofl.split.slices import positions
from incofl.tensors import Tensors

_MIXES_CHANNELS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
_WITHOUT_INPUT = (nn.Embedding, nn.EmbeddingBag)


def identity_start(initial: Tensors, module: nn.Module, layout: Layout, splitter: Splitter) -> Tensors:
    """Initial values with which all levels are one function; refuses a model for which there are none."""
    if splitter.moves:
        raise ConfigError("split.start: got 'identity', expected 'random': the channels of a level move every round")
    slices = [splitter.slice(layout, level) for level in range(len(splitter.depths))]
    some = {layout.block_of[name] for name in layout.axes if any(name not in piece.index for piece in slices)}
    closed = {layout.block_of[name] for name in layout.closing}
    if stays := [block for block in layout.blocks if block in some - closed]:
        reason = f"{stays[0]} has no residual branch that can be closed"
        raise ConfigError(f"split.start: got 'identity', expected 'random': {reason}")
    start = dict(initial)
    for name, rows in layout.closing.items():
        if layout.block_of[name] in some:
            if name not in layout.parameters:
                raise ConfigError(f"split.start: got 'identity', expected 'random': {name} is not trained")
            start[name] = start[name].clone()
            start[name][rows] = 0
    for name in layout.parameters if min(splitter.shares) < 1 else ():
        owner, axes = module.get_submodule(name.rpartition(".")[0]), layout.axes[name]
        if isinstance(owner, _MIXES_CHANNELS) and any(axis and not axis.fixed for axis in axes):
            reason = f"{name} belongs to a norm over channels of which a level holds a part"
            raise ConfigError(f"split.start: got 'identity', expected 'random': {reason}")
        if len(axes) < 2 or isinstance(owner, _WITHOUT_INPUT) or owner is module:
            continue
        out, into = (1, 0) if isinstance(owner, nn.modules.conv._ConvTransposeNd) else (0, 1)
        first, second = _first_level(axes[out], splitter), _first_level(axes[into], splitter)
        if second is not None:
            outputs = torch.zeros(start[name].shape[out]) if first is None else first
            later = second.view(1, -1) > outputs.view(-1, 1)
            later = later if out == 0 else later.T
            start[name] = start[name].masked_fill(later.view(*later.shape, *[1] * (start[name].dim() - 2)), 0)
    return start


def _first_level(axis: Axis | None, splitter: Splitter) -> Tensor | None:
    """For each position along an axis, the smallest level that holds it; ``None``: all do."""
    if axis is None or axis.fixed:
        return None
    level = torch.full((axis.length,), float(len(splitter.shares)))
    for number in reversed(range(len(splitter.shares))):
        level[positions(axis, splitter.channels(axis.size, number))] = number
    return level
