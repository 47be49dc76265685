"""The apps of Flower: a server around the loop that every engine runs, nodes around the one local training loop."""

import contextlib
import dataclasses
import json
import resource
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from incofl.config import AnyConfig, Config, make_config
from incofl.config.resolve import GIVEN, OBJECTS, name_of
from incofl.costs import human, read_limits
from incofl.data import Data
from incofl.engine.build import build
from incofl.engine.federation import Federation
from incofl.engine.result import Result
from incofl.engine.run import AnyModel, run
from incofl.engine.worker import Worker, return_freed_memory
from incofl.errors import ConfigError, IncoflError
from incofl.flower.backend import FACTS, FlowerBackend
from incofl.flower.memory import NodeMemory
from incofl.flower.protocol import Answer, Order, decode_order, encode_answer, encode_problem, encode_reply
from incofl.flower.settings import NodeConfig, Settings, read_run_config
from incofl.method import Method
from incofl.models import Model
from incofl.models.hf import PREFIX
from incofl.models.pretrained import with_pretrained
from incofl.options import from_table
from incofl.split import Slice
from incofl.task import Task
from incofl.tensors import Tensors


def make_server_app(
    config: AnyConfig = None,
    *,
    model: AnyModel = None,
    data: Data | str | None = None,
    method: Method | str | None = None,
    task: Task | str | None = None,
    **settings: Any,
) -> ServerApp:
    """A server app that trains a federation on Flower's nodes, into a run folder like any other.

    Config and objects are as for ``incofl.run``, and ``settings`` are the fields of ``Settings``. Flower's run config
    may override both: ``config`` names another config, and ``rounds`` or ``data.alpha`` are keys of it. If only the
    nodes have training examples, the train part of the server's ``data`` has 0 examples, which tell their shape and
    type, and its test part is what the server evaluates on.
    """
    chosen, app = from_table(Settings(), settings, "settings"), ServerApp()
    objects = {"model": model, "data": data, "method": method, "task": task}

    def main(grid: Grid, context: Context) -> None:
        try:
            ours, named, overrides = read_run_config(context.run_config, chosen)
            serve(grid, make_config(named or config, overrides, **objects), ours)
        except IncoflError as problem:
            raise problem.with_traceback(None) from None  # what Flower shows of it ends with one clear line

    app.main()(main)
    return app


def serve(grid: Grid, config: Config, settings: Settings) -> Result:
    """Runs a federation on the nodes of a grid and returns its result."""
    if config.engine.compile:
        raise ConfigError("engine.compile: got true, expected false: nodes are new processes in every turn")
    with contextlib.ExitStack() as stack:
        progress = None  # lines
        if settings.metrics_port:
            from incofl.flower.monitor import Monitor  # prometheus-client is not needed otherwise

            progress = stack.enter_context(contextlib.closing(Monitor(settings.metrics_port, settings.metrics_host)))
        backend = FlowerBackend(grid, settings)
        result = run(config, settings.out, resume=settings.resume, progress=progress, backend=backend)
    metric = "" if result["accuracy"] is None else f", {result['metric']} {result['accuracy']:.4g}"
    traffic = ", ".join(f"{human(result[f'bytes_{direction}'], 'B')} {direction}" for direction in ("down", "up"))
    print(f"{result['rounds']} rounds{metric}; {traffic}, {result['seconds']:.0f} s; records in {settings.out}")
    return result


def make_client_app(
    *,
    model: AnyModel = None,
    data: Callable[[Context], Any] | Data | str | None = None,
    method: Method | str | None = None,
    task: Task | str | None = None,
    allowed: Collection[str] = (),
) -> ClientApp:
    """A client app that trains what the server sends; each node is described by a ``NodeConfig``.

    A node imports nothing that only the server names: a ``package.module:attribute`` of the server's config must be one
    of the objects, or ``allowed``.

    The objects are those that ``make_server_app`` was given; of data, the node takes its client's part. If ``data`` is
    a function of Flower's context, it returns the node's own examples, as ``Data`` or in a form that ``Data`` takes,
    which the server never sees. If they have a test part, the node evaluates each model that it receives on it.
    """
    node, app = Node({"model": model, "data": data, "method": method, "task": task}, allowed), ClientApp()
    app.train()(lambda message, context: _reply(node.train, message, context))
    app.query()(lambda message, context: _reply(node.introduce, message, context))
    return app


def _reply(act: Callable[[RecordDict, Context], RecordDict], message: Message, context: Context) -> Message:
    """The result, or in one line what went wrong; a bug is passed on to Flower."""
    try:
        content = act(message.content, context)
    except (IncoflError, MemoryError, RuntimeError) as problem:
        lacks_memory = isinstance(problem, MemoryError | torch.OutOfMemoryError)
        lacks_memory |= "can't allocate memory" in str(problem)  # torch's own words on a CPU
        if not lacks_memory and not isinstance(problem, IncoflError):
            raise
        content = encode_problem(str(problem) or type(problem).__name__, "memory" if lacks_memory else "")
    return Message(content, reply_to=message)


class Node:
    """What a node does, with the objects that it was given."""

    def __init__(self, objects: dict[str, Any], allowed: Collection[str] = ()) -> None:
        self._allowed = allowed
        self._objects = {kind: value for kind, value in objects.items() if value is not None}
        self._own_data = callable(objects["data"])
        self._built: tuple[Any, Config, Federation, Worker] | None = None  # the last, after what it was built from

    def train(self, content: RecordDict, context: Context) -> RecordDict:
        start, cpu_start = time.perf_counter(), time.process_time()
        order, state, extra, frozen = decode_order(content)
        node, said = self._describe(context, order.client)
        if order.known not in ("", str(said)):
            return self.introduce(content, context)  # it is not what it was, and this slice may be too large for it
        if node.memory is not None:
            return_freed_memory()
        config, federation, worker = self._prepared(order, node, context)
        slice_ = federation.slice_of(order)
        slice_.check(state, "the model that was sent", uploaded=False)
        memory = NodeMemory(context.state, order, node.state_dir)
        found = memory.frozen(frozen, lambda: _own_frozen(config, federation.model, slice_))
        if found is None:
            return encode_problem("its frozen parameters are not the server's", "frozen")
        state |= found
        remembered = memory.recall(federation)
        measured: dict[str, Any] = {"forgot": int(remembered is None)}
        whole = not federation.splitter.by_client  # else a node holds less than what is evaluated
        if self._own_data and len(held_out := federation.data.test) and whole:
            # No more at a time than in training, for which the level was chosen.
            score = worker.score(order.level, order.round, state, held_out, federation.local.batch_size)
            totals = score.totals[federation.task.first].flatten().tolist()
            measured |= {"tested": len(held_out), "totals": tuple(totals)}
        upload = worker.turn(order, state, extra, remembered)
        memory.keep(upload.memory)
        measured |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        measured["peak_memory"] = peak if sys.platform == "darwin" else 1024 * peak
        return encode_reply(upload, order.round, **measured)

    def introduce(self, content: RecordDict, context: Context) -> RecordDict:
        """What this node can do."""
        examples = len(self._data(context, {}).train) if self._own_data else None
        return encode_answer(dataclasses.replace(self._describe(context)[1], examples=examples))

    def _describe(self, context: Context, client: int | None = None) -> tuple[NodeConfig, Answer]:
        """This node's config, and what that says of it; if it names no client, the node is the one given."""
        strict = not self._own_data  # a function that loads data may read other keys
        known = {field.name for field in dataclasses.fields(NodeConfig)}
        given = {key.replace("-", "_"): value for key, value in context.node_config.items()}
        given = {key: value for key, value in given.items() if strict or key in known}
        node, limits = from_table(NodeConfig(), given, "node-config"), read_limits(given, "node-config")
        return node, Answer(given.get("partition_id", client), node.level, **limits)

    def _data(self, context: Context, facts: Mapping[str, Any]) -> Data:
        """The examples that only this node has, with what the server says of all; a ``Data`` keeps its name."""
        given = self._objects["data"](context)
        if isinstance(given, Data):
            return dataclasses.replace(given, **{**facts, "name": given.name})
        return Data(given, **facts)

    def _prepared(self, order: Order, node: NodeConfig, context: Context) -> tuple[Config, Federation, Worker]:
        """What an order's turns are computed with: built once per process, not once per message."""
        key, objects = (order.config, order.facts, node.data_root, node.device, node.precision), self._objects
        if self._own_data:
            objects = objects | {"data": self._data(context, _facts(order.facts))}
        if self._built is None or self._built[0] != key:
            config = _agreed(order.config, objects, self._allowed)
            place = dataclasses.replace(config.data, root=node.data_root or config.data.root)
            ours = config.engine
            engine = dataclasses.replace(
                ours, device=node.device or ours.device, precision=node.precision or ours.precision
            )
            config = dataclasses.replace(config, data=place, engine=engine)
            nobody = [torch.arange(0)] * config.num_clients if self._own_data else None
            federation = build(config, nobody, begun=True)  # without initial weights: the order brings the model
            self._built = key, config, federation, Worker(federation)
        _, config, federation, worker = self._built
        if self._own_data:
            everything = [torch.arange(len(objects["data"].train))] * config.num_clients
            federation = dataclasses.replace(federation, data=objects["data"], partition=everything)
            worker = Worker(federation)
        return config, federation, worker


def _agreed(toml: str, objects: dict[str, Any], allowed: Collection[str]) -> Config:
    """The server's config, if this node was given the objects that it names."""
    try:
        theirs: Any = tomllib.loads(toml)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise ConfigError(f"config: the server's is not TOML ({problem})") from None
    hint = "give make_server_app and make_client_app the same objects"
    for kind, (table, key) in OBJECTS.items():
        named = _text(theirs, table, key)
        own = name_of(objects[kind]) if kind in objects else "nothing"
        if own != named and (kind in objects or named.startswith(GIVEN)):
            raise ConfigError(f"{kind}: the server has {named}, this node {own}; {hint}")
        if own != named:
            _check_allowed(kind, named, allowed)
    _check_allowed("local.optimizer", _text(theirs, "local", "optimizer"), allowed)
    config = make_config(theirs, **objects)
    ours = tomllib.loads(config.to_toml())
    for key in ours.keys() | theirs.keys():
        if ours.get(key) != theirs.get(key):
            raise ConfigError(f"{key}: the server has {theirs.get(key)}, this node {ours.get(key)}; {hint}")
    return config


def _facts(text: str) -> dict[str, Any]:
    """What the server says of all nodes' data."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"order.facts: not JSON ({problem})") from None
    if not isinstance(facts, dict) or facts.keys() - set(FACTS):
        raise ConfigError(f"order.facts: got {text!r:.80}, expected some of {', '.join(FACTS)}")
    return facts


def _text(values: Any, table: str, key: str) -> str:
    """A value of the server's config, which must be a text."""
    inside = values.get(table) if table else values
    if not isinstance(inside, dict) or not isinstance(value := inside.get(key), str):
        raise ConfigError(f"{f'{table}.{key}'.strip('.')}: the server has none, expected a name")
    return value


def _check_allowed(kind: str, named: str, allowed: Collection[str]) -> None:
    """Refuses to import what this node was not installed with."""
    if ":" in named and not named.startswith(PREFIX) and named not in allowed:
        hint = f"make_client_app(allowed=[{named!r}]) would allow it"
        raise ConfigError(f"{kind}: the server names {named!r:.100}, which this node was not installed with; {hint}")


def _own_frozen(config: Config, model: Model, slice_: Slice) -> Tensors:
    """The frozen part of a slice as this node's own build of the model has it."""
    if config.model.pretrained is not None:
        with contextlib.suppress(ConfigError):  # without the file, the server sends the frozen part
            model = with_pretrained(model, config.model.pretrained)
    return slice_.look({name: model.initial[name] for name in slice_.frozen})
