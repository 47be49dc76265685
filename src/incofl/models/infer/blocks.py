"""Repeated blocks of a model, and which of their weights InCo mixes."""

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn.modules.module import register_module_forward_hook

from incofl.inputs import Inputs, call
from incofl.layout import Layout
from incofl.models.infer.trace import paths
from incofl.models.infer.trial import problem_with
from incofl.split.submodel import Skip

Stage = tuple[str, ...]


def find_stages(module: nn.Module, example: Inputs, graph: Graph) -> tuple[Stage, ...]:
    """The stages of a module, in the order in which they are computed.

    A stage is a run of numbered children of one class, such as those of a ``ModuleList`` or ``Sequential``, computed
    one after the other; all but its first can be left out, for they keep the shape of their input. A block that changes
    the shape starts a new stage. Of runs within runs the outermost counts.
    """
    shape, steady, order = _watch(module, example)
    stages: list[Stage] = []
    lone: list[Stage] = []  # of a single block

    def kind(stage: Stage) -> type[nn.Module]:
        return type(module.get_submodule(stage[0]))

    def divide(run: Stage) -> list[Stage]:
        """Divides a run where a block changes the shape; returns nothing if the model needs the later blocks."""
        series = _in_series(graph, run)
        divided: list[Stage] = []
        for at, block in enumerate(run):
            if divided and at in series and block in steady:
                divided[-1] += (block,)
            else:
                divided.append((block,))
        without = copy.deepcopy(module)
        for block in (block for stage in divided for block in stage[1:]):
            without.set_submodule(block, Skip())
        return divided if problem_with(without, example, shape) is None else []

    def look(parent: nn.Module, path: str) -> None:
        """Takes the runs among the children that can be divided into stages, and looks into all other children."""
        taken: set[str] = set()
        runs = [run for run in _runs(parent, path) if all(block in order for block in run)]
        for run in runs:
            divided = divide(run)
            if any(len(stage) > 1 for stage in divided):
                stages.extend(divided)
                taken.update(run)
            elif len(runs) == 1 and len(run) == len(list(parent.children())):
                composite = [block for block in run if any(True for _ in module.get_submodule(block).children())]
                lone.extend(divided if composite else [])
        for name, child in parent.named_children():
            if (below := _join(path, name)) not in taken:
                look(child, below)

    look(module, "")
    kinds = [kind(stage) for stage in (*stages, *lone)]
    # A single block is a stage where its class forms others: the first stages of a ResNet14, all of a ResNet10.
    found = [*stages, *(run for run in lone if kinds.count(kind(run)) > 1)]
    return tuple(sorted(found, key=lambda stage: order[stage[0]]))


def _watch(module: nn.Module, example: Inputs) -> tuple[torch.Size, set[str], dict[str, int]]:
    """The shape of the output, which modules keep the shape of their input, and in which order they are called."""
    names = {part: path for path, part in module.named_modules()}
    steady: set[str] = set()
    order: dict[str, int] = {}

    def note(part: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        order.setdefault(names[part], len(order))
        first = inputs[0] if inputs else None
        if isinstance(first, Tensor) and isinstance(output, Tensor) and first.shape == output.shape:
            steady.add(names[part])

    with register_module_forward_hook(note):
        return call(module, example).shape, steady, order


def _runs(module: nn.Module, path: str) -> Iterator[Stage]:
    """Neighbouring children of one class, with numbers as names and parameters of their own."""
    numbered = [(name, child) for name, child in module.named_children() if name.isdigit()]
    for _, group in itertools.groupby(numbered, key=lambda entry: type(entry[1])):
        run = tuple(_join(path, name) for name, child in group if any(True for _ in child.parameters()))
        if run:
            yield run


def _in_series(graph: Graph, run: Stage) -> set[int]:
    """Which blocks of a run get the output of the block before them, directly or by way of something else."""
    fed: dict[object, frozenset[int]] = {}
    series: set[int] = set()
    for node in graph.nodes:
        before = frozenset[int]().union(*(fed[source] for source in node.all_input_nodes))
        inside = [at for at, block in enumerate(run) if block in paths(node)]
        series.update(at for at in inside if at - 1 in before)
        fed[node] = before.union(inside)
    return series


def counterparts(module: nn.Module, layout: Layout) -> dict[str, str]:
    """Deep to shallow, as in the layouts of the built-in models.

    Blocks of convolutions: every kernel of the later blocks takes the last one of its shape in the first block. Blocks
    with two norms: in every block the second takes the first. Other blocks: every matrix that of the first block.
    """
    norms = set(_norm_weights(module))
    pairs: dict[str, str] = {}
    for stage in layout.stages:
        trained = [name for name in layout.shapes if name in layout.parameters]
        names = {block: [name for name in trained if layout.block_of[name] == block] for block in stage}
        kernels = {block: [name for name in own if len(layout.shapes[name]) == 4] for block, own in names.items()}
        if later := [name for block in stage[1:] for name in kernels[block]]:
            last = {layout.shapes[name]: name for name in kernels[stage[0]]}
            pairs |= {name: last[layout.shapes[name]] for name in later if layout.shapes[name] in last}
            continue
        firsts = [[n for n in own if n in norms][:2] for own in names.values()]
        second_to_first = {
            two[1]: two[0] for two in firsts if len(two) == 2 and layout.shapes[two[0]] == layout.shapes[two[1]]
        }
        in_stage = {deep: shallow for deep, shallow in layout.across_blocks.items() if layout.block_of[deep] in stage}
        pairs |= second_to_first or in_stage
    return pairs


def _norm_weights(module: nn.Module) -> Iterator[str]:
    """Scales of layer norms and the like: the only weight is a vector, and there are no running statistics."""
    for path, part in module.named_modules():
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() == 1 and weight.numel() > 1 and not any(True for _ in part.buffers()):
            yield _join(path, "weight")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
