"""Early exits for any model with blocks: a head after some of them, whose inputs the layout tells.

A model may have a method ``add_exits(positions, convolutions)`` of its own, as ResNets do. Any other gets, after each
position, a mean over pixels or tokens, a layer norm where the block has one, and a linear layer. What comes after the
last block is the last exit. A model with exits returns the logits of all that it holds in training, and in evaluation
those of the last one or, where ``model.answer`` says so, their mean.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from incofl.errors import ConfigError
from incofl.layout import Axes, Axis, Layout
from incofl.methods.heterofl import class_dimensions
from incofl.split import Depth

NOTED = "noted"  # the attribute of a block that has its last output
Answer = Literal["last", "mean"]


class Head(nn.Module):
    """A classifier of what a block returns."""

    def __init__(self, features: int, classes: int, channels_first: bool, norm: bool) -> None:
        super().__init__()
        self.channels_first = channels_first
        self.norm = nn.LayerNorm(features) if norm else nn.Identity()
        self.fc = nn.Linear(features, classes)

    def forward(self, x: Tensor, every: bool) -> Tensor:
        """Returns logits (B, classes), or of ``every`` position (B, classes, length)."""
        if self.channels_first and x.dim() > 2:
            x = x.flatten(2).transpose(1, 2)
        if not every and x.dim() > 2:
            x = x.flatten(1, -2).mean(1)
        logits: Tensor = self.fc(self.norm(x))
        return logits.transpose(1, 2) if every else logits


def add_exits(
    model: nn.Module, layout: Layout, positions: tuple[int, ...], convolutions: int, answer: Answer = "last"
) -> Layout:
    """Adds exits after some blocks, in place, and returns the layout with them; the last position is the model's end.

    ``convolutions`` is the number of those in an exit of a ResNet.
    """
    vars(model)["answer"] = answer
    own: Callable[[tuple[int, ...], int], Layout] | None = getattr(model, "add_exits", None)
    if own is not None:
        return own(positions, convolutions)
    if not layout.stages or "classes" not in layout.named_axes or layout.tied or hasattr(model, "exits"):
        hint = "expected blocks, an axis of classes, no tied weights, or a method add_exits(positions, convolutions)"
        raise ConfigError(f"model.name: {type(model).__name__} cannot have early exits, {hint}")
    classes, axes = layout.named_axes["classes"], dict[str, Axes](layout.axes)
    heads, exits = nn.ModuleList(), dict[str, int]()
    for number, position in enumerate(positions[:-1]):
        block, (stream, features) = model.get_submodule(layout.blocks[position - 1]), stream_after(layout, position)
        kinds = list(block.modules())
        norm = any(isinstance(layer, nn.LayerNorm | nn.RMSNorm) for layer in kinds)
        first = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in kinds)
        heads.append(Head(features, classes.length, first, norm))
        block.register_forward_hook(_note)
        name = f"exits.{number}"
        exits[name], axes[f"{name}.fc.weight"], axes[f"{name}.fc.bias"] = position, (classes, stream), (classes,)
        axes |= {f"{name}.norm.{key}": (stream,) for key in ("weight", "bias") if norm}
    exits |= dict.fromkeys(tail(layout), positions[-1])
    model.add_module("exits", heads)
    vars(model).update(exit_blocks=tuple(layout.blocks[at - 1] for at in positions[:-1]), exit_tail=tail(layout))
    model.register_forward_hook(_answer)
    new = Layout.of(model, axes, layout.stages, layout.shallow, exits, layout.closing)
    return dataclasses.replace(new, kept_whole=layout.kept_whole, given=layout.given, results=layout.results)


def stream_after(layout: Layout, position: int) -> tuple[Axis | None, int]:
    """The axis of what a block returns and its length: the only one that it shares with what comes after it.

    Where all blocks are alike and their width cannot be narrowed, it has no name; the head has as many inputs.
    """
    block, later = layout.blocks[position - 1], {*layout.blocks[position:], *tail(layout)}
    own, after = dict[str, Axis](), set[str]()
    for name, axes in layout.axes.items():
        owner = layout.block_of[name] or name.rpartition(".")[0]
        own |= {axis.name: axis for axis in axes if axis is not None and owner == block}
        after |= {axis.name for axis in axes if axis is not None and owner in later}
    shared = [axis for name, axis in own.items() if name in after and name != "classes"]
    heads = [n for n, dim in class_dimensions(layout, layout.axes).items() if dim == 0 and len(layout.axes[n]) == 2]
    if not shared and len(layout.stages) == 1 and heads and layout.axes[heads[0]][1] is None:
        return None, layout.shapes[heads[0]][1]
    if len(shared) != 1:
        hint = "expected one axis that it shares with later layers"
        raise ConfigError(f"model.name: the model cannot have an exit after {block}, {hint}")
    stream = dataclasses.replace(shared[0], copies=1)
    return stream, stream.length


def tail(layout: Layout) -> tuple[str, ...]:
    """The layers of no block that come after the last one in the order of the state, and the head."""
    names = list(layout.axes)
    last = max(at for at, name in enumerate(names) if layout.block_of[name] is not None)
    later = [*names[last + 1 :], *class_dimensions(layout, names)]
    layers = dict.fromkeys(name.rpartition(".")[0] for name in later if layout.block_of[name] is None)
    return tuple(layer for layer in layers if layer)


def _note(block: nn.Module, inputs: Any, output: Any) -> None:
    vars(block)[NOTED] = output[0] if isinstance(output, tuple) else output


def _answer(model: nn.Module, inputs: Any, output: Any) -> Any:
    """Replaces what a model returns by the logits of its exits; layers that it does not hold are identities."""
    last: Tensor = getattr(output, "logits", output)
    facts, every = vars(model), last.dim() > 2
    early = zip(facts["exit_blocks"], model.get_submodule("exits").children(), strict=True)
    noted = [(vars(model.get_submodule(name)).pop(NOTED, None), head) for name, head in early]
    held = [(x, head) for x, head in noted if not isinstance(head, nn.Identity)]
    whole = not any(isinstance(model.get_submodule(name), nn.Identity) for name in facts["exit_tail"])
    used = held if model.training or facts["answer"] == "mean" else held[-1:] if not whole else []
    logits = [head(x, every) for x, head in used] + ([last] if whole else [])
    return answered(logits, model.training)


def answered(logits: list[Tensor], training: bool) -> Tensor | list[Tensor]:
    """The logits of some exits as a model returns them."""
    return logits if training else torch.stack(logits).mean(0) if len(logits) > 1 else logits[0]


def positions_of(layout: Layout) -> list[int]:
    """The number of blocks before the exit of each level."""
    return sorted(set(layout.exits.values()))


def first_blocks(layout: Layout, blocks: int) -> Depth:
    """The first blocks of the whole model, counted by stage; later stages may be empty."""
    before = itertools.accumulate(layout.depth, initial=0)
    return tuple(min(size, max(blocks - start, 0)) for start, size in zip(before, layout.depth, strict=False))
