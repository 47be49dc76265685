"""Which clients of a round train side by side: a function of the cohort and of one choice for each level."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

from incofl.engine.federation import Federation, Job
from incofl.engine.vectorised import Declined, StackJob, declined
from incofl.engine.worker import Worker
from incofl.server import Server

STACK_BYTES = 2**30  # that the models of a stack may need together, by the estimate of ``incofl plan``
TURNS = 3  # that are measured to choose; one before them is not


class Grouping:
    """Makes stacks of the turns of a round, for levels of which that is wanted, possible and, if measured, faster."""

    def __init__(self, federation: Federation, worker: Worker) -> None:
        self._federation, self._worker = federation, worker
        self.choices: dict[int, bool] = {}  # by level, whether its clients train side by side
        self.on_choice: Callable[[int, bool], None] = lambda level, chosen: None
        self.say: Callable[[str], None] = lambda line: None
        self._said: set[str] = set()

    def __call__(self, server: Server, jobs: Sequence[Job]) -> list[Job | StackJob]:
        """The turns of a round, stacks in the places of their first clients."""
        stacks: list[list[Job]] = []
        filling: dict[int, list[Job]] = {}  # by level, the stack that is not full yet
        if not self._federation.vectorise:
            return list(jobs)
        for job in jobs:
            alike = [other for other in jobs if other.level == job.level] if job.level not in self.choices else []
            if not self._chosen(server, job.level, alike):
                stacks.append([job])
                continue
            if job.level not in filling:
                filling[job.level] = []
                stacks.append(filling[job.level])
            filling[job.level].append(job)
            if len(filling[job.level]) == self._size(job.level):
                del filling[job.level]
        return [StackJob(tuple(stack)) if len(stack) > 1 else stack[0] for stack in stacks]

    def _size(self, level: int) -> int:
        """How many clients of a level train side by side at most."""
        return min(self._federation.vectorise_clients, STACK_BYTES // max(1, self._federation.costs[level].memory))

    def _chosen(self, server: Server, level: int, jobs: Sequence[Job]) -> bool:
        if level not in self.choices:
            reason = declined(self._federation)
            if reason is None and self._size(level) < 2:
                reason = f"two models of level {level} need more than {STACK_BYTES >> 30} GiB"
            try:
                possible = reason is None and bool(self._worker.vectorised(jobs[0]))
            except Declined as problem:
                reason, possible = str(problem), False
            if reason is not None and reason not in self._said:
                self._said.add(reason)
                self.say(f"engine.vectorise: clients take turns, because {reason}")
            if possible and self._federation.vectorise == "auto":
                if len(jobs) < 2:
                    return False  # too few to measure: another round decides
                possible = self._is_faster(server, jobs)
            self.choices[level] = possible
            self.on_choice(level, self.choices[level])
        return self.choices[level]

    def _is_faster(self, server: Server, jobs: Sequence[Job]) -> bool:
        """Whether a stack of the first clients takes less time than their turns; what they make of it is forgotten."""
        stack = StackJob(tuple(jobs[: self._size(jobs[0].level)]))

        def seconds(job: Job | StackJob) -> float:
            start = perf_counter()
            self._worker.do(server, job)
            return perf_counter() - start

        turns = [seconds(stack.jobs[at % len(stack.jobs)]) for at in range(1 + TURNS)][1:]
        together = min(seconds(stack) for _ in range(2))
        return together < median(turns) * len(stack.jobs)
