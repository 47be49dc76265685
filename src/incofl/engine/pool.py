"""Workers outside of this process, wherever they are: a thread waits for each, and results keep the order of the jobs.

The server's state is published once per round. The result of a job comes back in one of a fixed number of slots and is
handed on in the order of the schedule, so the sums of the server do not depend on who finishes first. A slot is free
again when its result has been consumed: memory is O(server model x workers), whatever the cohort. A worker that dies is
replaced, its job is tried once more and then given up.
"""

import dataclasses
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from itertools import islice
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch

from incofl.client import Upload
from incofl.engine.executor import Died, Executor, J
from incofl.engine.federation import Federation, Job
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.vectorised import StackJob
from incofl.engine.worker import AnyJob, Worker, keep_freed_memory, one_thread
from incofl.server import Server
from incofl.split import Slice
from incofl.tensors import clone
from incofl.upload import UploadStack

TRIES = 2  # a job whose worker died is tried once more
Made = tuple[Any, float]  # what comes of a job, and the seconds that it took


class WorkerLoop:
    """Does the jobs of a worker, from what ``Pool._prepare`` and ``Pool._publish`` were given."""

    def __init__(self, setup: tuple[Federation, torch.dtype]) -> None:
        self._federation, default = setup
        torch.set_default_dtype(default)
        torch.set_num_threads(1)
        keep_freed_memory()
        self._worker = Worker(self._federation)

    def do(self, job: AnyJob, published: tuple[Any, ...], memory: Any) -> Made:
        start, f = perf_counter(), self._federation
        shared, private, round_, extra, counts, seed = published
        population = {level: (f.slice(level, 0), count) for level, count in counts.items()}
        server = Server(f.model.layout, f.model.initial | shared, private, round_, extra, {}, population, seed)
        # Copies: their place is that of the result.
        remembered = [clone(one) for one in memory] if isinstance(memory, list) else clone(memory)
        made: Any = self._worker.do(server, job, remembered)
        if isinstance(made, UploadStack):  # the parent knows which slice and, of one client, whose labels
            made = dataclasses.replace(made, slice=Slice({}, {}))
        elif isinstance(made, list):
            made = [dataclasses.replace(one, slice=Slice({}, {}), labels=None) for one in made]
        elif isinstance(made, Upload):
            made = dataclasses.replace(made, slice=Slice({}, {}), labels=None)
        return made, perf_counter() - start


class Pool(Executor):
    """An executor of workers in other processes; a subclass says how they are started and reached."""

    kind: str  # what a worker is, for messages

    def __init__(
        self, federation: Federation, workers: int, trace: Trace | None = None, store: ClientStore | None = None
    ) -> None:
        super().__init__(federation, trace, store, workers)
        self._workers, self._slots = workers, 2 * workers + 2  # about as many results wait for an earlier one
        self._threads, self._idle = ThreadPoolExecutor(workers), SimpleQueue[int]()
        self._begun = self._closed = False

    @abstractmethod
    def _prepare(self, setup: tuple[Federation, torch.dtype]) -> None:
        """Puts what a worker must know where all workers find it."""

    @abstractmethod
    def _publish(self, published: tuple[Any, ...]) -> None:
        """Puts what changes from round to round where all workers find it."""

    @abstractmethod
    def _attempt(self, worker: int, job: AnyJob, slot: int, memory: Any) -> Made:
        """Has a worker, which is started if necessary, do a job with what its client remembers.

        Raises:
            Died: if the worker did not live to reply.
            RuntimeError: if the job itself failed, with its traceback.
        """

    @abstractmethod
    def _end(self) -> None:
        """Ends the workers, whatever they are doing."""

    def close(self) -> None:
        self._closed = True
        if self._begun:
            self._end()
        self._threads.shutdown(cancel_futures=True)

    def _compute(self, server: Server, jobs: Sequence[J]) -> Iterator[list[tuple[J, Any]]]:
        """Hands out the jobs in their order, long ones first, and yields the outcomes in the same order."""
        frozen = server.layout.frozen
        if not self._begun:
            constant = {name: server.shared[name] for name in frozen}
            model = dataclasses.replace(self._federation.model, initial=constant)
            self._prepare((dataclasses.replace(self._federation, model=model), torch.get_default_dtype()))
            for worker in range(1, 1 + self._workers):
                self._idle.put(worker)
            self._begun = True
        changing = {name: value for name, value in server.shared.items() if name not in frozen}
        counts = {level: count for level, (_, count) in server.population.items()}
        self._publish((changing, server.private, server.round, server.extra, counts, server.seed))
        waiting, ahead = enumerate(jobs), deque[tuple[J, Future[Any]]]()
        while True:
            for number, job in islice(waiting, self._slots - len(ahead)):
                result = self._threads.submit(self._try, job, number % self._slots, self._recall(job))
                ahead.append((job, result))
            if not ahead:
                return
            wait([ahead[0][1]])
            finished = []
            while ahead and ahead[0][1].done():
                job, result = ahead.popleft()
                made = result.result()
                if isinstance(job, Job) and isinstance(made, Upload):
                    made = self._federation.identified(made, job)
                elif isinstance(job, StackJob) and isinstance(made, UploadStack):
                    first = job.jobs[0]
                    slice_ = self._federation.slice(first.level, first.round, first.client)
                    made = dataclasses.replace(made, slice=slice_)
                elif isinstance(job, StackJob) and isinstance(made, list):
                    made = list(map(self._federation.identified, made, job.jobs))
                finished.append((job, made))
            # The consumer leaves the cores to the workers, and has them all to itself after the last job.
            with one_thread() if ahead else nullcontext():
                yield finished

    def _try(self, job: AnyJob, slot: int, memory: Any) -> Any:
        """What comes of a job, or ``Died``; in a thread."""
        worker = self._idle.get()
        try:
            for _ in range(TRIES):
                try:
                    made, seconds = self._attempt(worker, job, slot, memory)
                except Died as death:
                    reason = str(death)
                    if self._closed:
                        break
                else:
                    end = perf_counter()
                    self._trace.add(str(job), f"worker {worker}", end - seconds, end)
                    return made
            return Died(f"its {self.kind} died {TRIES} times ({reason}); out of memory?")
        finally:
            self._idle.put(worker)


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
