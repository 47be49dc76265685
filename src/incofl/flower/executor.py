"""An executor whose clients are nodes of a Flower grid.

Replies are fetched as they come, checked, and added up in the order of the schedule, so that sums do not depend on who
is first. Early replies wait on disk: the server holds one upload, and those that are just arriving.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid
from safetensors.torch import load_file, save_file

from incofl.client import Upload
from incofl.config import Config
from incofl.engine.executor import InProcess, Lost
from incofl.engine.federation import Federation, Job
from incofl.engine.run_folder import Row
from incofl.engine.trace import Trace
from incofl.errors import UploadError
from incofl.flower import protocol
from incofl.flower.fleet import Fleet
from incofl.flower.held_out import HeldOut
from incofl.flower.memory import MemoryLedger
from incofl.flower.protocol import FACTS, TENSORS, Changed, LacksFrozen, Missed, Order, OutOfMemory, Report
from incofl.flower.settings import Settings
from incofl.flower.transport import CLOCKS, Exchange, reason_of
from incofl.server import Server
from incofl.tensors import Tensors, clone

CRASHED = 8  # Flower's code for a client app whose process died
LOG = getLogger("flwr")  # Flower shows what is logged there to everybody who watches the run


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
    bytes_up: int = 0
    with_frozen: bool = False
    early: bool = False  # its upload is on disk
    outcome: tuple[Upload, Report] | UploadError | None = None


@dataclass
class GridExecutor:
    """Sends turns to nodes; evaluates in this process, which has the test set."""

    grid: Grid
    settings: Settings
    config: Config
    federation: Federation
    fleet: Fleet
    ledger: MemoryLedger
    trace: Trace

    def __post_init__(self) -> None:
        local = InProcess(self.federation, self.trace)
        self.evaluate, self.measure, self.close = local.evaluate, local.measure, local.close
        self._parts: dict[int, Parts] = {}  # by level
        self._abandoned: dict[int, Exchange] = {}  # by node, replies that were not here in time and may still come
        self._rows: list[Row] = []  # a line for each reply of the last round
        self._reports: list[Report] = []  # likewise
        self._held_out = HeldOut(self.federation)

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload | Lost]]:
        self._rows, self._reports, self._parts = [], [], {}
        self._abandoned = {node: late for node, late in self._abandoned.items() if late.running}
        waiting, under_way = deque(jobs), deque[Turn]()
        while waiting or under_way:
            while waiting and len(under_way) < self.settings.window:
                under_way.append(self._begin(server, waiting.popleft()))
            start, turn = time.perf_counter(), under_way.popleft()
            while turn.outcome is None:
                self._look(turn)
                for other in under_way:
                    self._look(other, early=True)
                if turn.outcome is None:
                    time.sleep(self.settings.poll)
            self.trace.add(str(turn.job), "nodes", start, time.perf_counter())
            yield [self._result(turn, turn.outcome)]
        self._parts = {}

    def observed(self) -> Row:
        """What the nodes of the last round measured."""
        row = Row(nodes=self._rows)
        if (value := self._held_out.value(self._reports)) is not None:
            tested = sum(report.tested for report in self._reports)
            LOG.info("incofl: on %d held-out examples of nodes, before they trained: %.4g", tested, value)
            row["accuracy_on_nodes"] = value
        return row

    def _begin(self, server: Server, job: Job) -> Turn:
        turn = Turn(job, self.fleet.nodes[job.client].node, self._cut(server, job))
        if turn.node in self._abandoned:
            turn.outcome = UploadError("its reply to an earlier order is still on its way")
        else:
            self._send(turn)
        return turn

    def _cut(self, server: Server, job: Job) -> Parts:
        if job.level not in self._parts or self.federation.splitter.by_client:
            slice_, rule = self.federation.slice(job.level, job.round, job.client), self.federation.method.server
            held, extra = slice_.look(server.state(job.level)), slice_.look(rule.extra_for_client(server, job.level))
            frozen = {name: held.pop(name) for name in slice_.frozen}
            sent = protocol.arrays(held), protocol.arrays(extra)
            self._parts[job.level] = Parts(sent, frozen, protocol.digest(frozen))
        return self._parts[job.level]

    def _send(self, turn: Turn) -> None:
        job, parts, deadline = turn.job, turn.parts, self.settings.deadline
        memory, known = self.ledger.manifest.get(job.client), self.fleet.nodes[job.client].known
        facts = {name: value for name in FACTS if (value := getattr(self.federation.data, name)) is not None}
        order = Order(self.fleet.run, self.config.to_toml(), job, memory, known, parts.digest, facts)
        frozen = protocol.arrays(parts.frozen) if turn.with_frozen else None
        content = protocol.encode_order(order, *parts.sent, frozen)
        ttl, group = deadline + CLOCKS, str(job.round + 1)
        message = Message(content, turn.node, MessageType.TRAIN, ttl=ttl, group_id=group)
        turn.exchange = Exchange(self.grid, message, deadline)
        turn.bytes_down += protocol.num_bytes(content)

    def _look(self, turn: Turn, early: bool = False) -> None:
        """Looks for a reply and takes it in; an ``early`` one is put on disk."""
        if turn.outcome is not None or turn.exchange is None:
            return
        try:
            if (reply := turn.exchange.reply()) is None:
                return
            if not reply.has_content():
                crashed = reply.has_error() and reply.error.code == CRASHED
                raise (Missed if crashed else UploadError)(reason_of(reply))
            totals = math.prod(self._held_out.shape)
            upload, report = protocol.decode_reply(reply.content, self.federation, turn.job, totals)
            self._held_out.check(report)
        except UploadError as problem:
            if isinstance(problem, LacksFrozen) and not turn.with_frozen:
                turn.with_frozen = True
                self._send(turn)
                return
            turn.outcome = problem
            if turn.exchange.running:
                self._abandoned[turn.node] = turn.exchange
            return
        turn.early, turn.bytes_up = early, protocol.num_bytes(reply.content)
        turn.outcome = on_disk(upload, Path(self.settings.out)) if early else upload, report

    def _result(self, turn: Turn, outcome: tuple[Upload, Report] | UploadError) -> Upload | Lost:
        """What the round gets of a turn, and what the fleet learns from it."""
        client = turn.job.client
        if isinstance(outcome, UploadError):
            return Lost(client, f"node {turn.node}: {outcome}{self._learnt(turn, outcome)}")
        upload, report = outcome
        self.fleet.nodes[client].missed = 0
        row: Row = {"client": client, "node": str(turn.node), "level": turn.job.level}
        row |= {"seconds": round(report.seconds, 3), "cpu_seconds": round(report.cpu_seconds, 3)}
        row |= {"peak_memory": report.peak_memory, "bytes_up": turn.bytes_up, "bytes_down": turn.bytes_down}
        if report.forgot:
            row["forgot"] = True
        if report.tested:
            row |= {"accuracy": self._held_out.value([report]), "tested": report.tested}
        self._rows.append(row)
        self._reports.append(report)
        if turn.early:
            in_memory: dict[str, Any] = {part: clone(getattr(upload, part)) for part in TENSORS}
            return dataclasses.replace(upload, **in_memory)
        return upload

    def _learnt(self, turn: Turn, problem: UploadError) -> str:
        """What follows from a problem, in words: a node that cannot keep up gets a smaller model."""
        if isinstance(problem, Changed):
            return f"; {self.fleet.hear(turn.node, problem.answer)}"
        own = self.federation.method.level == "own"  # or all train the same, whatever they can
        client, at_once = turn.job.client, isinstance(problem, OutOfMemory)
        if own and isinstance(problem, Missed) and self.fleet.missed(client, at_once):
            return f"; it gets level {self.fleet.nodes[client].level} from now on"
        return ""


def on_disk(upload: Upload, folder: Path) -> Upload:
    """The same upload with its tensors in a file that is mapped into memory; it is gone when nobody needs them."""
    path, tensors = folder / "early.safetensors", {part: getattr(upload, part) for part in TENSORS}
    flat = {f"{part}/{name}": value.contiguous() for part in TENSORS for name, value in tensors[part].items()}
    save_file(flat, path)
    found = load_file(path)
    path.unlink()
    mapped: dict[str, Any] = {part: {name: found[f"{part}/{name}"] for name in tensors[part]} for part in TENSORS}
    return dataclasses.replace(upload, **mapped)
