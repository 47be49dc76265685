"""From a module to the dimensions of all tensors that it computes with."""

import operator
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from incofl.errors import LayoutError
from incofl.infer.call import Call, Value
from incofl.infer.dims import OBVIOUS, Dims, hold, news
from incofl.infer.operators import find_rule


@dataclass(frozen=True)
class Trace:
    """What became of an example in a module.

    Attributes:
        graph: the operators.
        entries: the dimensions of each entry of the state dict that the operators use.
        values: the dimensions of each tensor that a node of the graph gives.
        output: the dimensions of the result.
    """

    graph: Graph
    entries: dict[str, Dims]
    values: dict[Node, tuple[Dims, ...]]
    output: Dims


def export(module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The operators that the module applies to an example, before they are taken apart; module and example on meta."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about running the exported program, which nobody does
            return torch.export.export(module, (example,), strict=False)
    except Exception as problem:
        raise LayoutError(
            f"layout: torch.export cannot follow {type(module).__name__} ({first_line(problem)}); write its Layout by "
            "hand"
        ) from problem


def trace(module: nn.Module, example: Tensor) -> Trace:
    """Applies the rule of every operator in turn."""
    program = export(module, example)
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state = module.state_dict()
    entries: dict[str, Dims] = {}
    results: dict[Node, Value | list[Value]] = {}
    output: Dims | None = None
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = stored.get(node.name)
            shape = next(iter(shapes_of(node)), ())
            if name in state:
                results[node] = Value(entries.setdefault(name, news(shape)), learned=True)
            else:  # the input, or a constant
                given = node.name in signature.user_inputs
                results[node] = Value(
                    news(shape, OBVIOUS if given else f"{name or node.name} is not part of the state")
                )
        elif node.op == "output":
            output = _output(module, node, results)
        else:
            results[node] = _apply(node, results)
    assert output is not None
    used = {stored.get(node.name) for node in program.graph.nodes if node.users}
    entries = {name: dims for name, dims in entries.items() if name in used}
    values = {node: tuple(v.dims for v in _many(value)) for node, value in results.items()}
    return Trace(program.graph, entries, values, output)


def first_line(problem: BaseException) -> str:
    """Of what an exception says, in case it says much."""
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def _apply(node: Node, results: dict[Node, Value | list[Value]]) -> Value | list[Value]:
    def known(argument: Any) -> Any:
        if isinstance(argument, Node):
            return results[argument]
        if isinstance(argument, list | tuple):
            return [known(entry) for entry in argument]
        return argument

    if node.target is operator.getitem:
        source, at = known(list(node.args))
        one: Value = source[at] if isinstance(source, list) else source
        return one
    if not isinstance(node.target, torch._ops.OpOverload):
        raise LayoutError(f"layout: {node.target} in {where(node)} cannot be followed; write the Layout by hand")
    schema = node.target._schema
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    arguments = {a.name: known(given.get(a.name, a.default_value)) for a in schema.arguments}
    call = Call(schema.name.replace("::", "."), where(node), arguments, shapes_of(node))
    if not call.shapes:  # an assertion
        return []
    learned = bool(call.values) and all(value.learned for value in call.values)
    found = find_rule(node.target)(call)
    return [Value(dims, learned) for dims in found] if isinstance(found, list) else Value(found, learned)


def _output(module: nn.Module, node: Node, results: dict[Node, Value | list[Value]]) -> Dims:
    (given,) = node.args
    given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
    value = results[given] if isinstance(given, Node) else None
    if not isinstance(value, Value) or len(value) < 2:
        raise LayoutError(
            f"layout: {type(module).__name__} gives something else than one tensor of logits, expected (batch, classes)"
            " or (batch, classes, length)"
        )
    for dim in value.dims:
        hold(dim)
    return value.dims


def where(node: Node) -> str:
    """The path of the module that calls an operator."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return (stack and str(stack[-1][0])) or "the model itself"


def shapes_of(node: Node) -> tuple[tuple[int, ...], ...]:
    """Of the tensors that a node gives."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else [value]
    return tuple(tuple(int(n) for n in t.shape) for t in tensors if isinstance(t, Tensor))


def _many(value: Value | list[Value]) -> list[Value]:
    return value if isinstance(value, list) else [value]
