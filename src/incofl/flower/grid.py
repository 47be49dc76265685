"""An executor whose clients are nodes of a Flower grid.

Replies are fetched one at a time, in the order of the schedule: others wait at the SuperLink. So the server holds one
upload whatever the cohort, and sums do not depend on who is first.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from incofl.client import Score
from incofl.config import Config
from incofl.engine.executor import InProcess, Lost
from incofl.engine.federation import Federation, Job
from incofl.engine.records import Row
from incofl.engine.trace import Trace
from incofl.errors import UploadError
from incofl.flower.memory import Accepted
from incofl.flower.messages import (
    Changed,
    Order,
    OutOfMemory,
    arrays,
    decode_reply,
    encode_order,
    num_bytes,
    one_line,
)
from incofl.flower.nodes import Fleet
from incofl.flower.settings import Settings
from incofl.method import Upload
from incofl.server import Server
from incofl.tensors import Tensors

CLOCKS = 60.0  # seconds by which the clocks of server and nodes may differ
TRANSFER = 60.0  # seconds that a reply has, at least, from its announcement until it is here
CRASHED = 8  # Flower's code for a client app whose process died


@dataclass(frozen=True)
class Turn:
    """A job that was sent to a node, if it could be."""

    job: Job
    node: int
    message: str | None
    sent: float
    bytes_down: int


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
        self.observed: list[Row] = []  # of the last round, a line for each reply

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload | Lost]]:
        """The uploads in the order of the jobs, each fetched when it is asked for."""
        self.observed, self._records = [], {}
        waiting, under_way = deque(jobs), deque[Turn]()
        while waiting or under_way:
            while waiting and len(under_way) < self._settings.window:
                under_way.append(self._send(server, waiting.popleft()))
            turn = under_way.popleft()
            start = time.perf_counter()
            outcome = self._outcome(turn)
            self._trace.add(str(turn.job), "nodes", start, time.perf_counter())
            yield [outcome]
        self._records = {}

    def evaluate(self, server: Server, levels: Sequence[int]) -> list[Score]:
        """The score of each level's sub-model on the server's test set."""
        return self._here.evaluate(server, levels)

    def measure(self, server: Server, levels: Sequence[int]) -> dict[int, Tensors]:
        """Batch-norm statistics of each level's sub-model on the server's training set."""
        return self._here.measure(server, levels)

    def close(self) -> None:
        """Nothing to free: the grid is Flower's."""

    def _send(self, server: Server, job: Job) -> Turn:
        piece = self._federation.slice(job.level, job.round)
        node = self._fleet.nodes[job.client]
        order = Order(self._fleet.run, self._config, job, self._accepted.manifest.get(job.client), node.known)
        sent = self._federation.method.server.sent(server, job.level)
        if job.level not in self._records:  # the same for all nodes of a level
            self._records[job.level] = arrays(piece.look(server.state(job.level))), arrays(piece.look(sent))
        content = encode_order(order, *self._records[job.level])
        message = Message(
            content, node.node, MessageType.TRAIN, ttl=self._settings.deadline + CLOCKS, group_id=str(job.round + 1)
        )
        return Turn(job, node.node, push(self._grid, message), time.monotonic(), num_bytes(content))

    def _outcome(self, turn: Turn) -> Upload | Lost:
        client = turn.job.client
        try:
            reply = self._reply(turn)
            if not reply.has_content():
                crashed = reply.has_error() and reply.error.code == CRASHED
                raise UploadError(words(reply) + (self._missed(client) if crashed else ""))
            upload, report = decode_reply(reply.content, self._federation, turn.job)
        except OutOfMemory as problem:
            return Lost(client, f"node {turn.node}: out of memory ({problem}){self._missed(client, at_once=True)}")
        except Changed as problem:
            return Lost(client, f"node {turn.node}: {problem}; {self._fleet.hear(turn.node, problem.answer)}")
        except UploadError as problem:
            return Lost(client, f"node {turn.node}: {problem}")
        self._fleet.succeeded(client)
        self.observed.append(
            {
                **{"client": client, "node": str(turn.node), "level": turn.job.level},
                **{"seconds": round(report.seconds, 3), "cpu_seconds": round(report.cpu_seconds, 3)},
                "peak_memory": report.peak_memory,
                **{"bytes_up": num_bytes(reply.content), "bytes_down": turn.bytes_down},
                **({"forgot": True} if report.forgot else {}),
            }
        )
        return upload

    def _reply(self, turn: Turn) -> Message:
        """A node's reply.

        Raises:
            UploadError: there is none, or none that can be read.
        """
        if turn.message is None:
            raise UploadError("its order could not be sent")
        client, until = turn.job.client, turn.sent + self._settings.deadline
        expired = False
        try:
            while (reply := pull(self._grid, turn.message, until)) is None:
                if expired:
                    raise UploadError(f"silent for {self._settings.deadline:g} s, its deadline{self._missed(client)}")
                time.sleep(self._settings.poll)
                # Looked for once more after the deadline: it may have come while an earlier one was waited for.
                expired = time.monotonic() > until
        except TimeoutError:
            waited = time.monotonic() - turn.sent
            raise UploadError(f"its reply has not arrived whole after {waited:.0f} s{self._missed(client)}") from None
        return reply

    def _missed(self, client: int, at_once: bool = False) -> str:
        """Gives a node that cannot keep up a smaller model, at once or when its patience is over; says so."""
        own = self._federation.method.level == "own"  # or all train the same, whatever they can
        smaller = own and (self._fleet.overwhelmed(client) if at_once else self._fleet.missed(client))
        return f"; it gets level {self._fleet.nodes[client].level} from now on" if smaller else ""


def push(grid: Grid, message: Message) -> str | None:
    """Sends a message; its id, if the SuperLink has taken it."""
    ids = list(grid.push_messages([message]))
    return ids[0] or None if ids else None


def pull(grid: Grid, message: str, until: float = 0.0) -> Message | None:
    """The reply to a message, if it has come; whose it is follows from the message, for errors are the SuperLink's.

    A reply is announced before it is there, and Flower itself would wait for the rest of it for hours.

    Args:
        grid: where to ask.
        message: its id.
        until: by when (``time.monotonic``) an announced reply must be here; it has a minute in any case.

    Raises:
        UploadError: it cannot be read.
        TimeoutError: it is announced, and not here in time.
    """
    reply: Future[Message | None] = Future()
    threading.Thread(target=_fetch, args=(grid, message, reply), daemon=True).start()
    try:
        return reply.result(max(until - time.monotonic(), TRANSFER))
    except (ValueError, TypeError, LookupError, AttributeError) as problem:  # of Flower, at what a stranger sent
        raise UploadError(f"its reply cannot be read: {one_line(str(problem))}") from None


def _fetch(grid: Grid, message: str, reply: Future[Message | None]) -> None:
    try:
        found = (one for one in grid.pull_messages([message]) if one.metadata.reply_to_message_id == message)
        reply.set_result(next(found, None))
    except BaseException as problem:  # whoever waits for the reply gets it
        reply.set_exception(problem)


def words(reply: Message) -> str:
    """Why there is no content in a reply."""
    return one_line(reply.error.reason or f"error {reply.error.code}") if reply.has_error() else "an empty reply"
