"""From a module to the dimensions of all tensors that it computes with."""

import contextlib
import io
import logging
import operator
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from incofl.errors import LayoutError
from incofl.inputs import Inputs
from incofl.models.infer.call import Call, Value, opaque
from incofl.models.infer.dims import OBVIOUS, Dims, hold, length, news
from incofl.models.infer.operators import find_rule

Results = dict[Node, list[Value]]


@dataclass(frozen=True)
class Trace:
    """How a module computes."""

    graph: Graph
    entries: dict[str, Dims]  # of the state dict that the operators use
    values: dict[Node, tuple[Dims, ...]]  # the dimensions of all tensors that a node returns
    output: Dims


def export(module: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    """The operators that a module applies to an example, before they are decomposed."""
    args = () if isinstance(example, dict) else example if isinstance(example, tuple) else (example,)
    kwargs = example if isinstance(example, dict) else None
    try:
        with _quiet():
            return torch.export.export(module, args, kwargs, strict=False)
    except Exception as problem:
        raise LayoutError(
            f"layout: torch.export cannot follow {type(module).__name__} ({first_line(problem)}); write its Layout by "
            "hand"
        ) from problem


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what torch prints, logs and warns about while it exports: an error of ours says it in one line."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def trace(module: nn.Module, example: Inputs) -> Trace:
    """Applies the rule of every operator in turn."""
    program = export(module, example)
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state = module.state_dict()
    entries: dict[str, Dims] = {}
    results: Results = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = stored.get(node.name)
            shape = next(iter(shapes_of(node)), ())
            if name in state:
                if node.users:
                    entries[name] = news(shape)
                results[node] = [Value(entries.get(name, ()), learned=True)]
            else:
                given = node.name in signature.user_inputs
                reason = OBVIOUS if given else f"{name or node.name} is not part of the state"
                results[node] = [Value(news(shape, reason))]
        elif node.op != "output":
            results[node] = _apply(node, results)
    output = _output(module, program.graph.output_node(), results)
    return Trace(program.graph, entries, {n: tuple(v.dims for v in values) for n, values in results.items()}, output)


def _apply(node: Node, results: Results) -> list[Value]:
    """The values that a node returns."""

    def known(argument: Any) -> Any:
        if isinstance(argument, Node):
            values = results[argument]
            return values[0] if len(values) == 1 else values
        return [known(entry) for entry in argument] if isinstance(argument, list | tuple) else argument

    if node.target is operator.getitem:
        source, at = node.args
        assert isinstance(source, Node)
        assert isinstance(at, int)
        return [results[source][at]]
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
    many = found if isinstance(found, list) else [found]
    if any(shape != tuple(length(d) for d in dims) for shape, dims in zip(call.shapes, many, strict=False)):
        many = opaque(call)  # the rule is for another overload, such as the largest element instead of the larger one
    return [Value(dims, learned) for dims in many]


def _output(module: nn.Module, node: Node, results: Results) -> Dims:
    (given,) = node.args
    given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
    if not isinstance(given, Node) or len(results[given]) != 1 or not results[given][0].dims:
        raise LayoutError(
            f"layout: {type(module).__name__} gives something else than one tensor, expected (batch, classes), "
            "(batch, classes, length) or another tensor with one row for each example"
        )
    output = results[given][0].dims
    hold(*output)
    return output


def first_line(problem: BaseException) -> str:
    """The first line of an exception's message."""
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


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
