"""Where clients' turns are computed. An executor decides place and time, never the result."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Protocol

from incofl.client import Upload
from incofl.engine.federation import Federation, Job
from incofl.engine.store import LIMIT, ClientStore
from incofl.engine.trace import Trace
from incofl.engine.worker import EVAL_CHUNK, EvalJob, MeasureJob, Worker
from incofl.server import Server
from incofl.task import Score
from incofl.tensors import Tensors, clone


@dataclass(frozen=True)
class Lost:
    """A client whose turn could not be computed, with the reason."""

    client: int
    reason: str


class Executor(Protocol):
    """The seam between a round and the processes that compute it."""

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload | Lost]]:
        """The uploads in the order of the jobs, lazily, grouped as they become ready.

        They are valid until the next ones are asked for.
        """
        ...

    def evaluate(self, server: Server, levels: Sequence[int]) -> list[Score]:
        """The score of each level's sub-model on the test set."""
        ...

    def measure(self, server: Server, levels: Sequence[int]) -> dict[int, Tensors]:
        """Batch-norm statistics of each level's sub-model, in server coordinates."""
        ...

    def close(self) -> None:
        """Frees processes and memory."""
        ...


class InProcess:
    """Computes one turn after the other in this process."""

    def __init__(self, federation: Federation, trace: Trace | None = None, store: ClientStore | None = None) -> None:
        self._federation = federation
        self._worker = Worker(federation)
        self._trace = trace or Trace()
        self._store = store or make_store(federation)

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
        """The uploads of the jobs, each computed when it is asked for."""
        for job in jobs:
            memory = self._store.get(job.client, self._federation.slice(job.level, job.round, job.client))
            with self._trace.span(str(job), "worker 1"):
                upload = self._worker.train(server, job, memory)
            yield [upload]

    def evaluate(self, server: Server, levels: Sequence[int]) -> list[Score]:
        """The score of each level's sub-model on the test set."""
        jobs = eval_jobs(self._federation, levels)
        scores = []
        for job in jobs:
            with self._trace.span(str(job), "worker 1"):
                scores.append(self._worker.evaluate(server, job))
        return total_scores(levels, jobs, scores)

    def measure(self, server: Server, levels: Sequence[int]) -> dict[int, Tensors]:
        """Batch-norm statistics of each level's sub-model, in server coordinates."""
        measured = {}
        for level in levels:
            with self._trace.span(str(MeasureJob(level)), "worker 1"):
                measured[level] = self._worker.measure(server, MeasureJob(level))
        return in_server_coordinates(self._federation, server, measured)

    def close(self) -> None:
        """Nothing to free."""


def make_store(federation: Federation, folder: Path | None = None, limit: int = LIMIT) -> ClientStore:
    """A store for the memory of a federation's clients."""
    return ClientStore(federation.model.layout, federation.slice, folder, limit)


def in_server_coordinates(federation: Federation, server: Server, parts: dict[int, Tensors]) -> dict[int, Tensors]:
    """Entries of the levels' sub-models as the server has them; where a level holds nothing, the server's values."""
    full: dict[int, Tensors] = {}
    for level, part in parts.items():
        slice_, state = federation.current_slice(level, server), server.state(level)
        full[level] = clone({name: state[name] for name in part})
        slice_.write(part, full[level])
    return full


def eval_jobs(federation: Federation, levels: Sequence[int]) -> list[EvalJob]:
    """The evaluation of some levels in parts, the most expensive first."""
    starts = range(0, len(federation.data.test), EVAL_CHUNK)
    return [EvalJob(level, start) for level in reversed(levels) for start in starts]


def total_scores(levels: Sequence[int], jobs: Sequence[EvalJob], scores: Sequence[Score]) -> list[Score]:
    """The scores of whole levels, added up in the order of the jobs whoever computed them."""
    return [
        reduce(add, [score for job, score in zip(jobs, scores, strict=True) if job.level == level]) for level in levels
    ]
