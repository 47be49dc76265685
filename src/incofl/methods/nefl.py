"""NeFL: nested models whose residual branches have a step size that is learned, by each level for itself.

Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", 2023. A block is

    x + s F(x)        instead of        x + F(x),

with a scalar s that is trained. Levels share all else but s and batch norm, scale, shift and statistics, which are
averaged within a level: a branch means something else in a shallow model than in a deep one.

Differences: a level is what ``split`` says; the original's are shares of the parameters, with a width of the square
root of the share, and leave out blocks in the middle. Each branch of a transformer's block has a step of its own. A
block that changes the shape of its input, which no step can close, has one where its branch ends as those of others do.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from incofl.client import ClientRule
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.methods.fedbn import batch_norm
from incofl.options import options
from incofl.split import Slice

STEP = "nefl_step"  # the name of a step in the layer that ends a branch


@options("nefl")
class NeFL(ClientRule):
    """The steps and what of it levels keep for themselves."""

    steps: bool = True  # whether the steps are trained; otherwise they stay 1
    norms: bool = True  # whether levels have a batch norm of their own

    def extend(self, model: nn.Module, layout: Layout) -> Layout:
        layers = branch_ends(model, layout)
        if not layers:
            hint = "expected residual blocks of which the layout says which layers close them (Layout.of, closing)"
            raise ConfigError(f"model.name: {type(model).__name__} cannot have steps, {hint}")
        for layer in layers:
            layer.register_parameter(STEP, nn.Parameter(torch.ones(1), requires_grad=self.steps))
            layer.register_forward_hook(scaled)
        new = Layout.of(model, layout.axes, layout.stages, layout.shallow, layout.exits, layout.closing)
        return dataclasses.replace(new, kept_whole=layout.kept_whole, given=layout.given, results=layout.results)


def branch_ends(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """The layers whose output a block adds to its input; in all blocks, those of the names that close one."""
    whole = [name for name, rows in layout.closing.items() if rows == slice(None)]
    ends = {name.rpartition(".")[0].removeprefix(f"{layout.block_of[name]}.") for name in whole}
    modules, found = dict(model.named_modules()), dict[str, nn.Module]()
    for block in layout.blocks if len(whole) == len(layout.closing) else ():
        for name in (f"{block}.{end}" for end in ends if f"{block}.{end}" in modules):
            # An attention of torch computes with the weights of its last layer and does not call it.
            inner = isinstance(modules[name], NonDynamicallyQuantizableLinear)
            owner = name.rpartition(".")[0] if inner else name
            found[owner] = modules[owner]
    return list(found.values())


def scaled(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """A hook that multiplies what a layer returns, in a tuple the first element, by its step."""
    step = getattr(layer, STEP)  # a parameter, or one of several clients side by side
    return (step * output[0], *output[1:]) if isinstance(output, tuple) else step * output


@dataclass(frozen=True)
class NeFLServer(ServerRule):
    """The server half: the covered mean, of steps and batch norm within a level."""

    options: NeFL = field(default_factory=NeFL)

    def private(self, layout: Layout, slice_: Slice) -> frozenset[str]:
        steps = {name for name in slice_.index if name.rpartition(".")[2] == STEP}
        norms = batch_norm(layout) & slice_.index.keys() if self.options.norms else frozenset()
        return (norms | steps) - layout.frozen


nefl = Method("nefl", NeFL(), NeFLServer())
