"""What a worker must know and where tensors lie, what it and its parent tell each other, and how it does a task.

The same for all workers that are not in the parent's process: they differ in how bytes and messages get there.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import torch

from incofl.client import Score, Trained
from incofl.data import Examples
from incofl.engine.arena import Block, Entry, place
from incofl.engine.federation import Federation, Job
from incofl.engine.worker import EvalJob, MeasureJob, Worker
from incofl.server import Server
from incofl.tensors import Tensors, clone

AnyJob = Job | EvalJob | MeasureJob


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

    @property
    def end(self) -> int:
        """Where its last byte is followed by others."""
        tables = (self.update, self.buffers, self.extra, self.memory)
        return max(entry.end for table in tables for entry in table.values())

    @property
    def memory_range(self) -> slice:
        """The bytes of what the client remembers, which come last."""
        return slice(min(entry.offset for entry in self.memory.values()), self.end)

    def views(self, block: Block) -> Trained:
        """Its tensors."""
        return Trained(
            block.views(self.update),
            block.views(self.buffers),
            extra=block.views(self.extra),
            memory=block.views(self.memory),
        )


@dataclass(frozen=True)
class Task:
    """One message to a worker: a job, its slot, and which private entries of the state are in use."""

    number: int
    job: AnyJob
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
    """Where everything lies in three blocks (data, state, uploads), and how large these are."""
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


class Station:
    """Where a worker does its tasks."""

    def __init__(self, plan: Plan, data: Block) -> None:
        torch.set_default_dtype(plan.dtype)
        tensors = data.views(plan.data)
        train, test = (Examples(tensors[f"{part}.x"], tensors[f"{part}.y"]) for part in ("train", "test"))
        f = plan.federation
        self._plan = plan
        self._worker = Worker(dataclasses.replace(f, data=dataclasses.replace(f.data, train=train, test=test)))

    def do(self, task: Task, state: Block, uploads: Block) -> Reply:
        """Does a task with the server's ``state``; what is uploaded is then in the slot."""
        start, server = perf_counter(), self._server(task, state)
        slot = self._plan.slots[task.slot][task.job.level].views(uploads)
        if isinstance(task.job, EvalJob):
            return Reply(score=self._worker.evaluate(server, task.job), start=start, end=perf_counter())
        if isinstance(task.job, MeasureJob):
            for name, value in self._worker.measure(server, task.job).items():
                slot.buffers[name].copy_(value)
            return Reply(start=start, end=perf_counter())
        memory = clone(slot.memory) if task.remembers else {}  # its place is needed for the new one
        done = self._worker.train(server, task.job, memory, slot)
        return Reply(done.steps, done.loss, done.length, start=start, end=perf_counter())

    def _server(self, task: Task, state: Block) -> Server:
        plan = self._plan
        private = {level: state.views({n: plan.private[level][n] for n in ns}) for level, ns in task.private.items()}
        extra = {table: state.views(entries) for table, entries in plan.extra.items()}
        return Server(plan.federation.model.layout, state.views(plan.shared), private, task.round, extra)
