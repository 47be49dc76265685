"""Which clients of a round train side by side: a function of the cohort and of one choice for each level."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from time import perf_counter

from incofl.engine.federation import Federation, Job
from incofl.engine.stacked_batches import Declined
from incofl.engine.vectorised import StackJob, declined
from incofl.engine.worker import Worker
from incofl.server import Server

STACK_BYTES = 2**30  # that the models of a stack may need together, by the estimate of ``incofl plan``
TURNS = 3  # that are measured to choose: of clients with much, some and little to do
REPEATS = 2  # of each measurement, of which the shortest counts


@dataclass(frozen=True)
class Way:
    """The seconds that the clients of a level need in a round, one way or the other."""

    total: float
    longest: float  # of what one worker must do alone: a turn, or a stack


class Grouping:
    """Makes stacks of the turns of a round, for levels of which that is wanted, possible and, if measured, faster."""

    def __init__(self, federation: Federation, worker: Worker, workers: int = 1) -> None:
        self._federation, self._worker, self._workers = federation, worker, workers
        self.choices: dict[int, bool] = {}  # by level, whether its clients train side by side
        self.on_choice: Callable[[], None] = lambda: None
        self.say: Callable[[str], None] = lambda line: None
        self._said: set[str] = set()

    def __call__(self, server: Server, jobs: Sequence[Job]) -> list[Job | StackJob]:
        """The turns of a round, stacks in the places of their first clients."""
        if not self._federation.vectorise:
            return list(jobs)
        self._choose(server, jobs)
        stacks: list[list[Job]] = []
        filling: dict[int, list[Job]] = {}  # by level, the stack that is not full yet
        longest_first = {level: iter(self._of_level(level, jobs)) for level in {job.level for job in jobs}}
        for job in jobs:
            if not self.choices.get(job.level):
                stacks.append([job])
                continue
            job = next(longest_first[job.level])
            if job.level not in filling:
                filling[job.level] = []
                stacks.append(filling[job.level])
            filling[job.level].append(job)
            if len(filling[job.level]) == self._size(job.level):
                del filling[job.level]
        return [StackJob(tuple(stack)) if len(stack) > 1 else stack[0] for stack in stacks]

    def _of_level(self, level: int, jobs: Sequence[Job]) -> list[Job]:
        """The turns of a level, those with the most steps first, as stacks need them."""
        own = [job for job in jobs if job.level == level]
        return sorted(own, key=lambda job: -self._federation.num_examples(job.client))

    def _size(self, level: int) -> int:
        """How many clients of a level train side by side at most."""
        return min(self._federation.vectorise_clients, STACK_BYTES // max(1, self._federation.costs[level].memory))

    def _choose(self, server: Server, jobs: Sequence[Job]) -> None:
        """Chooses for the levels that have clients in a round for the first time; a single client is no measure."""
        new = sorted({job.level for job in jobs} - self.choices.keys())
        by_level = {level: self._of_level(level, jobs) for level in new}
        chosen = {level: self._possible(own[0]) for level, own in by_level.items()}
        if self._federation.vectorise == "auto":
            possible = {level: own for level, own in by_level.items() if chosen[level]}
            measured = {level: self._measure(server, own) for level, own in possible.items() if len(own) > 1}
            chosen = {level: False for level in new if not chosen[level]} | faster(measured, self._workers)
        if chosen:
            self.choices |= chosen
            self.on_choice()

    def _possible(self, job: Job) -> bool:
        """Whether the clients of a level can train side by side; if not, the reason is said once."""
        reason = declined(self._federation)
        if reason is None and self._size(job.level) < 2:
            reason = f"two models of level {job.level} need more than {STACK_BYTES >> 30} GiB"
        if reason is None:
            try:
                self._worker.vectorised(job)
            except Declined as problem:
                reason = str(problem)
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            self.say(f"engine.vectorise: clients take turns, because {reason}")
        return reason is None

    def _measure(self, server: Server, jobs: Sequence[Job]) -> tuple[Way, Way]:
        """The turns of a level, longest first, and its stacks; what the measured clients make of it is forgotten."""
        stack = StackJob(tuple(jobs[: self._size(jobs[0].level)]))

        def seconds(job: Job | StackJob) -> float:
            start = perf_counter()
            self._worker.do(server, job)
            return perf_counter() - start

        places = [(2 * at + 1) * len(stack.jobs) // (2 * TURNS) for at in range(TURNS)]
        measured: list[Job | StackJob] = [stack, stack.jobs[0], *(stack.jobs[place] for place in places)]
        seconds(stack.jobs[0])  # not counted
        together, longest, *turns = (min(seconds(job) for _ in range(REPEATS)) for job in measured)
        return Way(mean(turns) * len(jobs), longest), Way(together * len(jobs) / len(stack.jobs), together)


def faster(measured: Mapping[int, tuple[Way, Way]], workers: int) -> dict[int, bool]:
    """By level, whether stacks are the better way, so that a round on some workers is done as soon as possible.

    It takes its share of all work, but no less than its longest piece: few large stacks can leave workers idle.
    """

    def duration(choice: tuple[bool, ...]) -> tuple[float, float]:
        ways = [pair[stacks] for pair, stacks in zip(measured.values(), choice, strict=True)]
        work = sum(way.total for way in ways)
        return max(
            work / workers, max(way.longest for way in ways)
        ), work  # of two that are as quick, the one with less

    if not measured:
        return {}
    best = min(product((False, True), repeat=len(measured)), key=duration)
    return dict(zip(measured, best, strict=True))
