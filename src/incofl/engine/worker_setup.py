"""What a worker outside of the parent's process must know, the messages between both, and how a worker does a task."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import torch

from incofl.client import Upload
from incofl.engine.federation import Federation, Job
from incofl.engine.shared_tensors import Specs, TensorBytes, arrange
from incofl.engine.worker import EvalJob, MeasureJob, Worker
from incofl.server import Server
from incofl.task import Score
from incofl.tensors import Tensors, clone

AnyJob = Job | EvalJob | MeasureJob


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker must know, sent once: the federation without its large tensors, and where those lie.

    Three rows of bytes hold tensors: ``constant`` (data and frozen parameters), the server's state, and uploads.
    """

    federation: Federation
    constant: Specs
    shared: Specs
    private: dict[int, Specs]
    extra: dict[str, Specs]
    slots: list[dict[int, "Slot"]]  # by slot and level
    dtype: torch.dtype  # torch's default


@dataclass(frozen=True)
class Slot:
    """Where what a client uploads and remembers lies."""

    update: Specs
    buffers: Specs
    extra: Specs
    memory: Specs

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        tables = (self.update, self.buffers, self.extra, self.memory)
        return max(spec.end for table in tables for spec in table.values())

    @property
    def memory_range(self) -> slice:
        """The bytes of what the client remembers, which come last."""
        return slice(min(spec.offset for spec in self.memory.values()), self.end)

    def views(self, uploads: TensorBytes) -> Upload:
        """An upload whose tensors lie there."""
        return Upload(
            update=uploads.views(self.update),
            buffers=uploads.views(self.buffers),
            extra=uploads.views(self.extra),
            memory=uploads.views(self.memory),
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
    """One message from a worker; the tensors of an upload are in the slot."""

    steps: int = 0
    loss: float = 0.0
    normaliser: float = 1.0
    score: Score | None = None
    start: float = 0.0  # by perf_counter
    end: float = 0.0


def constant_tensors(federation: Federation) -> Tensors:
    """The tensors that never change."""
    data, model = federation.data, federation.model
    parts = {"train": data.train, "test": data.test}
    examples = {f"{part}.{name}": t for part, held in parts.items() for name, t in held.tensors().items()}
    return examples | {f"model.{name}": model.initial[name] for name in model.layout.frozen}


def make_setup(federation: Federation, num_slots: int) -> tuple[WorkerSetup, tuple[int, int, int]]:
    """The setup of all workers, and the sizes of the three rows of bytes."""
    model, rule = federation.model, federation.method.server
    layout, client = model.layout, federation.method.client
    changing = [name for name in model.initial if name not in layout.frozen]

    def specs_of(names: Iterable[str], start: int) -> tuple[Specs, int]:
        return arrange(((n, layout.shapes[n], model.initial[n].dtype) for n in names), start)

    constant, constant_size = arrange((n, tuple(t.shape), t.dtype) for n, t in constant_tensors(federation).items())
    shared, state_size = specs_of(changing, 0)
    private: dict[int, Specs] = {}
    for level in federation.levels_in_use:
        own = rule.private(layout, federation.slice(level, 0)) | layout.buffers
        private[level], state_size = specs_of([name for name in changing if name in own], state_size)
    extra: dict[str, Specs] = {}
    for table, tensors in federation.start().extra.items():
        extra[table], state_size = arrange(((n, tuple(t.shape), t.dtype) for n, t in tensors.items()), state_size)
    slots, slots_size = [], 0
    for _ in range(num_slots):
        start, slot = slots_size, {}
        for level in federation.levels_in_use:
            shapes, end, tables = federation.slice(level, 0).shapes, start, []
            for names in (layout.parameters, layout.buffers, client.extra(layout), client.memory(layout)):
                held = [(n, shape, model.initial[n].dtype) for n, shape in shapes.items() if n in names]
                table_specs, end = arrange(held, end)
                tables.append(table_specs)
            slot[level] = Slot(*tables)
            slots_size = max(slots_size, end)
        slots.append(slot)
    train, test = (part.pick(slice(0, 0)) for part in (federation.data.train, federation.data.test))
    skeleton = dataclasses.replace(
        federation,
        data=dataclasses.replace(federation.data, train=train, test=test, clients=None),
        model=dataclasses.replace(model, initial={}),
    )
    setup = WorkerSetup(skeleton, constant, shared, private, extra, slots, torch.get_default_dtype())
    return setup, (constant_size, state_size, slots_size)


class WorkerLoop:
    """Does the tasks of a worker."""

    def __init__(self, setup: WorkerSetup, constant: TensorBytes) -> None:
        torch.set_default_dtype(setup.dtype)
        tensors, f = constant.views(setup.constant), setup.federation
        parts = {}
        for part, skeleton in (("train", f.data.train), ("test", f.data.test)):
            own = {n.removeprefix(f"{part}."): t for n, t in tensors.items() if n.startswith(f"{part}.")}
            parts[part] = skeleton.with_tensors(own)
        self._setup = setup
        self._frozen = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        self._worker = Worker(dataclasses.replace(f, data=dataclasses.replace(f.data, **parts)))

    def do(self, task: Task, state: TensorBytes, uploads: TensorBytes) -> Reply:
        """Does a task with the server's ``state``; the tensors of an upload are then in the slot."""
        start, server = perf_counter(), self._server(task, state)
        slot = self._setup.slots[task.slot][task.job.level].views(uploads)
        if isinstance(task.job, EvalJob):
            return Reply(score=self._worker.evaluate(server, task.job), start=start, end=perf_counter())
        if isinstance(task.job, MeasureJob):
            for name, value in self._worker.measure(server, task.job).items():
                slot.buffers[name].copy_(value)
            return Reply(start=start, end=perf_counter())
        memory = clone(slot.memory) if task.remembers else {}  # its place is needed for the new one
        done = self._worker.train(server, task.job, memory, slot)
        return Reply(done.steps, done.loss, done.normaliser, start=start, end=perf_counter())

    def _server(self, task: Task, state: TensorBytes) -> Server:
        setup = self._setup
        private = {level: state.views({n: setup.private[level][n] for n in ns}) for level, ns in task.private.items()}
        extra = {table: state.views(specs) for table, specs in setup.extra.items()}
        shared = state.views(setup.shared) | self._frozen
        return Server(setup.federation.model.layout, shared, private, task.round, extra)
