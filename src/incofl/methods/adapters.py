"""Low-rank adapters on any model, by peft: W + (alpha / R) B A, with W frozen, A (R x inputs) and B (outputs x R).

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. The ranks of all adapters are one axis, so a
level holds the first r of R ranks of each. The scale is alpha / R at every level: a rank means the same to all.
"""

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Gt, Lt
from torch import nn

from incofl.errors import ConfigError
from incofl.layout import Axis, Layout
from incofl.options import options
from incofl.split import RANK, Depths, Kind, Levels, SplitRule, Splitter, Window, make_splitter

A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer"  # peft's names


@options("lora")
class Lora:
    """The adapters: where they are, how large, and what else is trained."""

    rank: Annotated[int, Ge(1)] | None = None  # of the server model; left out, the largest of ``split.levels``, or 16
    alpha: Annotated[float, Gt(0)] | None = None  # adapters are scaled by alpha / rank; left out, by 2
    rslora: bool = False  # scaled by alpha / sqrt(rank) instead, which suits large ranks (Kalajdzievski 2023)
    # names of layers, or how these end, such as ``["query", "value"]``; ``all``: every linear layer of the blocks, or
    # of a model without blocks every linear layer but the head
    targets: Literal["all"] | tuple[str, ...] = "all"
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0  # of what enters an adapter
    # the layer of the classes: ``average`` (trained by all), ``private`` (each level has its own), or ``frozen``
    head: Literal["average", "private", "frozen"] = "average"
    also: tuple[str, ...] = ()  # names of other layers that are trained as a whole, or how these end

    def scale(self, rank: int) -> float:
        """What the product of the factors of a server model of some rank is multiplied by, at every level."""
        return 2.0 if self.alpha is None else self.alpha / (math.sqrt(rank) if self.rslora else rank)


class Adapter(NamedTuple):
    """The names of an adapter's factors and of the weight that it adapts."""

    a: str
    b: str
    base: str


def adapters(layout: Layout) -> list[Adapter]:
    """All adapters of a model."""
    layers = [name.removesuffix(A) for name in layout.axes if name.endswith(A)]
    return [Adapter(layer + A, layer + B, f"{layer}{BASE}.weight") for layer in layers]


def head_of(layout: Layout) -> frozenset[str]:
    """The entries that have a row per class."""
    return frozenset(n for n, axes in layout.axes.items() if any(axis and axis.name == "classes" for axis in axes))


@dataclass(frozen=True)
class RankRule(SplitRule):
    """Adds adapters to a model, of which levels hold some ranks."""

    kind: ClassVar[Kind | None] = "rank"
    lora: Lora = field(default_factory=Lora)
    fixed_a: bool = False  # whether A stays as it starts
    merges: bool = False  # whether the server changes the adapted weights
    cutter: type[Splitter] = Splitter

    @property
    def window(self) -> Window:
        return "prefix" if self.cutter is Splitter else "rolling"

    def splitter(self, layout: Layout, kind: Kind, levels: Levels, depth: Depths = "full") -> Splitter:
        made = make_splitter(layout, kind, levels, depth, self.window)
        return self.cutter(made.shares, made.depths, made.window)

    def extend(self, model: nn.Module, layout: Layout, levels: Levels) -> Layout:
        ranks = [] if isinstance(levels, int) else [level for level in levels if isinstance(level, int)]
        return self.attach(model, layout, self.lora.rank or max(ranks, default=16))

    def attach(self, model: nn.Module, layout: Layout, rank: int) -> Layout:
        """Adds adapters to a model, in place, and returns the layout with them: only ranks can be left out."""
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        kept = head_of(layout) if self.lora.head != "frozen" else frozenset()
        layers = _inject(model, layout, self.lora, rank)
        for name, parameter in model.named_parameters():
            if name in trained and (name in kept or _ends(name.rpartition(".")[0], self.lora.also)):
                parameter.requires_grad = True
            elif self.fixed_a and name.endswith(A):
                parameter.requires_grad = False

        def renamed(name: str) -> str:
            layer, _, entry = name.rpartition(".")
            return f"{layer}{BASE}.{entry}" if layer in layers else name

        axes = {renamed(name): tuple(map(_whole, old)) for name, old in layout.axes.items()}
        ranks = Axis(RANK, rank)
        for layer, swapped in layers.items():
            outputs, inputs, *rest = axes[f"{layer}{BASE}.weight"]
            outputs, inputs = (inputs, outputs) if swapped else (outputs, inputs)
            axes |= {layer + A: (ranks, inputs, *rest), layer + B: (outputs, ranks, *rest)}
        closing = {renamed(name): rows for name, rows in layout.closing.items()}
        new = Layout.of(model, axes, layout.stages, {}, layout.exits, closing)
        given = frozenset(adapter.base for adapter in adapters(new)) if self.merges else frozenset()
        new = dataclasses.replace(new, frozen=new.frozen - given, given=given, kept_whole=layout.kept_whole)
        return dataclasses.replace(new, shallow=new.across_blocks)


def _inject(model: nn.Module, layout: Layout, lora: Lora, rank: int) -> dict[str, bool]:
    """Adds peft's adapters; returns the adapted layers, and whether the inputs come first in their weights."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise ConfigError("method: adapters need peft: pip install 'incofl[lora]'") from None
    if any(isinstance(module, LoraLayer) for module in model.modules()):
        raise ConfigError("model: it has adapters already, expected the model without: the method adds them")
    alpha: Any = lora.scale(rank) * rank  # which peft takes for a whole number, and need not be one
    targets = _targets(model, layout, lora)
    made = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the inputs come first in some weights, which it sees to
        inject_adapter_in_model(made, model)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else it may compute with the weights alone, past the adapters
    found = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {name: bool(getattr(module, "fan_in_fan_out", False)) for name, module in found.items()}


def _targets(model: nn.Module, layout: Layout, lora: Lora) -> list[str]:
    """The names of the layers that get adapters."""
    modules, head, owner = dict(model.named_modules()), head_of(layout), layout.block_of
    linear = {name for name, m in modules.items() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    if lora.targets == "all":
        inside = tuple(f"{n}." for n, m in modules.items() if isinstance(m, nn.MultiheadAttention))  # adds no adapters
        weights = {name: f"{name}.weight" for name in modules if name in linear and not name.startswith(inside)}
        places = [name for name, weight in weights.items() if owner.get(weight) in layout.blocks]
        found = places or [name for name, weight in weights.items() if weight in owner and weight not in head]
    else:
        found = [name for name in modules if _ends(name, lora.targets)]
    if not found:
        some = f"names of layers such as {', '.join(sorted(linear)[:3])}" if linear else "names of layers"
        raise ConfigError(f"lora.targets: got {lora.targets!r}, which no layer of the model is, expected {some}")
    for name in found:
        if name not in linear and not isinstance(modules[name], nn.modules.conv._ConvNd):
            kind = type(modules[name]).__name__
            raise ConfigError(f"lora.targets: got {name!r}, which is {kind}, expected linear layers or convolutions")
    return found


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _whole(axis: Axis | None) -> Axis | None:
    return axis and dataclasses.replace(axis, fixed=True)
