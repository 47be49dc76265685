"""The axes of layers, for layouts that are written by hand."""

from collections.abc import Mapping

from torch import nn

from incofl.layout import Axes


def layer_axes(module: nn.Module, layers: Mapping[str, Axes]) -> dict[str, Axes]:
    """The axes of all tensors of some layers, from the outputs and inputs of each layer.

    A weight has both, and perhaps a kernel that is always whole; a bias or a statistic has the outputs only.
    """
    return {
        f"{name}.{entry}": (*axes, *[None] * value.dim())[: value.dim()]
        for name, axes in layers.items()
        for entry, value in module.get_submodule(name).state_dict().items()
    }
