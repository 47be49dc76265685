"""An executor whose clients are nodes of a Flower grid.

Replies are fetched as they come, checked, and added up in the order of the schedule, so that sums do not depend on who
is first. What is early waits on disk: the server holds one upload, and those that are just arriving.
"""

import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from incofl.client import Score
from incofl.config import Config
from incofl.engine.executor import InProcess, Lost
from incofl.engine.federation import Federation, Job
from incofl.engine.records import Row
from incofl.engine.trace import Trace
from incofl.errors import UploadError
from incofl.flower.arrived import Arrived
from incofl.flower.memory import Accepted
from incofl.flower.messages import (
    Changed,
    Order,
    OutOfMemory,
    arrays,
    decode_reply,
    encode_order,
    num_bytes,
)
from incofl.flower.nodes import Fleet
from incofl.flower.post import TRANSFER, Fetch, push, words
from incofl.flower.settings import Settings
from incofl.method import Upload
from incofl.server import Server
from incofl.tensors import Tensors

CLOCKS = 60.0  # seconds by which the clocks of server and nodes may differ
STALL = 2.0  # seconds after which a fetch keeps nobody else waiting
CRASHED = 8  # Flower's code for a client app whose process died


class Missed(UploadError):
    """A node that cannot keep up."""


@dataclass
class Turn:
    """A job that was sent to a node, if it could be, and what has come of it."""

    job: Job
    node: int
    message: str | None
    sent: float
    bytes_down: int
    fetch: Fetch | None = None
    outcome: Arrived | UploadError | None = None


class GridExecutor:
    """Sends turns to nodes; evaluates in this process, which has the test set."""

    def __init__(
        self,
        grid: Grid,
        config: Config,
        federation: Federation,
        fleet: Fleet,
        accepted: Accepted,
        settings: Settings,
        trace: Trace | None = None,
    ) -> None:
        self._grid, self._config, self._federation, self._fleet = grid, config.to_toml(), federation, fleet
        self._accepted, self._settings, self._trace = accepted, settings, trace or Trace()
        self._here = InProcess(federation, trace)
        self._records: dict[int, tuple[ArrayRecord, ArrayRecord]] = {}
        self._abandoned: dict[int, Fetch] = {}  # by node, replies that were not here in time and may still come
        self._shelf = Path(settings.out) / "early"
        shutil.rmtree(self._shelf, ignore_errors=True)  # of a process that was killed
        self.observed: list[Row] = []  # of the last round, a line for each reply

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload | Lost]]:
        """The uploads in the order of the jobs."""
        self.observed, self._records = [], {}
        self._abandoned = {node: fetch for node, fetch in self._abandoned.items() if fetch.running}
        waiting, under_way = deque(jobs), deque[Turn]()
        while waiting or under_way:
            while waiting and len(under_way) < self._settings.window:
                under_way.append(self._send(server, waiting.popleft()))
            start = time.perf_counter()
            turn = under_way.popleft()
            while turn.outcome is None:
                self._look(turn)
                for other in under_way:
                    self._look(other, early=True)
                if turn.outcome is None:
                    time.sleep(self._settings.poll)
            self._trace.add(str(turn.job), "nodes", start, time.perf_counter())
            yield [self._result(turn)]
        self._records = {}

    def evaluate(self, server: Server, levels: Sequence[int]) -> list[Score]:
        """The score of each level's sub-model on the server's test set."""
        return self._here.evaluate(server, levels)

    def measure(self, server: Server, levels: Sequence[int]) -> dict[int, Tensors]:
        """Batch-norm statistics of each level's sub-model on the server's training set."""
        return self._here.measure(server, levels)

    def close(self) -> None:
        """Frees what waited on disk; the grid is Flower's."""
        shutil.rmtree(self._shelf, ignore_errors=True)

    def _send(self, server: Server, job: Job) -> Turn:
        piece = self._federation.slice(job.level, job.round)
        node = self._fleet.nodes[job.client]
        if node.node in self._abandoned:
            stalled = UploadError("its reply to an earlier order is still on its way")
            return Turn(job, node.node, None, time.monotonic(), 0, outcome=stalled)
        order = Order(self._fleet.run, self._config, job, self._accepted.manifest.get(job.client), node.known)
        sent = self._federation.method.server.sent(server, job.level)
        if job.level not in self._records:  # the same for all nodes of a level
            self._records[job.level] = arrays(piece.look(server.state(job.level))), arrays(piece.look(sent))
        content = encode_order(order, *self._records[job.level])
        deadline = self._settings.deadline
        message = Message(content, node.node, MessageType.TRAIN, ttl=deadline + CLOCKS, group_id=str(job.round + 1))
        id = push(self._grid, message, max(deadline, TRANSFER))
        unsent = UploadError("its order could not be sent") if id is None else None
        return Turn(job, node.node, id, time.monotonic(), num_bytes(content), outcome=unsent)

    def _look(self, turn: Turn, early: bool = False) -> None:
        """Sees whether a reply has come, and takes in what has; what is ``early`` is put on disk."""
        if turn.outcome is not None or turn.message is None:
            return
        until = turn.sent + self._settings.deadline
        fetch = turn.fetch = turn.fetch or Fetch(self._grid, turn.message)
        try:
            reply = fetch.reply(STALL)
        except TimeoutError:
            if time.monotonic() > max(until, fetch.begun + TRANSFER):
                turn.outcome = Missed(f"its reply has not arrived whole after {time.monotonic() - turn.sent:.0f} s")
                self._abandoned[turn.node] = fetch
            return
        except UploadError as problem:
            turn.outcome = problem
            return
        turn.fetch = None
        if reply is not None:
            turn.outcome = self._checked(turn, reply)
            if early and isinstance(turn.outcome, Arrived):
                self._shelf.mkdir(exist_ok=True)
                turn.outcome = turn.outcome.shelved(self._shelf / f"client-{turn.job.client}.safetensors")
        elif fetch.begun > until:  # one that was begun before might have missed what came since
            turn.outcome = Missed(f"silent for {self._settings.deadline:g} s, its deadline")

    def _checked(self, turn: Turn, reply: Message) -> Arrived | UploadError:
        """What a reply holds, if that can be accepted."""
        if not reply.has_content():
            crashed = reply.has_error() and reply.error.code == CRASHED
            return (Missed if crashed else UploadError)(words(reply))
        try:
            upload, report = decode_reply(reply.content, self._federation, turn.job)
        except UploadError as problem:
            return problem
        return Arrived(upload, report, num_bytes(reply.content))

    def _result(self, turn: Turn) -> Upload | Lost:
        """What the round gets of a turn, and what the fleet learns from it."""
        client, outcome = turn.job.client, turn.outcome
        if not isinstance(outcome, Arrived):
            learnt = ""
            if isinstance(outcome, Changed):
                learnt = f"; {self._fleet.hear(turn.node, outcome.answer)}"
            elif isinstance(outcome, Missed | OutOfMemory):
                learnt = self._missed(client, at_once=isinstance(outcome, OutOfMemory))
            return Lost(client, f"node {turn.node}: {outcome}{learnt}")
        self._fleet.succeeded(client)
        report = outcome.report
        self.observed.append(
            {
                **{"client": client, "node": str(turn.node), "level": turn.job.level},
                **{"seconds": round(report.seconds, 3), "cpu_seconds": round(report.cpu_seconds, 3)},
                "peak_memory": report.peak_memory,
                **{"bytes_up": outcome.bytes_up, "bytes_down": turn.bytes_down},
                **({"forgot": True} if report.forgot else {}),
                **({"correct": report.correct, "tested": report.tested} if report.tested else {}),
            }
        )
        return outcome.whole()

    def _missed(self, client: int, at_once: bool = False) -> str:
        """Gives a node that cannot keep up a smaller model, at once or when its patience is over; says so."""
        own = self._federation.method.level == "own"  # or all train the same, whatever they can
        smaller = own and (self._fleet.overwhelmed(client) if at_once else self._fleet.missed(client))
        return f"; it gets level {self._fleet.nodes[client].level} from now on" if smaller else ""
