"""What a model says about itself, so that nothing else needs to know the names of its parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from incofl.errors import LayoutError
from incofl.inputs import Inputs


@dataclass(frozen=True)
class Axis:
    """A dimension that several tensors share, such as the residual stream of a stage, in units that can be kept.

    Attributes:
        name: tensors that share an axis use the same name and the same number of units.
        size: number of units: channels, or heads of an attention.
        fixed: whether width splitting never narrows it, such as the classes.
        copies: number of times the axis lies along the dimension of a tensor, one after the other: 3 for queries, keys
            and values in one matrix, 4 for the gates of an LSTM.
        unit: number of neighbouring positions that belong to one unit: the channels of a head.
    """

    name: str
    size: int
    fixed: bool = False
    copies: int = 1
    unit: int = 1

    @property
    def length(self) -> int:
        """Length of the dimension along which the axis lies."""
        return self.copies * self.size * self.unit


Axes = tuple[Axis | None, ...]


@dataclass(frozen=True)
class Layout:
    """The structure of a server model, by names.

    Attributes:
        axes: for each entry of the state dict, the axis along each of its dimensions (``None``: always whole).
        shapes: for each entry of the state dict, its full shape.
        stages: the prefixes of the blocks of each stage, from shallow to deep.
        shallow: the shallow counterpart of each deep parameter, ``deep -> shallow``: what InCo mixes.
        buffers: entries that are statistics, not parameters: they follow the buffer policy.
        exits: for a model with early exits, the prefix of each exit's head and the number of blocks before it.
        kept_whole: for an inferred layout, the reason why an axis cannot be narrowed.
        frozen: entries that never change (``requires_grad = False``): not trained, uploaded or sent in a round.
    """

    axes: Mapping[str, Axes]
    shapes: Mapping[str, tuple[int, ...]]
    stages: tuple[tuple[str, ...], ...]
    shallow: Mapping[str, str]
    buffers: frozenset[str]
    exits: Mapping[str, int] = field(default_factory=dict)
    kept_whole: Mapping[str, str] = field(default_factory=dict, compare=False)
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        axes: Mapping[str, Axes],
        stages: Iterable[Iterable[str]],
        shallow: Mapping[str, str],
        exits: Mapping[str, int] | None = None,
    ) -> "Layout":
        """Reads shapes, buffers and frozen entries off a module; entries without ``axes`` are always held whole.

        ``axes`` has the names of entries, or of layers with the outputs and inputs of each: a weight has both, and
        perhaps a kernel that is always whole; a bias or a statistic has the outputs only.
        """

        def of_layer(name: str, dims: int) -> Axes:
            return (*axes.get(name.rpartition(".")[0], ()), *[None] * dims)[:dims]

        state = module.state_dict()
        frozen = frozen_entries(module) & state.keys()
        parameters = {name for name, _ in module.named_parameters()}
        if tied := {name for name, _ in module.named_parameters(remove_duplicate=False)} - parameters:
            raise LayoutError(f"layout: {min(tied)!r} is the same tensor as another parameter; untie them first")
        return cls(
            axes={name: axes[name] if name in axes else of_layer(name, value.dim()) for name, value in state.items()},
            shapes={name: tuple(value.shape) for name, value in state.items()},
            stages=tuple(tuple(stage) for stage in stages),
            shallow=dict(shallow),
            buffers=frozenset(state.keys() - parameters - frozen),
            exits=dict(exits or {}),
            frozen=frozen,
        )

    @classmethod
    def infer(cls, module: nn.Module, example: Inputs) -> "Layout":
        """The layout of any module, found by tracing a batch of examples through it. Neither is changed.

        What cannot be narrowed safely is held whole, and ``kept_whole`` says why.
        """
        from incofl.models.infer import infer_layout  # it is built on layouts, and needs a second to be loaded

        return infer_layout(module, example)

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, axes in self.axes.items():
            shape = self.shapes[name]
            if len(axes) != len(shape) or any(
                a is not None and a.length != n for a, n in zip(axes, shape, strict=True)
            ):
                raise LayoutError(f"layout: {name!r} has shape {shape}, its axes say {axes}")
            for axis in axes:
                if axis is not None and (known := sizes.setdefault(axis.name, axis.size)) != axis.size:
                    raise LayoutError(
                        f"layout: axis {axis.name!r} has {axis.size} units in {name!r}, {known} elsewhere"
                    )
        for deep, shallow in self.shallow.items():
            if self.shapes.get(deep) is None or self.shapes.get(deep) != self.shapes.get(shallow):
                raise LayoutError(
                    f"layout: {deep!r} {self.shapes.get(deep)} and its shallow counterpart {shallow!r} "
                    f"{self.shapes.get(shallow)} must be parameters of one shape"
                )

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """All block prefixes, from the first stage to the last."""
        return tuple(block for stage in self.stages for block in stage)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return tuple(len(stage) for stage in self.stages)

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The entries that are trained."""
        return frozenset(self.axes.keys() - self.buffers - self.frozen)

    @cached_property
    def named_axes(self) -> dict[str, Axis]:
        """Every axis by its name."""
        return {axis.name: axis for axes in self.axes.values() for axis in axes if axis is not None}

    @cached_property
    def narrow_axes(self) -> tuple[Axis, ...]:
        """The axes that width splitting narrows."""
        return tuple(axis for axis in self.named_axes.values() if not axis.fixed)

    @property
    def why_whole(self) -> str:
        """Why width splitting finds nothing to narrow, for messages."""
        reasons = [f"{name}: {reason}" for name, reason in self.kept_whole.items()]
        return f"no width can be narrowed ({reasons[0] if reasons else 'all are those of its input or output'})"

    @cached_property
    def block_of(self) -> dict[str, str | None]:
        """For each entry the block or exit it belongs to; ``None`` for stem and head, which every client holds."""
        owner = {block + ".": block for block in (*self.blocks, *self.exits)}

        def find(name: str) -> str | None:
            return next((block for prefix, block in owner.items() if name.startswith(prefix)), None)

        return {name: find(name) for name in self.axes}

    @cached_property
    def across_blocks(self) -> dict[str, str]:
        """For each weight of a stage the same weight of the first block in which it has this shape.

        Only tensors of two or more dimensions count, that is matrices and kernels.
        """
        pairs: dict[str, str] = {}
        for stage in self.stages:
            first: dict[tuple[str, tuple[int, ...]], str] = {}
            for block in stage:  # from shallow to deep
                for name, shape in self.shapes.items():
                    if self.block_of[name] == block and name in self.parameters and len(shape) >= 2:
                        reference = first.setdefault((name.removeprefix(block), shape), name)
                        if reference != name:
                            pairs[name] = reference
        return pairs

    @cached_property
    def first_same_shape(self) -> dict[str, str]:
        """The paper's wording of "Layer 0": in each stage, the first weight of a shape serves all later ones of it.

        Only tensors of two or more dimensions count, that is matrices and kernels.
        """
        pairs: dict[str, str] = {}
        for stage in self.stages:
            first: dict[tuple[int, ...], str] = {}
            for name, shape in self.shapes.items():
                if self.block_of[name] in stage and name in self.parameters and len(shape) >= 2:
                    reference = first.setdefault(shape, name)
                    if reference != name:
                        pairs[name] = reference
        return pairs


def frozen_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The norm layers whose parameters are all frozen: their statistics are frozen, too."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        and any(True for _ in layer.parameters(recurse=False))
        and not any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
    }


def frozen_entries(module: nn.Module) -> frozenset[str]:
    """The parameters that require no gradient, and the statistics of frozen norm layers."""
    parameters = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    statistics = {f"{name}.{key}" for name, norm in frozen_norms(module).items() for key, _ in norm.named_buffers()}
    return frozenset(parameters | {key.removeprefix(".") for key in statistics})
