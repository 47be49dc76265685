"""What a model says about itself, so that nothing else needs to know the names of its parameters."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from incofl.errors import LayoutError
from incofl.tensors import Inputs


@dataclass(frozen=True)
class Axis:
    """A dimension that several tensors share, such as the residual stream of a stage, in units that can be kept."""

    name: str  # tensors that share an axis use the same name and the same number of units
    size: int  # number of units: channels, or heads of an attention
    fixed: bool = False  # never narrowed by width splitting, such as the classes
    copies: int = 1  # times it lies along the dimension: 3 for queries, keys and values, 4 for the gates of an LSTM
    unit: int = 1  # number of neighbouring positions that belong to one unit: the channels of a head

    @property
    def length(self) -> int:
        """Length of the dimension along which the axis lies."""
        return self.copies * self.size * self.unit


Axes = tuple[Axis | None, ...]


@dataclass(frozen=True)
class Layout:
    """The structure of a server model, by the names of its state dict: make one with ``of`` or ``infer``."""

    axes: Mapping[str, Axes]  # the axis along each dimension of an entry; ``None``: always whole
    shapes: Mapping[str, tuple[int, ...]]
    stages: tuple[tuple[str, ...], ...]  # the prefixes of the blocks of each stage, from shallow to deep
    shallow: Mapping[str, str]  # the shallow counterpart of each deep parameter: what InCo mixes
    buffers: frozenset[str]  # statistics, not parameters: they follow the buffer policy
    exits: Mapping[str, int] = field(default_factory=dict)  # prefixes of early exits' heads, and the blocks before each
    kept_whole: Mapping[str, str] = field(default_factory=dict, compare=False)  # why an axis cannot be narrowed
    closing: Mapping[str, slice] = field(default_factory=dict)  # entries, and their rows, whose zeros close a block
    frozen: frozenset[str] = frozenset()  # never change (``requires_grad = False``): not trained, uploaded or sent
    not_negative: frozenset[str] = frozenset()  # buffers that cannot be below 0: variances and counters of norm layers
    given: frozenset[str] = frozenset()  # only the server changes them: sent in every round, not trained or uploaded
    tied: Mapping[str, str] = field(default_factory=dict)  # names of the state that are the same tensor as an entry
    # For blocks that return a tuple, the place among the arguments of what each element is when the block is left out
    results: Mapping[str, tuple[int | str | None, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        axes: Mapping[str, Axes],
        stages: Iterable[Iterable[str]],
        shallow: Mapping[str, str],
        exits: Mapping[str, int] | None = None,
        closing: Iterable[str] | Mapping[str, slice] = (),
    ) -> "Layout":
        """Reads shapes, buffers and frozen entries off a module; entries without ``axes`` are always held whole.

        ``axes`` has the names of entries, or of layers with the outputs and inputs of each: a weight has both, and
        perhaps a kernel that is always whole; a bias or a statistic has the outputs only. ``closing`` has the entries,
        perhaps with the rows of each, that end the residual branches of a block: with zeros there it is the identity.
        """
        tied = tied_names(module)
        state = {name: value for name, value in module.state_dict().items() if name not in tied}
        layers = {name: axes.get(name.rpartition(".")[0], ()) for name in state}
        frozen = frozen_entries(module) & state.keys()
        parameters = {name for name, _ in module.named_parameters()}
        return cls(
            axes={n: axes.get(n, (*layers[n], *[None] * x.dim())[: x.dim()]) for n, x in state.items()},
            shapes={name: tuple(value.shape) for name, value in state.items()},
            stages=tuple(tuple(stage) for stage in stages),
            shallow=dict(shallow),
            buffers=frozenset(state.keys() - parameters - frozen),
            exits=dict(exits or {}),
            closing=dict(closing) if isinstance(closing, Mapping) else dict.fromkeys(closing, slice(None)),
            frozen=frozen,
            not_negative=frozenset(_variances_and_counters(module) & state.keys()),
            tied=tied,
        )

    @classmethod
    def infer(cls, module: nn.Module, example: Inputs, blocks: Sequence[str] = ()) -> "Layout":
        """The layout of any module, by tracing a batch of examples; what cannot be narrowed safely is held whole.

        ``blocks`` names the lists whose children are the blocks, such as ``model.layers``; without it they are found.
        """
        from incofl.models.infer import infer_layout  # it is built on layouts, and needs a second to be loaded

        return infer_layout(module, example, blocks)

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, axes in self.axes.items():
            shape = self.shapes[name]
            if len(axes) != len(shape) or any(a and a.length != n for a, n in zip(axes, shape, strict=True)):
                raise LayoutError(f"layout: {name!r} has shape {shape}, its axes say {axes}")
            for axis in filter(None, axes):
                if axis.name == "classes" and not axis.fixed:
                    raise LayoutError(f"layout: axis 'classes' of {name!r} would be narrowed, expected fixed=True")
                if (known := sizes.setdefault(axis.name, axis.size)) != axis.size:
                    units = f"{axis.size} units in {name!r}, {known} elsewhere"
                    raise LayoutError(f"layout: axis {axis.name!r} has {units}")
        for deep, shallow in self.shallow.items():
            ours, theirs = self.shapes.get(deep), self.shapes.get(shallow)
            if ours is None or ours != theirs:
                pair = f"{deep!r} {ours} and its shallow counterpart {shallow!r} {theirs}"
                raise LayoutError(f"layout: {pair} must be parameters of one shape")

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
        return frozenset(self.axes.keys() - self.buffers - self.frozen - self.given)

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
        owners = (*self.blocks, *self.exits)
        return {name: next((o for o in owners if name.startswith(f"{o}.")), None) for name in self.axes}

    @cached_property
    def across_blocks(self) -> dict[str, str]:
        """For each matrix or kernel of a stage, the same one of the first block in which it has this shape."""
        return self._first(lambda block, name: (name.removeprefix(block), self.shapes[name]))

    @cached_property
    def first_same_shape(self) -> dict[str, str]:
        """The paper's "Layer 0": in each stage, the first matrix or kernel of a shape serves all later ones of it."""
        return self._first(lambda block, name: self.shapes[name])

    def _first(self, key: Callable[[str, str], Hashable]) -> dict[str, str]:
        """For each matrix or kernel of a stage, the first one in it with the same key, where that is another."""
        pairs: dict[str, str] = {}
        for stage in self.stages:
            first: dict[Hashable, str] = {}
            for block in stage:  # from shallow to deep
                for name, shape in self.shapes.items():
                    if self.block_of[name] == block and name in self.parameters and len(shape) >= 2:
                        pairs[name] = first.setdefault(key(block, name), name)
        return {name: reference for name, reference in pairs.items() if name != reference}


def tied_names(module: nn.Module) -> dict[str, str]:
    """The names of a module's state that are the same tensor as an earlier one, and the name of that one."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first[id(value)] for name, value in named if first.setdefault(id(value), name) != name}


def _norms(module: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}


def _variances_and_counters(module: nn.Module) -> set[str]:
    """The statistics of norm layers that cannot be below 0."""
    return {
        f"{name}.{key}".removeprefix(".") for name in _norms(module) for key in ("running_var", "num_batches_tracked")
    }


def frozen_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The norm layers whose parameters are all frozen: their statistics are frozen, too."""
    norms = _norms(module)
    trained = {name: {p.requires_grad for p in norm.parameters(recurse=False)} for name, norm in norms.items()}
    return {name: norm for name, norm in norms.items() if trained[name] == {False}}


def frozen_entries(module: nn.Module) -> frozenset[str]:
    """The parameters that require no gradient, and the statistics of frozen norm layers."""
    parameters = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    statistics = {f"{name}.{key}" for name, norm in frozen_norms(module).items() for key, _ in norm.named_buffers()}
    return frozenset(parameters | {key.removeprefix(".") for key in statistics})
