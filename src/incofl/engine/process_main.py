"""The program of a worker process, and what it and its parent tell each other."""

import contextlib
import dataclasses
import signal
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter

import cloudpickle
import torch

from incofl.client import Score
from incofl.data import Images
from incofl.engine.arena import Arena, Entry, place
from incofl.engine.federation import Federation, Job
from incofl.engine.memory import keep_freed_memory
from incofl.engine.worker import EvalJob, Worker
from incofl.server import Server
from incofl.tensors import Tensors


@dataclass(frozen=True)
class Plan:
    """Everything a worker must know, sent once: the federation without its large tensors, and where those lie."""

    federation: Federation
    data: dict[str, Entry]
    shared: dict[str, Entry]
    private: dict[int, dict[str, Entry]]
    slots: list[dict[int, dict[str, Entry]]]  # by slot and level
    dtype: torch.dtype  # torch's default


@dataclass(frozen=True)
class Task:
    """One message to a worker: a job, the slot for its upload, and which private entries of the state are in use."""

    number: int
    job: Job | EvalJob
    slot: int
    round: int
    private: dict[int, tuple[str, ...]]


@dataclass(frozen=True)
class Reply:
    """One message from a worker; the upload itself is in the slot."""

    steps: int = 0
    loss: float = 0.0
    score: Score | None = None
    start: float = 0.0  # of perf_counter
    end: float = 0.0


def data_tensors(federation: Federation) -> Tensors:
    """The large tensors that never change."""
    data = federation.data
    return {"train.x": data.train.x, "train.y": data.train.y, "test.x": data.test.x, "test.y": data.test.y}


def make_plan(federation: Federation, num_slots: int) -> tuple[Plan, tuple[int, int, int]]:
    """Where everything lies in the three arenas (data, state, uploads), and how large these are."""
    model, rule = federation.model, federation.method.server

    def entries(names: Iterable[str], start: int) -> tuple[dict[str, Entry], int]:
        return place(((n, model.layout.shapes[n], model.initial[n].dtype) for n in names), start)

    data, data_size = place((name, tuple(t.shape), t.dtype) for name, t in data_tensors(federation).items())
    shared, state_size = entries(model.initial, 0)
    private: dict[int, dict[str, Entry]] = {}
    for level in federation.levels_in_use:
        own = rule.private(model.layout, federation.slice(level, 0)) | model.layout.buffers
        private[level], state_size = entries([name for name in model.initial if name in own], state_size)
    slots, slots_size = [], 0
    for _ in range(num_slots):
        start, slot = slots_size, {}
        for level in federation.levels_in_use:
            shapes = federation.slice(level, 0).shapes
            slot[level], end = place(((n, s, model.initial[n].dtype) for n, s in shapes.items()), start)
            slots_size = max(slots_size, end)
        slots.append(slot)
    empty = Images(torch.empty(0), torch.empty(0))
    skeleton = dataclasses.replace(
        federation,
        data=dataclasses.replace(federation.data, train=empty, test=empty),
        model=dataclasses.replace(model, initial={}),
    )
    return Plan(skeleton, data, shared, private, slots, torch.get_default_dtype()), (data_size, state_size, slots_size)


def main() -> None:
    """Serves the parent whose pipe and arenas the arguments name, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    torch.set_num_threads(1)
    keep_freed_memory()
    pipe, *arenas = (int(argument) for argument in sys.argv[1:])
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        _serve(Connection(pipe), *(Arena(fd=fd) for fd in arenas))


def _serve(connection: Connection, data: Arena, state: Arena, uploads: Arena) -> None:
    pickled = connection.recv_bytes()
    try:
        plan: Plan = cloudpickle.loads(pickled)
    except Exception:
        connection.send(RuntimeError(f"in a worker process, at its start:\n{traceback.format_exc()}"))
        return
    torch.set_default_dtype(plan.dtype)
    tensors = data.views(plan.data)
    train, test = (Images(tensors[f"{part}.x"], tensors[f"{part}.y"]) for part in ("train", "test"))
    federation = plan.federation
    federation = dataclasses.replace(federation, data=dataclasses.replace(federation.data, train=train, test=test))
    worker, shared = Worker(federation), state.views(plan.shared)
    while True:
        task: Task = connection.recv()
        private = {level: state.views({n: plan.private[level][n] for n in ns}) for level, ns in task.private.items()}
        server = Server(federation.model.layout, shared, private, task.round)
        start = perf_counter()
        try:
            if isinstance(task.job, EvalJob):
                reply = Reply(score=worker.evaluate(server, task.job), start=start, end=perf_counter())
            else:
                trained = worker.train(server, task.job, uploads.views(plan.slots[task.slot][task.job.level]))
                reply = Reply(trained.steps, trained.loss, start=start, end=perf_counter())
        except Exception:
            connection.send(RuntimeError(f"in a worker process, {task.job}:\n{traceback.format_exc()}"))
        else:
            connection.send(reply)
