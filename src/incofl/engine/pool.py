"""Workers outside of this process, wherever they are: who gets which job, what is tried again, in which order it ends.

The server's state is published once per round. The result of a job comes back in one of a fixed number of slots and is
handed on in the order of the schedule, so the sums of the server do not depend on who finishes first. A slot is free
again when its result has been consumed: memory is O(server model x workers), whatever the cohort. A worker that dies is
replaced, its job is tried once more and then given up.
"""

import contextlib
import dataclasses
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch

from incofl.client import Upload
from incofl.engine.executor import Died, J, LocalExecutor
from incofl.engine.federation import Federation, Job
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.worker import AnyJob, Worker, keep_freed_memory, one_thread
from incofl.server import Server
from incofl.split import Slice
from incofl.tensors import Tensors, clone

TRIES = 2  # a job whose worker died is tried once more


@dataclass
class Task:
    """A job: its place in the schedule, how often it was tried, and the slot of its result."""

    number: int
    job: AnyJob
    tries: int = 0
    slot: int = -1


@dataclass(frozen=True)
class Reply:
    """What comes of a job, and when it was computed by the worker's ``perf_counter``."""

    made: Any
    start: float
    end: float


class WorkerLoop:
    """Does the jobs of a worker, from what ``Pool._prepare`` and ``Pool._publish`` were given."""

    def __init__(self, setup: tuple[Federation, torch.dtype]) -> None:
        self._federation, default = setup
        torch.set_default_dtype(default)
        torch.set_num_threads(1)
        keep_freed_memory()
        self._worker = Worker(self._federation)

    def do(self, job: AnyJob, published: tuple[Any, ...], memory: Tensors) -> Reply:
        start, model = perf_counter(), self._federation.model
        shared, *rest = published
        server = Server(model.layout, model.initial | shared, *rest)
        made = self._worker.do(server, job, clone(memory))  # a copy: its place is that of the result
        if isinstance(made, Upload):  # the parent knows which slice and whose labels
            made = dataclasses.replace(made, slice=Slice({}, {}), labels=None)
        return Reply(made, start, perf_counter())


@dataclass(kw_only=True)
class WorkerHandle:
    """A worker as its parent sees it: what it is doing, and whether it can do anything yet."""

    task: Task | None = None
    ready: bool = True


_Handle = TypeVar("_Handle", bound=WorkerHandle)


class Pool(LocalExecutor, Generic[_Handle]):
    """An executor of workers in other processes; a subclass says how they are started and reached."""

    kind: str  # what a worker is, for messages

    def __init__(self, federation: Federation, workers: int, trace: Trace | None, store: ClientStore | None) -> None:
        super().__init__(federation, trace, store)
        self._workers = workers
        self._pool: list[_Handle] = []
        # Room for results that are being computed, and about as many again for those that wait for an earlier one.
        self._free_slots = deque(range(2 * workers + 2))

    @abstractmethod
    def _start(self) -> _Handle:
        """A new worker."""

    @abstractmethod
    def _prepare(self, setup: tuple[Federation, torch.dtype]) -> None:
        """Puts what a worker must know where all workers find it."""

    @abstractmethod
    def _publish(self, published: tuple[Any, ...]) -> None:
        """Puts what changes from round to round where all workers find it."""

    @abstractmethod
    def _send(self, worker: _Handle, task: Task, memory: Tensors) -> None:
        """Hands a task to a worker, with what its client remembers; that the worker is gone is noticed later."""

    @abstractmethod
    def _replied(self) -> list[_Handle]:
        """The workers that have done their task or died; waits until something has happened."""

    @abstractmethod
    def _collect(self, worker: _Handle, task: Task) -> Reply:
        """The reply of such a worker.

        Raises:
            Died: if there is none.
            RuntimeError: if the task itself failed, with its traceback.
        """

    def _compute(self, server: Server, jobs: Sequence[J]) -> Iterator[list[tuple[J, Any]]]:
        """Hands out the jobs in their order, longest first, and yields the outcomes in the same order."""
        frozen = server.layout.frozen
        if not self._pool:
            constant = {name: server.shared[name] for name in frozen}
            model = dataclasses.replace(self._federation.model, initial=constant)
            self._prepare((dataclasses.replace(self._federation, model=model), torch.get_default_dtype()))
            self._pool = [self._start() for _ in range(self._workers)]
        changing = {name: value for name, value in server.shared.items() if name not in frozen}
        self._publish((changing, server.private, server.round, server.extra))
        waiting, done = deque(Task(number, job) for number, job in enumerate(jobs)), dict[int, tuple[Task, Any]]()
        first = 0
        while first < len(jobs):
            while first not in done:
                self._hand_out(waiting)
                for worker in self._replied():
                    self._receive(worker, waiting, done)
            self._hand_out(waiting)  # nobody should wait while these are being consumed
            finished = []
            while first in done:
                finished.append(done.pop(first))
                first += 1
            # The consumer leaves the cores to the workers, and has them all to itself after the last job.
            with one_thread() if any(worker.task for worker in self._pool) else contextlib.nullcontext():
                yield [(jobs[task.number], made) for task, made in finished]
            self._free_slots.extend(task.slot for task, _ in finished)

    def _hand_out(self, waiting: deque[Task]) -> None:
        for worker in self._pool:
            if worker.ready and worker.task is None and waiting and self._free_slots:
                task = worker.task = waiting.popleft()
                task.tries, task.slot = task.tries + 1, self._free_slots.popleft()
                self._send(worker, task, self._recall(task.job))

    def _receive(self, worker: _Handle, waiting: deque[Task], done: dict[int, tuple[Task, Any]]) -> None:
        task, worker.task = worker.task, None
        assert task is not None
        number = self._pool.index(worker)
        try:
            reply = self._collect(worker, task)
        except Died as death:
            self._pool[number] = self._start()
            if task.tries < TRIES:
                waiting.appendleft(task)
                self._free_slots.appendleft(task.slot)
            else:
                done[task.number] = task, Died(f"its {self.kind} died {TRIES} times ({death}); out of memory?")
        else:
            made = self._federation.identified(reply.made, task.job) if isinstance(task.job, Job) else reply.made
            done[task.number] = task, made
            self._trace.add(str(task.job), f"worker {number + 1}", reply.start, reply.end)


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
