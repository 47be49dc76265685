"""A node: Flower's ``ClientApp`` around the one local training loop."""

import dataclasses
import functools
import resource
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from incofl.client import Score
from incofl.config import make_config
from incofl.costs import read_limits
from incofl.engine.build import build
from incofl.engine.executor import make_upload
from incofl.engine.federation import Federation
from incofl.engine.worker import Worker
from incofl.errors import ConfigError, IncoflError
from incofl.flower.memory import NodeMemory
from incofl.flower.messages import (
    Answer,
    Report,
    decode_order,
    encode_answer,
    encode_problem,
    encode_reply,
)
from incofl.flower.task import Task, build_own

# Of a node's config; Flower's simulation sets num-partitions.
KEYS = {"partition-id", "level", "memory", "compute", "bandwidth", "state-dir", "data-root", "device", "num-partitions"}


def make_client_app(task: Task | None = None) -> ClientApp:
    """A client app that trains what the server sends: on a task's examples, or on a built-in data set's.

    A node's config (``flower-supernode --node-config``) may say:

        partition-id   its client number; without, it gets the next free one
        level          the level it wants; or its limits, of which the largest model that fits is found:
        memory         for training, such as "512 MB"
        compute        multiply-accumulates per example, such as "30 MMAC"
        bandwidth      bytes a round, down and up together, such as "50 MB"
        state-dir      a folder for what it remembers, so that it survives a restart
        data-root      the folder of a built-in data set, instead of the server's data.root
        device         torch device, instead of the server's engine.device
    """
    app = ClientApp()
    app.train()(functools.partial(_safely, functools.partial(_train, task)))
    app.query()(functools.partial(_safely, functools.partial(_introduce, task)))
    return app


def _safely(act: Any, message: Message, context: Context) -> Message:
    """Tells the server what went wrong, where that can be said in a line; what is a bug goes its way through Flower."""
    try:
        content = act(message.content, context)
    except IncoflError as problem:
        content = encode_problem(str(problem))
    except (MemoryError, torch.OutOfMemoryError) as problem:
        content = encode_problem(str(problem) or "MemoryError", memory=True)
    except RuntimeError as problem:
        if "can't allocate memory" not in str(problem):  # torch's own words on a CPU
            raise
        content = encode_problem(str(problem), memory=True)
    return Message(content, reply_to=message)


def _train(task: Task | None, content: RecordDict, context: Context) -> RecordDict:
    """A turn."""
    start, used = time.perf_counter(), _cpu_seconds()
    order, state, sent = decode_order(content)
    job = order.job
    if order.known is not None and _said(context, client=job.client) != order.known:
        return _introduce(task, content, context)  # it is not what it was, and this slice may be too large for it
    federation, worker = _at_work(order.config, task, _text(context, "data-root"), _text(context, "device"))
    if task is not None:
        data = task.node_data(context)
        federation = dataclasses.replace(federation, data=data, partition=Everything(len(data.train)))
        worker = Worker(federation)
    folder = _text(context, "state-dir")
    memory = NodeMemory(context.state, order, Path(folder).expanduser() if folder else None)
    remembered = memory.recall(federation)
    score = Score(0, 0.0, 0)
    if task is not None and len(federation.data.test):
        # No more at a time than in training, for which the level was chosen.
        score = worker.score(job.level, job.round, state, federation.data.test, federation.local.batch_size)
    trained = worker.turn(job, state, sent, remembered)
    memory.keep(trained.memory)
    report = Report(
        time.perf_counter() - start,
        _cpu_seconds() - used,
        peak_memory(),
        remembered is None,
        score.correct,
        score.examples,
    )
    return encode_reply(make_upload(federation, job, trained), job.round, report)


def _introduce(task: Task | None, content: RecordDict, context: Context) -> RecordDict:
    """What this node can do."""
    if task is None and (odd := sorted(context.node_config.keys() - KEYS)):  # a task may have keys of its own
        raise ConfigError(f"node-config: unknown key {odd[0]!r}, expected some of {', '.join(sorted(KEYS))}")
    examples = None if task is None else len(task.node_data(context).train)
    return encode_answer(dataclasses.replace(_said(context), examples=examples))


def _said(context: Context, client: int | None = None) -> Answer:
    """What a node's config says of it; one that names no client is the one that it is taken for."""
    known = context.node_config
    named = _number(known, "partition-id")
    limits = read_limits(known, "node-config")
    return Answer(client if named is None else named, _number(known, "level"), limits or None)


@functools.lru_cache(maxsize=4)
def _at_work(toml: str, task: Task | None, root: str | None, device: str | None) -> tuple[Federation, Worker]:
    """Data and modules of a run: built once per process, not once per message."""
    values = tomllib.loads(toml)
    if root:
        values["data"]["root"] = root
    if device:
        values["engine"]["device"] = device
    if task is not None:
        task.introduce()
    config = make_config(values)
    if task is not None and make_config(values, task.overrides) != config:
        raise ConfigError(f"model.name: the server's is {config.model.name!r}, expected that of this node's task")
    # Initial weights are not asked for: the order brings the model.
    federation = build(config, begun=True) if task is None else build_own(config, dataclasses.replace(task, test=None))
    return federation, Worker(federation)


class Everything(Sequence[Tensor]):
    """A partition in which every client has all examples: those of the one node that asks."""

    def __init__(self, examples: int) -> None:
        self._all = torch.arange(examples)

    def __len__(self) -> int:
        return sys.maxsize

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, client: int | slice) -> Tensor | Sequence[Tensor]:
        return self if isinstance(client, slice) else self._all


def _text(context: Context, key: str) -> str | None:
    value = context.node_config.get(key)
    return None if value is None else str(value)


def _number(known: dict[str, Any], key: str) -> int | None:
    value = known.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ConfigError(f"node-config: {key}: got {value!r}, expected a whole number >= 0")


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_memory() -> int:
    """Bytes of this process at its peak."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
