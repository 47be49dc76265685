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

from incofl.client import Score, Trained
from incofl.data import Examples
from incofl.engine.arena import Arena, Entry, place
from incofl.engine.federation import Federation, Job
from incofl.engine.memory import keep_freed_memory
from incofl.engine.worker import EvalJob, MeasureJob, Worker
from incofl.server import Server
from incofl.tensors import Tensors, clone


@dataclass(frozen=True)
class Plan:
    """Everything a worker must know, sent once: the federation without its large tensors, and where those lie."""

    federation: Federation
    data: dict[str, Entry]
    shared: dict[str, Entry]
    private: dict[int, dict[str, Entry]]
    extra: dict[str, dict[str, Entry]]
    slots: list[dict[int, "Slot"]]  # by slot and level
    dtype: torch.dtype  # torch's default


@dataclass(frozen=True)
class Slot:
    """Where what a client uploads and remembers lies."""

    update: dict[str, Entry]
    buffers: dict[str, Entry]
    extra: dict[str, Entry]
    memory: dict[str, Entry]

    def views(self, arena: Arena) -> Trained:
        """Its tensors."""
        return Trained(
            arena.views(self.update),
            arena.views(self.buffers),
            extra=arena.views(self.extra),
            memory=arena.views(self.memory),
        )


@dataclass(frozen=True)
class Task:
    """One message to a worker: a job, its slot, and which private entries of the state are in use."""

    number: int
    job: Job | EvalJob | MeasureJob
    slot: int
    round: int
    private: dict[int, tuple[str, ...]]
    remembers: bool = False  # whether the slot holds a memory


@dataclass(frozen=True)
class Reply:
    """One message from a worker; the upload itself is in the slot."""

    steps: int = 0
    loss: float = 0.0
    length: float = 1.0
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
    layout, client = model.layout, federation.method.client

    def entries(names: Iterable[str], start: int) -> tuple[dict[str, Entry], int]:
        return place(((n, model.layout.shapes[n], model.initial[n].dtype) for n in names), start)

    data, data_size = place((name, tuple(t.shape), t.dtype) for name, t in data_tensors(federation).items())
    shared, state_size = entries(model.initial, 0)
    private: dict[int, dict[str, Entry]] = {}
    for level in federation.levels_in_use:
        own = rule.private(model.layout, federation.slice(level, 0)) | model.layout.buffers
        private[level], state_size = entries([name for name in model.initial if name in own], state_size)
    extra: dict[str, dict[str, Entry]] = {}
    for table, tensors in federation.start().extra.items():
        extra[table], state_size = place(((n, tuple(t.shape), t.dtype) for n, t in tensors.items()), state_size)
    slots, slots_size = [], 0
    for _ in range(num_slots):
        start, slot = slots_size, {}
        for level in federation.levels_in_use:
            shapes, end, tables = federation.slice(level, 0).shapes, start, []
            for names in (layout.parameters, layout.buffers, client.extra(layout), client.memory(layout)):
                held = [(n, shape, model.initial[n].dtype) for n, shape in shapes.items() if n in names]
                entries_of, end = place(held, end)
                tables.append(entries_of)
            slot[level] = Slot(*tables)
            slots_size = max(slots_size, end)
        slots.append(slot)
    empty = Examples(torch.empty(0), torch.empty(0))
    skeleton = dataclasses.replace(
        federation,
        data=dataclasses.replace(federation.data, train=empty, test=empty),
        model=dataclasses.replace(model, initial={}),
    )
    plan = Plan(skeleton, data, shared, private, extra, slots, torch.get_default_dtype())
    return plan, (data_size, state_size, slots_size)


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
    train, test = (Examples(tensors[f"{part}.x"], tensors[f"{part}.y"]) for part in ("train", "test"))
    federation = plan.federation
    federation = dataclasses.replace(federation, data=dataclasses.replace(federation.data, train=train, test=test))
    worker = Worker(federation)
    extra = {table: state.views(entries) for table, entries in plan.extra.items()}
    start_server = Server(federation.model.layout, state.views(plan.shared), extra=extra)
    while True:
        task: Task = connection.recv()
        private = {level: state.views({n: plan.private[level][n] for n in ns}) for level, ns in task.private.items()}
        server = dataclasses.replace(start_server, private=private, round=task.round)
        start = perf_counter()
        try:
            slot = plan.slots[task.slot][task.job.level].views(uploads)
            if isinstance(task.job, EvalJob):
                reply = Reply(score=worker.evaluate(server, task.job), start=start, end=perf_counter())
            elif isinstance(task.job, MeasureJob):
                for name, value in worker.measure(server, task.job).items():
                    slot.buffers[name].copy_(value)
                reply = Reply(start=start, end=perf_counter())
            else:
                memory = clone(slot.memory) if task.remembers else {}  # its place is needed for the new one
                done = worker.train(server, task.job, memory, slot)
                reply = Reply(done.steps, done.loss, done.length, start=start, end=perf_counter())
        except Exception:
            connection.send(RuntimeError(f"in a worker process, {task.job}:\n{traceback.format_exc()}"))
        else:
            connection.send(reply)
