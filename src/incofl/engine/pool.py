"""Workers outside of this process, wherever they are: who gets which turn, what is tried again, in which order it ends.

The server's state is published once per round. A job is a short message; the upload comes back in one of a fixed number
of slots and is handed on in the order of the schedule, so the sums of the server do not depend on who finishes first. A
slot is free again when its upload has been consumed: memory is O(server model x workers), whatever the cohort. A worker
that dies is replaced, its job is tried once more and then given up.
"""

import contextlib
import dataclasses
import itertools
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from incofl.client import Upload
from incofl.engine.executor import Lost, eval_jobs, in_server_coordinates, make_store, total_scores
from incofl.engine.federation import Federation, Job
from incofl.engine.shared_tensors import TensorBytes
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.worker import EvalJob, MeasureJob, Worker, one_thread
from incofl.engine.worker_setup import AnyJob, Reply, Task, WorkerSetup
from incofl.server import Server
from incofl.task import Score
from incofl.tensors import Tensors, clone

TRIES = 2  # a job whose worker died is tried once more

# A reply, or the reason why there is none.
Outcome = Reply | str


class Died(Exception):
    """A worker is gone; the message says how."""


@dataclass(kw_only=True)
class WorkerHandle:
    """A worker as its parent sees it: what it is doing, and whether it can do anything yet."""

    task: Task | None = None
    ready: bool = True


_Handle = TypeVar("_Handle", bound=WorkerHandle)


class Pool(ABC, Generic[_Handle]):
    """An executor of workers in other processes; a subclass says how they are started and reached."""

    kind: str  # what a worker is, for messages
    _setup: WorkerSetup
    _state: TensorBytes  # the server's state as it was published last

    def __init__(self, federation: Federation, trace: Trace | None, store: ClientStore | None) -> None:
        self._federation = federation
        self._trace = trace or Trace()
        self._store = store or make_store(federation)
        self._private: dict[int, tuple[str, ...]] = {}
        self._pool: list[_Handle] = []
        self._free_slots: deque[int] = deque()

    def _open(self, workers: int) -> None:
        """Starts the workers."""
        self._free_slots.extend(range(num_slots(workers)))
        self._pool = [self._start() for _ in range(workers)]

    @abstractmethod
    def _start(self) -> _Handle:
        """A new worker."""

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

    @abstractmethod
    def _slot(self, task: Task) -> Upload:
        """The tensors in a task's slot."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers, whatever they are doing."""

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload | Lost]]:
        """The uploads in the order of the jobs; other turns go on while some are being consumed."""
        self._publish(server)
        for finished in self._run(server.round, jobs):
            yield [self._upload(task, outcome) for task, outcome in finished]

    def evaluate(self, server: Server, levels: Sequence[int]) -> list[Score]:
        """The score of each level, in parts spread over the workers."""
        self._publish(server)
        jobs = eval_jobs(self._federation, levels)
        scores = []
        for task, outcome in itertools.chain.from_iterable(self._run(server.round, jobs)):
            assert isinstance(task.job, EvalJob)
            score = None if isinstance(outcome, str) else outcome.score
            # A level must have its score: what kills workers is tried here last.
            scores.append(score or Worker(self._federation).evaluate(server, task.job))
        return total_scores(levels, jobs, scores)

    def measure(self, server: Server, levels: Sequence[int]) -> dict[int, Tensors]:
        """Batch-norm statistics of each level, measured by the workers."""
        self._publish(server)
        measured = {}
        jobs = [MeasureJob(level) for level in reversed(levels)]
        for task, outcome in itertools.chain.from_iterable(self._run(server.round, jobs)):
            assert isinstance(task.job, MeasureJob)
            if isinstance(outcome, str):  # what kills workers is tried here last
                measured[task.job.level] = Worker(self._federation).measure(server, task.job)
            else:
                measured[task.job.level] = clone(self._slot(task).buffers)
        return in_server_coordinates(self._federation, server, measured)

    def _publish(self, server: Server) -> None:
        """Copies the server's state to where every worker sees it."""
        for name, entry in self._setup.shared.items():
            self._state.view(entry).copy_(server.shared[name])
        for level, private in server.private.items():
            for name, value in private.items():
                self._state.view(self._setup.private[level][name]).copy_(value)
        self._private = {level: tuple(private) for level, private in server.private.items()}
        for table, entries in self._setup.extra.items():
            for name, entry in entries.items():
                self._state.view(entry).copy_(server.extra[table][name])

    def _upload(self, task: Task, outcome: Outcome) -> Upload | Lost:
        assert isinstance(task.job, Job)
        if isinstance(outcome, str):
            return Lost(task.job.client, outcome)
        upload = dataclasses.replace(
            self._slot(task), steps=outcome.steps, loss=outcome.loss, normaliser=outcome.normaliser
        )
        return self._federation.identified(upload, task.job)

    def _run(self, round: int, jobs: Sequence[AnyJob]) -> Iterator[list[tuple[Task, Outcome]]]:
        """Hands out the jobs in their order, longest first, and yields the outcomes in the same order."""
        waiting = deque(range(len(jobs)))
        tries = [0] * len(jobs)
        done: dict[int, tuple[Task, Outcome]] = {}
        first = 0
        while first < len(jobs):
            while first not in done:
                self._hand_out(waiting, jobs, tries, round)
                for worker in self._replied():
                    self._receive(worker, waiting, tries, done)
            self._hand_out(waiting, jobs, tries, round)  # nobody should wait while these are being consumed
            finished = []
            while first in done:
                finished.append(done.pop(first))
                first += 1
            # The consumer leaves the cores to the workers, and has them all to itself after the last job.
            with one_thread() if any(worker.task for worker in self._pool) else contextlib.nullcontext():
                yield finished
            self._free_slots.extend(task.slot for task, _ in finished)

    def _hand_out(self, waiting: deque[int], jobs: Sequence[AnyJob], tries: list[int], round: int) -> None:
        for worker in self._pool:
            if worker.ready and worker.task is None and waiting and self._free_slots:
                number = waiting.popleft()
                job, slot = jobs[number], self._free_slots.popleft()
                memory = self._recall(job) if isinstance(job, Job) else {}
                worker.task = Task(number, job, slot, round, self._private, remembers=bool(memory))
                tries[number] += 1
                self._send(worker, worker.task, memory)

    def _recall(self, job: Job) -> Tensors:
        """What the client of a job remembers; empty if nothing."""
        return self._store.get(job.client, self._federation.slice(job.level, job.round, job.client))

    def _receive(
        self, worker: _Handle, waiting: deque[int], tries: list[int], done: dict[int, tuple[Task, Outcome]]
    ) -> None:
        task, worker.task = worker.task, None
        assert task is not None
        number = self._pool.index(worker)
        try:
            reply = self._collect(worker, task)
        except Died as death:
            self._pool[number] = self._start()
            if tries[task.number] < TRIES:
                waiting.appendleft(task.number)
                self._free_slots.appendleft(task.slot)
            else:
                done[task.number] = task, f"its {self.kind} died {TRIES} times ({death}); out of memory?"
        else:
            done[task.number] = task, reply
            self._trace.add(str(task.job), f"worker {number + 1}", reply.start, reply.end)


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_slots(workers: int) -> int:
    """Room for uploads that are being computed, and about as many again for those that wait for an earlier one."""
    return 2 * workers + 2
