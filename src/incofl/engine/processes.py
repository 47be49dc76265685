"""Worker processes: persistent, one torch thread each, weights and uploads through shared memory.

The server's state is published once per round. A job is a short message; the upload comes back in a slot of a pooled
buffer and is handed on in the order of the schedule, so the sums of the server do not depend on who finishes first. A
slot is free again when its upload has been consumed: memory is O(server model x workers), whatever the cohort.

Workers are fresh interpreters, neither forks nor imports of the main script: a script needs no
``if __name__ == "__main__"``, and threads of the parent do no harm. A worker that dies is replaced, its job is tried
once more and then given up.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

import cloudpickle

from incofl.client import Score, Trained
from incofl.engine.arena import Arena
from incofl.engine.executor import Lost, eval_jobs, in_server_coordinates, make_store, make_upload, total_scores
from incofl.engine.federation import Federation, Job
from incofl.engine.memory import worker_environment
from incofl.engine.process_main import Reply, Task, data_tensors, make_plan
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.worker import EvalJob, MeasureJob, Worker, one_thread
from incofl.method import Upload
from incofl.server import Server
from incofl.tensors import Tensors, clone

TRIES = 2  # a job whose worker died is tried once more

# A reply, or the reason why there is none.
Outcome = Reply | str
AnyJob = Job | EvalJob | MeasureJob


@dataclass
class _Process:
    """A worker process and what it is doing."""

    process: subprocess.Popen[bytes]
    connection: Connection
    task: Task | None = None


class WorkerProcesses:
    """An executor of ``workers`` processes on this machine."""

    def __init__(
        self, federation: Federation, workers: int, trace: Trace | None = None, store: ClientStore | None = None
    ) -> None:
        self._federation = federation
        self._trace = trace or Trace()
        self._store = store or make_store(federation)
        # Room for uploads that are being computed, and about as many again for those that wait for an earlier one.
        self._plan, sizes = make_plan(federation, num_slots=2 * workers + 2)
        self._data, self._state, self._uploads = (Arena(size) for size in sizes)
        for name, tensor in data_tensors(federation).items():
            self._data.view(self._plan.data[name]).copy_(tensor)
        self._free_slots = deque(range(len(self._plan.slots)))
        self._private: dict[int, tuple[str, ...]] = {}
        self._pickled = cloudpickle.dumps(self._plan)
        self._pool = [self._start() for _ in range(workers)]

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
                measured[task.job.level] = clone(self._slot(task.slot, task.job.level).buffers)
        return in_server_coordinates(self._federation, server, measured)

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        for worker in self._pool:
            worker.connection.close()
            worker.process.kill()
            worker.process.wait()
        self._pool = []

    def _publish(self, server: Server) -> None:
        """Copies the server's state to where every worker sees it."""
        for name, entry in self._plan.shared.items():
            self._state.view(entry).copy_(server.shared[name])
        for level, private in server.private.items():
            for name, value in private.items():
                self._state.view(self._plan.private[level][name]).copy_(value)
        self._private = {level: tuple(private) for level, private in server.private.items()}
        for table, entries in self._plan.extra.items():
            for name, entry in entries.items():
                self._state.view(entry).copy_(server.extra[table][name])

    def _slot(self, slot: int, level: int) -> Trained:
        return self._plan.slots[slot][level].views(self._uploads)

    def _upload(self, task: Task, outcome: Outcome) -> Upload | Lost:
        assert isinstance(task.job, Job)
        if isinstance(outcome, str):
            return Lost(task.job.client, outcome)
        trained = self._slot(task.slot, task.job.level)
        trained.steps, trained.loss, trained.length = outcome.steps, outcome.loss, outcome.length
        return make_upload(self._federation, task.job, trained)

    def _run(self, round: int, jobs: Sequence[AnyJob]) -> Iterator[list[tuple[Task, Outcome]]]:
        """Hands out the jobs in their order, longest first, and yields the outcomes in the same order."""
        waiting = deque(range(len(jobs)))
        tries = [0] * len(jobs)
        done: dict[int, tuple[Task, Outcome]] = {}
        first = 0
        while first < len(jobs):
            while first not in done:
                self._hand_out(waiting, jobs, tries, round)
                for worker in self._ready():
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
            if worker.task is None and waiting and self._free_slots:
                number = waiting.popleft()
                job, slot = jobs[number], self._free_slots.popleft()
                remembers = isinstance(job, Job) and self._recall(job, slot)
                worker.task = Task(number, job, slot, round, self._private, remembers)
                tries[number] += 1
                with contextlib.suppress(OSError):  # it has died: its closed connection is noticed in _receive
                    worker.connection.send(worker.task)

    def _recall(self, job: Job, slot: int) -> bool:
        """Puts what the client remembers into its slot, if it remembers anything."""
        memory = self._store.get(job.client, self._federation.slice(job.level, job.round))
        for name, tensor in self._slot(slot, job.level).memory.items() if memory else ():
            tensor.copy_(memory[name])
        return bool(memory)

    def _ready(self) -> list[_Process]:
        """The workers that have replied or died; waits until there is one."""
        busy = [worker for worker in self._pool if worker.task is not None]
        ready = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in ready]

    def _receive(
        self, worker: _Process, waiting: deque[int], tries: list[int], done: dict[int, tuple[Task, Outcome]]
    ) -> None:
        task, worker.task = worker.task, None
        assert task is not None
        try:
            reply = worker.connection.recv()
        except (EOFError, OSError):
            code = worker.process.wait()
            self._pool[self._pool.index(worker)] = self._start()
            if tries[task.number] < TRIES:
                waiting.appendleft(task.number)
                self._free_slots.appendleft(task.slot)
            else:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                done[task.number] = task, f"its worker process died {TRIES} times ({how}); out of memory?"
        else:
            if isinstance(reply, Exception):
                raise reply
            done[task.number] = task, reply
            who = f"worker {self._pool.index(worker) + 1}"
            self._trace.add(str(task.job), who, reply.start, reply.end)

    def _start(self) -> _Process:
        ours, theirs = Pipe()
        fds = [theirs.fileno(), self._data.fd, self._state.fd, self._uploads.fd]
        command = [sys.executable, "-c", "from incofl.engine.process_main import main; main()", *map(str, fds)]
        environment = worker_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        with contextlib.suppress(OSError):  # it has died at once: noticed in _receive
            ours.send_bytes(self._pickled)
        return _Process(process, ours)
