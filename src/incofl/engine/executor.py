"""Where clients' turns are computed. An executor decides place and time, never the result."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, TypeVar

from incofl.client import Upload
from incofl.engine.federation import Federation, Job
from incofl.engine.grouping import Grouping
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.vectorised import StackJob
from incofl.engine.worker import EVAL_CHUNK, AnyJob, EvalJob, MeasureJob, Worker
from incofl.server import Server
from incofl.task import Score
from incofl.tensors import Tensors, clone

J = TypeVar("J", bound=AnyJob)


@dataclass(frozen=True)
class Lost:
    """A client whose turn could not be computed, with the reason."""

    client: int
    reason: str


class Died(Exception):
    """A job has no result because its workers are gone; the message says how."""


class Executor(ABC):
    """The seam between a round and the processes that compute it; a subclass says where they are."""

    def __init__(
        self,
        federation: Federation,
        trace: Trace | None = None,
        store: ClientStore | None = None,
        workers: int = 1,  # that compute at a time
    ) -> None:
        self._federation = federation
        self._worker = Worker(federation)
        self._trace = trace or Trace()
        self._store = store or ClientStore(federation)
        self.grouping = Grouping(federation, self._worker, workers)

    @abstractmethod
    def _compute(self, server: Server, jobs: Sequence[J]) -> Iterator[list[tuple[J, Any]]]:
        """The jobs in their order with what comes of each, or ``Died``; grouped as they become ready."""

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload | Lost]]:
        """The uploads in the order of the jobs, lazily, grouped as they become ready.

        They are valid until the next ones are asked for.
        """
        for finished in self._compute(server, self.grouping(server, jobs)):
            single: list[Upload | Lost] = []
            for job, made in finished:
                if isinstance(made, Died):
                    single += [
                        Lost(one.client, str(made)) for one in (job.jobs if isinstance(job, StackJob) else [job])
                    ]
                elif isinstance(made, Upload):
                    single.append(made)
                else:  # in their order: those before a stack, then the stack
                    if single:
                        yield single
                    yield made
                    single = []
            if single:
                yield single

    def evaluate(self, server: Server, levels: Sequence[int]) -> list[Score]:
        """The score of each level's sub-model on the test set."""
        starts = range(0, len(self._federation.data.test), EVAL_CHUNK)
        jobs = [EvalJob(level, start) for level in reversed(levels) for start in starts]  # the most expensive first
        scores = list(self._all(server, jobs))
        # Added up in the order of the jobs, whoever computed them.
        return [reduce(add, [score for job, score in scores if job.level == level]) for level in levels]

    def measure(self, server: Server, levels: Sequence[int]) -> dict[int, Tensors]:
        """Batch-norm statistics in server coordinates; where a level holds nothing, the server's values."""
        full = {}
        for job, measured in self._all(server, [MeasureJob(level) for level in reversed(levels)]):
            state = server.state(job.level)
            full[job.level] = clone({name: state[name] for name in measured})
            self._federation.current_slice(job.level, server).write(measured, full[job.level])
        return full

    def close(self) -> None:  # noqa: B027 (not every executor has something to free)
        """Frees processes and memory."""

    def _all(self, server: Server, jobs: Sequence[J]) -> Iterator[tuple[J, Any]]:
        """Every job has a result: what kills workers is tried here last."""
        for finished in self._compute(server, jobs):
            for job, made in finished:
                yield job, self._worker.do(server, job) if isinstance(made, Died) else made

    def _recall(self, job: AnyJob) -> Any:
        """What the client of a job remembers, or each of them; empty if nothing."""
        if isinstance(job, StackJob):
            return [self._recall(one) for one in job.jobs]
        if not isinstance(job, Job):
            return {}
        return self._store.get(job.client, self._federation.slice_of(job))


class InProcess(Executor):
    """Computes one job after the other in this process, when its result is asked for."""

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
        return super().train(server, jobs)  # type: ignore[return-value]  # nobody is lost

    def _compute(self, server: Server, jobs: Sequence[J]) -> Iterator[list[tuple[J, Any]]]:
        for job in jobs:
            with self._trace.span(str(job), "worker 1"):
                made = self._worker.do(server, job, self._recall(job))
            yield [(job, made)]
