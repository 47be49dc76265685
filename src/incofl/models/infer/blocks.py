"""Repeated blocks of a model, and which of their weights InCo mixes."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn.modules.module import register_module_forward_hook

from incofl.errors import LayoutError
from incofl.layout import Layout, tied_names
from incofl.models.infer.trace import paths
from incofl.models.infer.trial import problem_with
from incofl.split.submodel import Skip
from incofl.tensors import Inputs, call

Stage = tuple[str, ...]
Results = dict[str, tuple[int | str | None, ...]]  # see ``Layout.results``
CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass
class Watched:
    """What a forward pass shows about the modules of a model, by their paths."""

    shape: torch.Size = field(default_factory=torch.Size)  # of the model's output
    order: dict[str, int] = field(default_factory=dict)  # in which they are called
    steady: set[str] = field(default_factory=set)  # those that keep the shape of their input
    results: Results = field(default_factory=dict)  # of those that return tuples
    after: dict[str, set[str]] = field(default_factory=dict)  # the modules whose very output each one gets
    returned: dict[str, set[str]] = field(default_factory=dict)  # the modules that return the very same output


def find_stages(
    module: nn.Module, example: Inputs, graph: Graph | None, lists: Sequence[str] = ()
) -> tuple[tuple[Stage, ...], Results]:
    """The stages of a module, in the order in which they are computed, and what their blocks return.

    A stage is a run of numbered children of one class and structure, such as those of a ``ModuleList`` or
    ``Sequential``, computed one after the other; all but its first can be left out, for they keep the shape of their
    input. A block that changes the shape starts a new stage. Of runs within runs the outermost counts, but a child that
    is nothing but a list of blocks is a stage and no block. Where ``lists`` says which modules hold the blocks, their
    children are taken as they are.
    """
    seen = _watch(module, example)
    tied = {path for pair in tied_names(module).items() for path in pair}
    stages: list[Stage] = []
    lone: list[Stage] = []  # of a single block

    def divide(run: Stage) -> list[Stage]:
        """Divides a run where a block changes the shape; returns nothing if the model needs the later blocks."""
        series = set(run) if lists else _in_series(graph, run, seen)
        without, divided = copy.deepcopy(module), [run[:1]]
        for block in run[1:]:
            shares = any(name.startswith(f"{block}.") for name in tied)
            alike = lists or _alike(module.get_submodule(divided[-1][0]), module.get_submodule(block))
            if block in series and block in seen.steady and alike and not shares:
                divided[-1] += (block,)
                without.set_submodule(block, Skip(without.get_submodule(block), seen.results.get(block, ())))
            else:
                divided.append((block,))
        problem = problem_with(without, example, seen.shape)
        if problem is not None and lists:
            raise LayoutError(f"model.blocks: the model fails without the later blocks of {lists[0]!r}: {problem}")
        return divided if problem is None else []

    places = [""]
    for path in lists or places:
        children = _children(module, path)
        if lists and not children:
            raise LayoutError(f"model.blocks: got {path!r}, expected the path of a list of blocks, as 'model.layers'")
        taken: set[str] = set()
        for run in [tuple(children)] if lists else _runs(module, children):
            if not seen.order.keys() >= set(run) or (
                not lists and any(_is_stage(module, block, seen) for block in run)
            ):
                continue
            divided = divide(run)
            if any(len(stage) > 1 for stage in divided):
                stages += divided
                taken.update(run)
            elif run == tuple(children) and len(run) == 1 and _children(module, run[0]):
                lone += divided
        places += [child for child in children if child not in taken]

    kinds = [type(module.get_submodule(stage[0])) for stage in (*stages, *lone)]
    # A single block is a stage where its class forms others: the first stages of a ResNet14, all of a ResNet10.
    lone = [run for run in lone if kinds.count(type(module.get_submodule(run[0]))) > 1]
    stages += [run for run in lone if not any(block.startswith(f"{run[0]}.") for block, *_ in (*stages, *lone))]
    ordered = tuple(sorted(stages, key=lambda stage: seen.order[stage[0]]))
    return ordered, {block: seen.results[block] for stage in ordered for block in stage if block in seen.results}


def _children(module: nn.Module, path: str) -> list[str]:
    try:
        return [f"{path}.{name}".removeprefix(".") for name, _ in module.get_submodule(path).named_children()]
    except AttributeError:
        return []


def _watch(module: nn.Module, example: Inputs) -> Watched:
    """Watches a forward pass."""
    names = {part: path for path, part in module.named_modules()}
    seen, made = Watched(), dict[int, tuple[set[str], Tensor]]()  # tensors are kept: their ids are not used again

    def note(part: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if (name := names.get(part)) is None:  # one that another module hides from its children
            return
        given: dict[Any, Any] = {**dict(enumerate(args)), **options}
        first = next(iter(given.values()), None)
        result = output[0] if isinstance(output, tuple) and output else output
        seen.order.setdefault(name, len(seen.order))
        if not isinstance(first, Tensor) or not isinstance(result, Tensor):
            return
        seen.after[name] = made[id(first)][0] if id(first) in made else set()
        seen.returned[name] = made.setdefault(id(result), (set(), result))[0]
        seen.returned[name].add(name)
        if first.shape == result.shape:
            seen.steady.add(name)
        if isinstance(output, tuple):
            places = [next((at for at, value in given.items() if value is kept), None) for kept in output[1:]]
            seen.results[name] = (next(iter(given)), *places)

    with register_module_forward_hook(note, with_kwargs=True):
        seen.shape = call(module, example).shape
    return seen


def _runs(module: nn.Module, children: list[str]) -> Iterator[Stage]:
    """Neighbouring children of one class, with numbers as names and matrices or kernels of their own."""
    numbered = [child for child in children if child.rpartition(".")[2].isdigit()]
    for _, group in itertools.groupby(numbered, key=lambda child: type(module.get_submodule(child))):
        if run := tuple(c for c in group if any(p.dim() > 1 for p in module.get_submodule(c).parameters())):
            yield run


def _is_stage(module: nn.Module, path: str, seen: Watched) -> bool:
    """Whether a module returns what the last of a list of blocks in it returns, and has no other parameters."""
    everything = len(list(module.get_submodule(path).parameters()))
    for place, _ in module.get_submodule(path).named_modules(prefix=path):
        for run in _runs(module, _children(module, place)):
            parts = [module.get_submodule(part) for part in run]
            of_parts = sum(len(list(part.parameters())) for part in parts)
            blocks = len(run) > 1 and all(list(p.children()) and not isinstance(p, CONTAINERS) for p in parts)
            if blocks and of_parts == everything and run[-1] in seen.returned.get(path, ()):
                return True
    return False


def _alike(first: nn.Module, block: nn.Module) -> bool:
    """Whether two blocks have the same parts; of a class that is no mere container, one may have some in addition."""
    ours, theirs = ({(name, type(part)) for name, part in m.named_modules() if name} for m in (first, block))
    if isinstance(block, CONTAINERS):
        return ours == theirs
    names, others = ({name for name, _ in m.named_parameters()} for m in (first, block))
    return names <= others or names >= others


def _in_series(graph: Graph | None, run: Stage, seen: Watched) -> set[str]:
    """The blocks of a run that get the output of the block before them, with which nothing else is mixed on the way."""
    if graph is None:
        return {block for last, block in itertools.pairwise(run) if last in seen.after.get(block, ())}
    fed: dict[object, set[str]] = {}  # the block that alone is behind each node
    series: set[str] = set()
    for node in graph.nodes:
        sources = [fed[source] for source in node.all_input_nodes]
        inside = set(run).intersection(paths(node))
        behind = set[str]().union(*sources)
        series.update(block for last, block in itertools.pairwise(run) if block in inside and last in behind)
        fed[node] = inside or (set.intersection(*sources) if sources else set())
    return series


def counterparts(module: nn.Module, layout: Layout) -> dict[str, str]:
    """Deep to shallow, as in the layouts of the built-in models.

    Blocks of convolutions: every kernel of the later blocks takes the last one of its shape in the first block. Blocks
    with two norms: in every block the second takes the first. Other blocks, and those of convolutions whose first block
    has no such kernel: every matrix or kernel that of the first block in which it has this shape.
    """
    shapes, pairs = layout.shapes, dict[str, str]()
    for stage in layout.stages:
        trained = [[n for n in shapes if n in layout.parameters and layout.block_of[n] == block] for block in stage]
        first, *later = [[name for name in names if _has_kernels(module, name)] for names in trained]
        last = {shapes[name]: name for name in first}
        norms = [[name for name in names if _scales_a_norm(module, name)][:2] for names in trained]
        if any(later):
            mixed = {name: last[shapes[name]] for names in later for name in names if shapes[name] in last}
            pairs |= mixed or {n: ref for n, ref in layout.across_blocks.items() if layout.block_of[n] in stage}
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
