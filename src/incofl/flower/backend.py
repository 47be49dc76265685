"""A fleet of Flower nodes as the place where the clients of a run are: replies are checked as they come.

They are added up in the order of the schedule, so that sums do not depend on who is first; early ones wait on disk.
"""

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid
from safetensors.torch import load_file, save

from incofl.client import Upload
from incofl.config import Config
from incofl.data import Data, Examples
from incofl.data.cache import digest
from incofl.engine.backend import Backend
from incofl.engine.build import build
from incofl.engine.executor import Executor, InProcess, Lost
from incofl.engine.federation import Federation, Job
from incofl.engine.files import PRIVATE, atomic_write
from incofl.engine.round import RoundStats
from incofl.engine.run_folder import Row, RunFolder
from incofl.engine.trace import Trace
from incofl.engine.worker import Worker
from incofl.errors import ConfigError, RunError
from incofl.flower import protocol
from incofl.flower.fleet import Fleet
from incofl.flower.protocol import TENSORS, Answer, Order, Refusal, Report
from incofl.flower.settings import Settings
from incofl.flower.transport import CLOCKS, LOG, REPLY, SAVED, Exchange
from incofl.server import Server
from incofl.tensors import Tensors, clone, map_inputs, num_bytes

FACTS = ("name", "classes", "vocabulary", "sequence")  # attributes of ``Data`` that one node's may not show


class FlowerBackend(Backend):
    """Nodes that come and go."""

    def __init__(self, grid: Grid, settings: Settings) -> None:
        self._grid, self._settings, self._attempts = grid, settings, 0

    def build(self, config: Config, folder: RunFolder) -> Federation:
        """The federation; if the server's data have no training examples, only the nodes have some."""
        self._settings.check(config)
        self._nodes_file, data = folder.nodes, config.objects.get("data")
        self._only_nodes_have_examples = isinstance(data, Data) and not len(data.train)
        nobody = [_some(0)] * config.num_clients
        known = nobody if self._only_nodes_have_examples else folder.load_partition(config.num_clients)
        federation = build(config, known, begun=folder.checkpoint.exists())
        if self._only_nodes_have_examples and config.buffers == "static" and federation.model.layout.buffers:
            raise ConfigError("buffers: got 'static', expected another: the server has no examples to measure them on")
        federation = replace(federation, open=True)
        federation.check()
        return federation

    def memories(self, config: Config, federation: Federation, folder: Path) -> Fleet:
        self._fleet = Fleet(self._grid, self._settings, self._nodes_file, federation)
        return self._fleet

    def executor(self, config: Config, federation: Federation, rounds: int, trace: Trace) -> Executor:
        settings = self._settings
        self._least = max(1, settings.min_nodes or config.cohort_size, settings.min_replies)
        self._executor = GridExecutor(self._grid, settings, config, federation, self._fleet, trace)
        return self._executor

    def observed(self) -> Row:
        return self._executor.observed()

    def gather(self, federation: Federation, round: int) -> tuple[Federation, Sequence[int] | None]:
        self._fleet.gather(round, self._least)
        levels, partition, nodes = self._fleet.levels, federation.partition, self._fleet.nodes
        if self._only_nodes_have_examples:  # only the number of a client's examples is asked for
            most = self._fleet.most_examples
            partition = [_some(min(most, (c in nodes and nodes[c].examples) or 0)) for c in range(len(levels))]
        return federation.with_clients(levels, partition), self._fleet.present

    def suffices(self, round: int, stats: RoundStats) -> bool:
        """Whether enough replies were accepted; a run whose round fails again and again ends."""
        self._fleet.save()
        accepted, least = len(stats.clients) - len(stats.rejected), self._settings.min_replies
        self._attempts = 0 if accepted >= least else self._attempts + 1
        if not self._attempts:
            return True
        problem = f"round {round + 1}: {accepted} accepted replies, expected at least {least}"
        for refusal in stats.rejected:
            LOG.warning("incofl: %s", refusal["reason"])
        if self._attempts >= self._settings.attempts:
            raise RunError(f"{problem} (min-replies), {self._attempts} times; {SAVED}")
        LOG.warning("incofl: %s; it is repeated", problem)
        return False


# A slice without its frozen part and what else the method sends; the frozen part, which stays here; its digest.
Parts = tuple[dict[str, ArrayRecord], Tensors, str]


@dataclass
class Turn:
    """A job, the orders to its node, and the outcome."""

    job: Job
    node: int
    parts: Parts
    exchange: Exchange | None = None
    bytes_down: int = 0
    early: bool = False  # whether its reply waited on disk
    bytes_up: int = 0
    with_frozen: bool = False
    outcome: tuple[Upload, Report] | Refusal | None = None


class GridExecutor(InProcess):
    """Sends turns to nodes; evaluates in this process, which has the test set."""

    def __init__(
        self, grid: Grid, settings: Settings, config: Config, federation: Federation, fleet: Fleet, trace: Trace
    ) -> None:
        super().__init__(federation, trace)
        self.grid, self.settings, self.config = grid, settings, config
        self.federation, self.fleet, self.trace = federation, fleet, trace
        self._abandoned: dict[int, Exchange] = {}  # by node, replies that were not here in time and may still come
        self._rows: list[Row] = []  # a line for each reply of the last round
        self._reports: list[Report] = []  # likewise
        self._metric = federation.task.all_metrics[federation.task.first]

    def train(  # type: ignore[override]  # what this process computes is never lost
        self, server: Server, jobs: Sequence[Job]
    ) -> Iterator[Sequence[Upload | Lost]]:
        self._rows, self._reports = [], []
        parts: dict[int, Parts] = {}  # by level
        self._abandoned = {node: late for node, late in self._abandoned.items() if late.running}
        waiting, under_way = deque(jobs), deque[Turn]()
        while waiting or under_way:
            while waiting and len(under_way) < self.settings.window:
                job = waiting.popleft()
                if job.level not in parts or self.federation.splitter.by_client:
                    parts[job.level] = self._cut(server, job)
                under_way.append(Turn(job, self.fleet.nodes[job.client].node, parts[job.level]))
                self._send(under_way[-1])
            start, turn = time.perf_counter(), under_way.popleft()
            while turn.outcome is None:
                self._look(turn)
                for other in under_way:
                    if self._early_bytes(under_way) < self.settings.early_bytes:
                        self._look(other, early=True)
                if turn.outcome is None:
                    time.sleep(self.settings.poll)
            self.trace.add(str(turn.job), "nodes", start, time.perf_counter())
            yield [self._result(turn, turn.outcome)]

    def _early_bytes(self, under_way: Iterable[Turn]) -> int:
        """Bytes of the replies that wait on disk."""
        return sum(turn.bytes_up for turn in under_way if turn.early)

    def observed(self) -> Row:
        """What the nodes of the last round measured."""
        row = Row(nodes=self._rows)
        if (value := self._held_out(self._reports)) is not None:
            tested = sum(report.tested for report in self._reports)
            LOG.info("incofl: on %d held-out examples of nodes, before they trained: %.4g", tested, value)
            row["accuracy_on_nodes"] = value
        return row

    def _cut(self, server: Server, job: Job) -> Parts:
        slice_ = self.federation.slice_of(job)
        extra = slice_.look(self.federation.method.extra_for_client(server, job.level))
        held = slice_.look(server.state(job.level))
        frozen = {name: held.pop(name) for name in slice_.frozen}
        return {"model": protocol.arrays(held), "extra": protocol.arrays(extra)}, frozen, digest(frozen)

    def _send(self, turn: Turn) -> None:
        if turn.node in self._abandoned:
            turn.outcome = Refusal("its reply to an earlier order is still on its way")
            return
        job, (sent, frozen, frozen_digest), deadline = turn.job, turn.parts, self.settings.deadline
        memory, node = self.fleet.manifest.get(job.client), self.fleet.nodes[job.client]
        known = str(Answer(node.client, node.wanted, **node.limits))
        facts = json.dumps({name: getattr(self.federation.data, name) for name in FACTS})
        config = self.config.to_toml()
        order = Order(
            **vars(job),
            run=self.fleet.run,
            config=config,
            memory=memory,
            known=known,
            frozen=frozen_digest,
            facts=facts,
        )
        content = protocol.encode_order(order, sent | ({"frozen": protocol.arrays(frozen)} if turn.with_frozen else {}))
        group = str(job.round + 1)
        message = Message(content, turn.node, MessageType.TRAIN, ttl=deadline + CLOCKS, group_id=group)
        # A reply has an update and perhaps as much again in addition, never more than the model and what came with it.
        most = 2 * (protocol.num_bytes(content) + num_bytes(frozen)) + REPLY
        turn.exchange = Exchange(self.grid, message, deadline, most)
        turn.bytes_down += protocol.num_bytes(content)

    def _look(self, turn: Turn, early: bool = False) -> None:
        """Looks for a reply and takes it in; an ``early`` one is put on disk."""
        if turn.outcome is not None or turn.exchange is None:
            return
        try:
            if (content := turn.exchange.reply()) is None:
                return
            most = None if len(self.federation.data.train) else self.fleet.most_examples
            totals = math.prod(self._totals_shape)
            upload, report = protocol.decode_reply(content, self.federation, turn.job, totals, most)
            value = self._held_out([report])
            if report.tested and (value is None or (self._metric.percent and not 0 <= value <= 1)):
                name = self.federation.task.first
                raise Refusal(f"its {name} on held-out examples is {value}, expected a possible value")
        except Refusal as problem:
            if problem.kind == "frozen" and not turn.with_frozen:
                turn.with_frozen = True
                self._send(turn)
                return
            turn.outcome = problem
            if turn.exchange.running:
                self._abandoned[turn.node] = turn.exchange
        else:
            turn.bytes_up = protocol.num_bytes(content)
            turn.outcome, turn.early = (on_disk(upload, Path(self.settings.out)) if early else upload, report), early

    def _result(self, turn: Turn, outcome: tuple[Upload, Report] | Refusal) -> Upload | Lost:
        """What the round gets of a turn, and what the fleet learns from it."""
        client = turn.job.client
        if isinstance(outcome, Refusal):
            return Lost(client, f"node {turn.node}: {outcome}{self._learnt(turn, outcome)}")
        upload, report = outcome
        self.fleet.nodes[client].missed = 0
        row: Row = {"client": client, "node": str(turn.node), "level": turn.job.level}
        row |= {"seconds": round(report.seconds, 3), "cpu_seconds": round(report.cpu_seconds, 3)}
        row |= {"peak_memory": report.peak_memory, "bytes_up": turn.bytes_up, "bytes_down": turn.bytes_down}
        if report.forgot:
            row["forgot"] = True
        if report.tested:
            row |= {"accuracy": self._held_out([report]), "tested": report.tested}
        self._rows.append(row)
        self._reports.append(report)
        if turn.early:  # to the usual layout in memory
            in_memory: dict[str, Any] = {part: clone(getattr(upload, part)) for part in TENSORS}
            return replace(upload, **in_memory)
        return upload

    def _learnt(self, turn: Turn, problem: Refusal) -> str:
        """What follows from a problem, in words: a node that cannot keep up gets a smaller model."""
        if problem.answer is not None:
            return f"; {self.fleet.hear(turn.node, problem.answer)}"
        own = self.federation.method.level == "own"  # or all train the same, whatever they can
        client, overwhelmed = turn.job.client, problem.kind in ("crashed", "late", "memory")
        if own and overwhelmed and self.fleet.missed(client, at_once=problem.kind == "memory"):
            return f"; it gets level {self.fleet.nodes[client].level} from now on"
        return ""

    @cached_property
    def _totals_shape(self) -> tuple[int, ...]:
        """The shape of the metric's totals, found by evaluating a blank example; none if the server has examples."""
        f, x, y = self.federation, self.federation.data.train.x, self.federation.data.train.y
        if len(y):
            return (0,)
        blank = Examples(map_inputs(lambda t: t.new_zeros(1, *t.shape[1:]), x), y.new_zeros(1, *y.shape[1:]))
        score = Worker(f).score(0, 0, f.slice(0, 0).look(f.model.initial), blank)
        return tuple(score.totals[f.task.first].shape)

    def _held_out(self, reports: Iterable[Report]) -> float | None:
        """The metric over all examples that nodes hold out; ``None`` if there are none, or if it cannot be computed."""
        tested = [(torch.tensor(r.totals, dtype=torch.float64), float(r.tested)) for r in reports if r.tested]
        if not tested:
            return None
        # Totals grow with the examples; those of a node that claims far more than others count as if it had fewer.
        most = self.settings.examples_multiple * median_low(number for _, number in tested)
        scale = self.settings.examples_multiple * median_low(float(values.abs().max()) for values, _ in tested)
        totals = [
            values * min(1.0, most / number, scale / max(float(values.abs().max()), scale or 1.0))
            for values, number in tested
        ]
        try:
            value = float(self._metric.value(torch.stack(totals).sum(0).reshape(self._totals_shape)))
        except (ValueError, ArithmeticError):  # the root of a negative number, from a node that does not tell the truth
            return None
        return value if math.isfinite(value) else None


def on_disk(upload: Upload, folder: Path) -> Upload:
    """The same upload with its tensors in a file that is mapped into memory; it is gone when nobody needs them."""
    path, tensors = folder / "early.safetensors", {part: getattr(upload, part) for part in TENSORS}
    flat = {f"{part}/{name}": value.contiguous() for part in TENSORS for name, value in tensors[part].items()}
    atomic_write(path, save(flat), mode=PRIVATE)
    found = load_file(path)
    path.unlink()
    mapped: dict[str, Any] = {part: {name: found[f"{part}/{name}"] for name in tensors[part]} for part in TENSORS}
    return replace(upload, **mapped)


def _some(examples: int) -> torch.Tensor:
    """The part of a client of whose examples only the number is known: it takes no memory."""
    return torch.zeros(1, dtype=torch.int64).expand(examples)
