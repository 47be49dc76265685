"""From a module to the dimensions of all tensors that it computes with."""

import contextlib
import io
import logging
import operator
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from incofl.errors import LayoutError
from incofl.layout import tied_names
from incofl.models.infer.dims import OBVIOUS, Call, Value, hold, length, news
from incofl.models.infer.operators import find_rule
from incofl.models.model import first_line
from incofl.tensors import Inputs


@dataclass(frozen=True)
class Trace:
    """How a module computes."""

    graph: Graph
    entries: dict[str, Value]  # of the state dict that the operators use
    values: dict[Node, list[Value]]  # all tensors that a node returns
    output: Value


def export(module: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    """The operators that a module applies to an example, before they are decomposed, in one graph."""
    args = () if isinstance(example, dict) else example if isinstance(example, tuple) else (example,)
    kwargs = example if isinstance(example, dict) else None
    try:
        with _quiet():
            program = torch.export.export(module, args, kwargs, strict=False)
        _inline(program.graph_module)
        return program
    except Exception as problem:
        words = "its steps depend on values" if "DataDependent" in type(problem).__name__ else first_line(problem)
        raise LayoutError(f"layout: torch.export cannot follow {type(module).__name__} ({words})") from problem


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what torch prints, logs and warns about while it exports: an error of ours says it in one line."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _inline(module: GraphModule) -> None:
    """Puts the operators of regions without gradients or with another precision in the place of their region."""
    graph = module.graph
    for node in [node for node in graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]:
        (region,) = [part for part in node.args if isinstance(part, Node) and part.op == "get_attr"]
        inner = module.get_submodule(str(region.target))
        assert isinstance(inner, GraphModule)
        _inline(inner)
        given = node.args[node.args.index(region) + 1 :]
        places = dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
        with graph.inserting_before(node):
            results = cast(tuple[Node, ...], graph.graph_copy(inner.graph, places))
        for user in list(node.users):
            user.replace_all_uses_with(results[cast(int, user.args[1])])
            graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(region)


def trace(module: nn.Module, example: Inputs) -> Trace:
    """Applies the rule of every operator in turn."""
    program = export(module, example)
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state, tied = module.state_dict(), tied_names(module)
    known: dict[str, Value] = {}
    entries: dict[str, Value] = {}
    values: dict[Node, list[Value]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            (shape,) = shapes_of(node) or ((),)
            name = stored.get(node.name, node.name)
            reason = OBVIOUS if node.name in signature.user_inputs else f"{name} is not part of the state"
            name = tied.get(name, name)
            value = known.setdefault(name, Value(news(shape, None if name in state else reason)))
            value.learned = name in state
            values[node] = [value]
            if value.learned and node.users:
                entries[name] = value
        elif node.op != "output":
            values[node] = _apply(node, values)
    (output,) = program.graph.output_node().args
    output = output[0] if isinstance(output, list | tuple) and len(output) == 1 else output
    assert isinstance(output, Node)  # a model gives one tensor
    hold(*values[output][0])
    return Trace(program.graph, entries, values, values[output][0])


def _apply(node: Node, values: dict[Node, list[Value]]) -> list[Value]:
    """The values that a node returns."""

    def known(argument: Any) -> Any:
        if isinstance(argument, Node):
            return values[argument][0] if len(values[argument]) == 1 else values[argument]
        return [known(entry) for entry in argument] if isinstance(argument, list | tuple) else argument

    if node.target is operator.getitem:
        source, at = node.args
        return [values[cast(Node, source)][cast(int, at)]]
    if not isinstance(node.target, torch._ops.OpOverload):
        raise LayoutError(f"layout: {node.target} in {where(node)} cannot be followed")
    schema = node.target._schema
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    arguments = {a.name: known(given.get(a.name, a.default_value)) for a in schema.arguments}
    call = Call(schema.name.replace("::", "."), where(node), arguments, shapes_of(node))
    if not call.shapes:  # an assertion
        return []
    rule = find_rule(node.target)
    try:
        found = rule(call) if rule is not None else None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        found = None  # an overload that the rule is not for
    many = found if isinstance(found, list) else [found or ()]
    if found is None or any(shape != tuple(map(length, dims)) for shape, dims in zip(call.shapes, many, strict=False)):
        # No rule, or one for another overload. To hold everything that the operator touches whole is always safe.
        call.hold(*(dim for value in call.values for dim in value), what="computes something unknown with it")
        many = [news(shape) for shape in call.shapes]
    results = [Value(dims) for dims in many]
    for value in results:
        value.learned = bool(call.values) and all(source.learned for source in call.values)
    return results


def paths(node: Node) -> list[str]:
    """The paths of the modules that call an operator, from the model itself to the innermost."""
    return [str(path).partition("@")[0] for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def where(node: Node) -> str:
    """The path of the module that calls an operator."""
    return next(reversed(paths(node)), "") or "the model itself"


def shapes_of(node: Node) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors that a node returns."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else [value]
    return tuple(tuple(int(n) for n in t.shape) for t in tensors if isinstance(t, Tensor))
