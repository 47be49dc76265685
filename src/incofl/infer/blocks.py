"""Repeated blocks of a model, and which of their weights InCo mixes."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Graph

from incofl.infer.trial import problem_with, without
from incofl.layout import Layout

Stage = tuple[str, ...]


def find_stages(module: nn.Module, example: Tensor, graph: Graph) -> tuple[Stage, ...]:
    """The stages of a module on the meta device, in the order in which they are computed.

    A stage is a run of numbered children of one class, such as those of a ``ModuleList`` or ``Sequential``, computed
    one after the other; all but its first can be left out, for they keep the shape of what they get. A block that
    changes the shape starts a new stage. Of runs within runs the outermost counts.
    """
    search = _Search(module, example, graph, *_watch(module, example))
    search.look(module, "")
    classes = [search.kind(stage) for stage in search.stages]
    # A single block is a stage where its class forms others: the first stages of a ResNet14, all of a ResNet10.
    lone = [run for run in search.lone if [*classes, *map(search.kind, search.lone)].count(search.kind(run)) > 1]
    return tuple(sorted((*search.stages, *lone), key=lambda stage: search.order[stage[0]]))


@dataclass
class _Search:
    module: nn.Module
    example: Tensor
    graph: Graph
    shape: torch.Size
    steady: set[str]  # modules that give a tensor of the shape that they get
    order: dict[str, int]  # of their first calls
    stages: list[Stage] = field(default_factory=list)
    lone: list[Stage] = field(default_factory=list)

    def kind(self, stage: Stage) -> type[nn.Module]:
        return type(self.module.get_submodule(stage[0]))

    def look(self, module: nn.Module, path: str) -> None:
        """Takes the runs among the children that can be divided into stages, and looks into all other children."""
        taken: set[str] = set()
        runs = [run for run in _runs(module, path) if all(block in self.order for block in run)]
        for run in runs:
            stages = self.divide(run)
            if any(len(stage) > 1 for stage in stages):
                self.stages += stages
                taken.update(run)
            elif len(runs) == 1 and len(run) == len(list(module.children())) and any(self._composite(run)):
                self.lone += stages
        for name, child in module.named_children():
            if (below := _join(path, name)) not in taken:
                self.look(child, below)

    def divide(self, run: Stage) -> list[Stage]:
        """A run as stages: a block that changes the shape starts a new one. None if the model needs the others too."""
        series = _in_series(self.graph, run)
        stages: list[list[str]] = []
        for at, block in enumerate(run):
            if stages and at in series and block in self.steady:
                stages[-1].append(block)
            else:
                stages.append([block])
        later = [block for stage in stages for block in stage[1:]]
        if later and problem_with(without(self.module, later), self.example, self.shape) is not None:
            return []
        return [tuple(stage) for stage in stages]

    def _composite(self, run: Stage) -> Iterator[bool]:
        return (any(True for _ in self.module.get_submodule(block).children()) for block in run)


def _watch(module: nn.Module, example: Tensor) -> tuple[torch.Size, set[str], dict[str, int]]:
    """The shape of the output, which modules keep the shape of their input, and in which order they are called."""
    steady: set[str] = set()
    order: dict[str, int] = {}

    def hook(path: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def note(_: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            order.setdefault(path, len(order))
            first = inputs[0] if inputs else None
            if isinstance(first, Tensor) and isinstance(output, Tensor) and first.shape == output.shape:
                steady.add(path)

        return note

    handles = [part.register_forward_hook(hook(path)) for path, part in module.named_modules()]
    try:
        shape: torch.Size = module(example).shape
    finally:
        for handle in handles:
            handle.remove()
    return shape, steady, order


def _runs(module: nn.Module, path: str) -> Iterator[Stage]:
    """Neighbouring children of one class, with numbers as names and parameters of their own."""
    numbered = [(name, child) for name, child in module.named_children() if name.isdigit()]
    for _, group in itertools.groupby(numbered, key=lambda entry: type(entry[1])):
        run = tuple(_join(path, name) for name, child in group if any(True for _ in child.parameters()))
        if run:
            yield run


def _in_series(graph: Graph, run: Stage) -> set[int]:
    """Which blocks of a run get what the block before them gave, directly or by way of something else."""
    fed: dict[object, frozenset[int]] = {}
    series: set[int] = set()
    for node in graph.nodes:
        before = frozenset[int]().union(*(fed[source] for source in node.all_input_nodes))
        paths = [str(path).partition("@")[0] for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        inside = [at for at, block in enumerate(run) if block in paths]
        series.update(at for at in inside if at - 1 in before)
        fed[node] = before.union(inside)
    return series


def counterparts(module: nn.Module, layout: Layout) -> dict[str, str]:
    """Deep to shallow, as the layouts of the built-in models have it.

    Blocks of convolutions: every kernel of the later blocks takes the last one of its shape in the first block. Blocks
    with two norms: in every block the second takes the first. Other blocks: every matrix that of the first block.
    """
    norms = set(_norm_weights(module))
    pairs: dict[str, str] = {}
    for stage in layout.stages:
        entries = {
            block: [name for name in layout.shapes if layout.block_of[name] == block and name in layout.parameters]
            for block in stage
        }
        kernels = {block: [n for n in names if len(layout.shapes[n]) == 4] for block, names in entries.items()}
        if any(kernels[block] for block in stage[1:]):
            last = {layout.shapes[name]: name for name in kernels[stage[0]]}
            later = [name for block in stage[1:] for name in kernels[block]]
            pairs |= {name: last[layout.shapes[name]] for name in later if layout.shapes[name] in last}
            continue
        pairs_of_norms = [
            (second, first)
            for names in entries.values()
            for first, second in itertools.pairwise([n for n in names if n in norms][:2])
            if layout.shapes[first] == layout.shapes[second]
        ]
        in_stage = {deep: shallow for deep, shallow in layout.across_blocks.items() if layout.block_of[deep] in stage}
        pairs |= dict(pairs_of_norms) or in_stage
    return pairs


def _norm_weights(module: nn.Module) -> Iterator[str]:
    """Scales of layer norms and their like: a vector is the only weight, and there are no running statistics."""
    for path, part in module.named_modules():
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() == 1 and weight.numel() > 1 and not any(True for _ in part.buffers()):
            yield _join(path, "weight")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
