"""An executor whose clients are nodes of a Flower grid.

Replies are fetched as they come, checked, and added up in the order of the schedule, so that sums do not depend on who
is first. Early replies wait on disk: the server holds one upload, and those that are just arriving.
"""

import math
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from incofl.client import Upload
from incofl.config import Config
from incofl.engine.executor import InProcess, Lost
from incofl.engine.federation import Federation, Job
from incofl.engine.run_folder import Row
from incofl.engine.trace import Trace
from incofl.errors import UploadError
from incofl.flower.early_replies import Reply
from incofl.flower.fleet import Fleet
from incofl.flower.held_out import HeldOut
from incofl.flower.memory import MemoryLedger
from incofl.flower.protocol import (
    Changed,
    DataFacts,
    LacksFrozen,
    Order,
    OutOfMemory,
    Report,
    arrays,
    decode_reply,
    digest,
    encode_order,
    num_bytes,
)
from incofl.flower.settings import Settings
from incofl.flower.transport import CLOCKS, TRANSFER, Exchange, Missed, reason_of
from incofl.server import Server
from incofl.tensors import Tensors

CRASHED = 8  # Flower's code for a client app whose process died


class Parts(NamedTuple):
    """A job's slice without its frozen part, the extra tensors of the method, and the frozen part, which stays here."""

    sent: tuple[ArrayRecord, ArrayRecord]
    frozen: Tensors
    digest: str


@dataclass
class Turn:
    """A job, the orders to its node, and the outcome."""

    job: Job
    node: int
    parts: Parts
    exchange: Exchange | None = None
    bytes_down: int = 0
    with_frozen: bool = False
    outcome: Reply | UploadError | None = None


class GridExecutor:
    """Sends turns to nodes; evaluates in this process, which has the test set."""

    def __init__(
        self,
        grid: Grid,
        config: Config,
        federation: Federation,
        fleet: Fleet,
        ledger: MemoryLedger,
        settings: Settings,
        trace: Trace | None = None,
    ) -> None:
        self._grid, self._config, self._federation, self._fleet = grid, config.to_toml(), federation, fleet
        self._ledger, self._settings, self._trace = ledger, settings, trace or Trace()
        local = InProcess(federation, trace)
        self.evaluate, self.measure = local.evaluate, local.measure
        self._parts: dict[int, Parts] = {}  # by level
        self._abandoned: dict[int, Exchange] = {}  # by node, replies that were not here in time and may still come
        self._early = Path(settings.out) / "early"
        shutil.rmtree(self._early, ignore_errors=True)  # left by a process that was killed
        self.observed: list[Row] = []  # a line for each reply of the last round
        self.reports: list[Report] = []  # likewise
        self.held_out = HeldOut(federation)

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload | Lost]]:
        """The uploads in the order of the jobs."""
        self.observed, self.reports, self._parts = [], [], {}
        self._abandoned = {node: late for node, late in self._abandoned.items() if late.running}
        waiting, under_way = deque(jobs), deque[Turn]()
        while waiting or under_way:
            while waiting and len(under_way) < self._settings.window:
                under_way.append(self._begin(server, waiting.popleft()))
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
        self._parts = {}

    def close(self) -> None:
        """Removes what waited on disk; the grid is Flower's."""
        shutil.rmtree(self._early, ignore_errors=True)

    def _begin(self, server: Server, job: Job) -> Turn:
        turn = Turn(job, self._fleet.nodes[job.client].node, self._cut(server, job))
        if turn.node in self._abandoned:
            turn.outcome = UploadError("its reply to an earlier order is still on its way")
        else:
            self._send(turn)
        return turn

    def _cut(self, server: Server, job: Job) -> Parts:
        if job.level not in self._parts or self._federation.splitter.by_client:
            slice_, rule = self._federation.slice(job.level, job.round, job.client), self._federation.method.server
            held, extra = slice_.look(server.state(job.level)), slice_.look(rule.extra_for_client(server, job.level))
            frozen = {name: held.pop(name) for name in slice_.frozen}
            self._parts[job.level] = Parts((arrays(held), arrays(extra)), frozen, digest(frozen))
        return self._parts[job.level]

    def _send(self, turn: Turn) -> None:
        run, known, parts = self._fleet.run, self._fleet.nodes[turn.job.client].known, turn.parts
        memory, facts = self._ledger.manifest.get(turn.job.client), DataFacts.of(self._federation.data)
        order = Order(run, self._config, turn.job, memory, known, parts.digest, facts)
        content = encode_order(order, *parts.sent, arrays(parts.frozen) if turn.with_frozen else None)
        deadline, group = self._settings.deadline, str(turn.job.round + 1)
        message = Message(content, turn.node, MessageType.TRAIN, ttl=deadline + CLOCKS, group_id=group)
        turn.exchange = Exchange(self._grid, message, max(deadline, TRANSFER), deadline)
        turn.bytes_down += num_bytes(content)

    def _look(self, turn: Turn, early: bool = False) -> None:
        """Looks for a reply and takes it in; an ``early`` one is put on disk."""
        if turn.outcome is not None or turn.exchange is None:
            return
        try:
            if (reply := turn.exchange.reply()) is None:
                return
            turn.outcome = self._checked(turn, reply)
        except LacksFrozen as problem:
            if turn.with_frozen:
                turn.outcome = problem
            else:
                turn.with_frozen = True
                self._send(turn)
        except UploadError as problem:
            turn.outcome = problem
            if turn.exchange.running:
                self._abandoned[turn.node] = turn.exchange
        if early and isinstance(turn.outcome, Reply):
            turn.outcome = turn.outcome.stored(self._early / f"client-{turn.job.client}.safetensors")

    def _checked(self, turn: Turn, reply: Message) -> Reply:
        """What a reply holds, if that can be accepted."""
        if not reply.has_content():
            crashed = reply.has_error() and reply.error.code == CRASHED
            raise (Missed if crashed else UploadError)(reason_of(reply))
        upload, report = decode_reply(reply.content, self._federation, turn.job, math.prod(self.held_out.shape))
        self.held_out.check(report)
        return Reply(upload, report, num_bytes(reply.content))

    def _result(self, turn: Turn) -> Upload | Lost:
        """What the round gets of a turn, and what the fleet learns from it."""
        client, outcome = turn.job.client, turn.outcome
        if not isinstance(outcome, Reply):
            learnt = ""
            if isinstance(outcome, Changed):
                learnt = f"; {self._fleet.hear(turn.node, outcome.answer)}"
            elif isinstance(outcome, Missed | OutOfMemory):
                learnt = self._missed(client, at_once=isinstance(outcome, OutOfMemory))
            return Lost(client, f"node {turn.node}: {outcome}{learnt}")
        self._fleet.succeeded(client)
        report = outcome.report
        row: Row = {"client": client, "node": str(turn.node), "level": turn.job.level}
        row |= {"seconds": round(report.seconds, 3), "cpu_seconds": round(report.cpu_seconds, 3)}
        row |= {"peak_memory": report.peak_memory, "bytes_up": outcome.bytes_up, "bytes_down": turn.bytes_down}
        if report.forgot:
            row["forgot"] = True
        if report.tested:
            row |= {"accuracy": self.held_out.value([report]), "tested": report.tested}
        self.observed.append(row)
        self.reports.append(report)
        return outcome.whole()

    def _missed(self, client: int, at_once: bool = False) -> str:
        """Gives a node that cannot keep up a smaller model, at once or when its patience is over; says so."""
        own = self._federation.method.level == "own"  # or all train the same, whatever they can
        smaller = own and (self._fleet.overwhelmed(client) if at_once else self._fleet.missed(client))
        return f"; it gets level {self._fleet.nodes[client].level} from now on" if smaller else ""
