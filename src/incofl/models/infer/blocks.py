"""Repeated blocks of a model, and which of their weights InCo mixes."""

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn.modules.module import register_module_forward_hook

from incofl.layout import Layout
from incofl.models.infer.trace import paths
from incofl.models.infer.trial import problem_with
from incofl.split.submodel import Skip
from incofl.tensors import Inputs, call

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

    def divide(run: Stage) -> list[Stage]:
        """Divides a run where a block changes the shape; returns nothing if the model needs the later blocks."""
        series, without, divided = _in_series(graph, run), copy.deepcopy(module), [run[:1]]
        for block in run[1:]:
            if block in series and block in steady:
                divided[-1] += (block,)
                without.set_submodule(block, Skip())
            else:
                divided.append((block,))
        return divided if problem_with(without, example, shape) is None else []

    places = [""]
    for path in places:
        children = [f"{path}.{name}".removeprefix(".") for name, _ in module.get_submodule(path).named_children()]
        runs = [run for run in _runs(module, children) if order.keys() >= set(run)]
        taken: set[str] = set()
        for run in runs:
            divided = divide(run)
            if any(len(stage) > 1 for stage in divided):
                stages += divided
                taken.update(run)
            elif [*run] == children and any(list(module.get_submodule(block).children()) for block in run):
                lone += divided
        places += [child for child in children if child not in taken]

    kinds = [type(module.get_submodule(stage[0])) for stage in (*stages, *lone)]
    # A single block is a stage where its class forms others: the first stages of a ResNet14, all of a ResNet10.
    stages += [run for run in lone if kinds.count(type(module.get_submodule(run[0]))) > 1]
    return tuple(sorted(stages, key=lambda stage: order[stage[0]]))


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


def _runs(module: nn.Module, children: list[str]) -> Iterator[Stage]:
    """Neighbouring children of one class, with numbers as names and parameters of their own."""
    numbered = [child for child in children if child.rpartition(".")[2].isdigit()]
    for _, group in itertools.groupby(numbered, key=lambda child: type(module.get_submodule(child))):
        if run := tuple(child for child in group if list(module.get_submodule(child).parameters())):
            yield run


def _in_series(graph: Graph, run: Stage) -> set[str]:
    """The blocks of a run that get the output of the block before them, directly or by way of something else."""
    fed: dict[object, set[str]] = {}  # the blocks before each node
    series: set[str] = set()
    for node in graph.nodes:
        before = set[str]().union(*(fed[source] for source in node.all_input_nodes))
        inside = set(run).intersection(paths(node))
        series.update(block for last, block in itertools.pairwise(run) if block in inside and last in before)
        fed[node] = before | inside
    return series


def counterparts(module: nn.Module, layout: Layout) -> dict[str, str]:
    """Deep to shallow, as in the layouts of the built-in models.

    Blocks of convolutions: every kernel of the later blocks takes the last one of its shape in the first block. Blocks
    with two norms: in every block the second takes the first. Other blocks: every matrix that of the first block.
    """
    shapes, pairs = layout.shapes, dict[str, str]()
    for stage in layout.stages:
        trained = [[n for n in shapes if n in layout.parameters and layout.block_of[n] == block] for block in stage]
        first, *later = [[name for name in names if _has_kernels(module, name)] for names in trained]
        last = {shapes[name]: name for name in first}
        norms = [[name for name in names if _scales_a_norm(module, name)][:2] for names in trained]
        if any(later):
            pairs |= {name: last[shapes[name]] for names in later for name in names if shapes[name] in last}
        elif seconds := {two[1]: two[0] for two in norms if len(two) == 2 and shapes[two[0]] == shapes[two[1]]}:
            pairs |= seconds
        else:
            pairs |= {deep: ref for deep, ref in layout.across_blocks.items() if layout.block_of[deep] in stage}
    return pairs


def _has_kernels(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of a convolution, over images or over signals."""
    size, layer = module.get_parameter(name).dim(), module.get_submodule(name.rpartition(".")[0])
    return size == 4 or (size == 3 and isinstance(layer, nn.Conv1d))


def _scales_a_norm(module: nn.Module, name: str) -> bool:
    """Whether a weight is that of a layer norm or the like: a vector, and there are no running statistics."""
    path, _, own = name.rpartition(".")
    weight, layer = module.get_parameter(name), module.get_submodule(path)
    return own == "weight" and weight.dim() == 1 and weight.numel() > 1 and not list(layer.buffers())
