"""The formats of exported models: how each is written, read back and used."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from incofl.engine.files import atomic_write
from incofl.errors import needs_extra
from incofl.models.model import EXAMPLES
from incofl.tensors import Inputs, call, map_inputs

Runner = Callable[[Inputs], Tensor]  # an exported model that was read back


class Logits(nn.Module):
    """A model that returns its logits and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        logits: Tensor = call(self.model, named or inputs)
        return logits


@dataclass(frozen=True)
class Format:
    """One format."""

    name: str
    suffix: str
    write: Callable[[Any, Path], None]  # given an ``ExportedProgram``, or the module if it holds no graph
    read: Callable[[Path, nn.Module], Runner]
    usage: str  # Python code that loads FILE and computes logits
    package: str  # what reads it
    graph: bool = True  # whether it holds what is computed, with batch norms folded; else the state under our names
    one: bool = False  # whether it takes one example at a time


def trace(model: Logits, inputs: Inputs, one: bool = False) -> ExportedProgram:
    """A model in evaluation mode as a graph of operators, for ``one`` example or for batches of any size.

    A model that computes with the size of the batch as a number can be exported for one example alone.
    """
    arguments, named = _arguments(map_inputs(itemgetter(slice(1 if one else EXAMPLES)), inputs))
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in (*arguments, *named.values()):
        shapes[tensor] = {} if one else {0: Dim.AUTO}
    with quiet():
        dynamic = shapes.dynamic_shapes(model, arguments, named)
        program = torch.export.export(model, arguments, named, dynamic_shapes=dynamic)
    return program if one or any_batch(program, inputs) else trace(model, inputs, one=True)


def any_batch(program: ExportedProgram, inputs: Inputs) -> bool:
    """Whether an exported model takes batches of other sizes than the one that it was traced with."""
    model = program.module()
    try:
        for size in (1, EXAMPLES + 1):
            call(model, map_inputs(itemgetter(slice(size)), inputs))
    except Exception:  # a guard of the graph, or an operator with a fixed shape
        return False
    return True


def _arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    if isinstance(inputs, dict):
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def _names(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs by the names that they have in a file."""
    arguments, named = _arguments(inputs)
    if len(arguments) == 1:
        return {"input": arguments[0]}
    return named or {f"input_{number}": value for number, value in enumerate(arguments)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters tell of their steps; what matters is checked afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _write_state(module: Any, path: Path) -> None:
    state = {name: value.contiguous() for name, value in module.state_dict().items()}
    atomic_write(path, save(state, {"format": "pt"}))


def _read_state(path: Path, module: nn.Module) -> Runner:
    empty = copy.deepcopy(module).eval()
    with torch.no_grad():
        for value in empty.state_dict().values():
            value.zero_()
    empty.load_state_dict(load_file(path))
    return lambda x: call(empty, x)


def _write_torch(program: Any, path: Path) -> None:
    with quiet():
        torch.export.save(program, path)


def _read_torch(path: Path, module: nn.Module) -> Runner:
    with quiet():
        model = torch.export.load(path).module()
    return lambda x: call(model, x)


def _write_onnx(program: Any, path: Path) -> None:
    arguments, named = program.example_inputs
    with needs_extra("onnx", "onnx"):
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    names: Any = list(_names(named or tuple(arguments)))
    with quiet():
        torch.onnx.export(
            program, f=str(path), input_names=names, output_names=["logits"], external_data=False, verbose=False
        )


def _read_onnx(path: Path, module: nn.Module) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(x: Inputs) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {name: value.numpy() for name, value in _names(x).items()})[0])

    return run


def _write_executorch(program: Any, path: Path) -> None:
    with quiet(), needs_extra("executorch", "executorch"):
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
    with quiet():
        made = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    atomic_write(path, made.buffer)


def _read_executorch(path: Path, module: nn.Module) -> Runner:
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")

    def run(x: Inputs) -> Tensor:
        logits: Tensor = method.execute([value.contiguous() for value in _names(x).values()])[0]
        return logits.clone()  # its memory is used again by the next call

    return run


STATE = """import safetensors.torch

state = safetensors.torch.load_file("FILE")  # what the level holds: without its other blocks, and narrower where it is
# To start from it: incofl run ... --set model.pretrained=FILE (a level that has all blocks and channels)
# The module of any level, with these weights in it: incofl.load_model(RUN, level)"""
TORCH = """import torch

model = torch.export.load("FILE").module()
logits = model(CALLED)"""
ONNX = """import onnxruntime

session = onnxruntime.InferenceSession("FILE")
(logits,) = session.run(["logits"], NAMED)  # arrays of numpy"""
EXECUTORCH = """from executorch.runtime import Runtime  # on devices: its C++, Kotlin and Swift runtimes

method = Runtime.get().load_program("FILE").load_method("forward")
logits = method.execute(LISTED)[0]  # one example at a time"""

FORMATS = {
    each.name: each
    for each in (
        Format("safetensors", ".safetensors", _write_state, _read_state, STATE, "safetensors", graph=False),
        Format("torch", ".pt2", _write_torch, _read_torch, TORCH, "torch"),
        Format("onnx", ".onnx", _write_onnx, _read_onnx, ONNX, "onnxruntime"),
        Format("executorch", ".pte", _write_executorch, _read_executorch, EXECUTORCH, "executorch", one=True),
    )
}
