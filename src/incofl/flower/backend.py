"""A fleet of Flower nodes as the place where the clients of a run are."""

import dataclasses
import time
from collections.abc import Sequence
from logging import getLogger
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from incofl.config import Config
from incofl.data import Data
from incofl.engine.backend import Memories
from incofl.engine.build import build
from incofl.engine.executor import Executor
from incofl.engine.federation import Federation
from incofl.engine.round import RoundStats
from incofl.engine.run_folder import Row, RunFolder
from incofl.engine.trace import Trace
from incofl.errors import ConfigError, IncoflError, RunError
from incofl.flower.executor import GridExecutor
from incofl.flower.fleet import Fleet
from incofl.flower.memory import MemoryLedger
from incofl.flower.protocol import VERSION, decode_answer
from incofl.flower.settings import Settings
from incofl.flower.transport import CLOCKS, TRANSFER, Exchange, ask, reason_of

LOG = getLogger("flwr")  # Flower shows what is logged there to everybody who watches the run
SAVED = "finished rounds are saved: resume=true continues"


class FlowerBackend:
    """Nodes that come and go."""

    def __init__(self, grid: Grid, settings: Settings) -> None:
        self._grid, self._settings = grid, settings
        self._asked: dict[int, Exchange] = {}  # by node, questions without an answer
        self._attempts = 0
        self._begun = False

    def build(self, config: Config, folder: RunFolder) -> Federation:
        """The federation; if the server's data have no training examples, only the nodes have some."""
        self._config, self._nodes_file = config, folder.nodes
        self._settings.check(config)
        data = config.objects.get("data")
        self._only_nodes_have_examples = isinstance(data, Data) and not len(data.train)
        known = [_some(0)] * config.num_clients if self._only_nodes_have_examples else None
        known = known or folder.load_partition(config.num_clients)
        federation = build(config, known, begun=folder.checkpoint.exists())
        if self._only_nodes_have_examples and config.buffers == "static" and federation.model.layout.buffers:
            raise ConfigError("buffers: got 'static', expected another: the server has no examples to measure them on")
        return dataclasses.replace(federation, open=True)

    def memories(self, config: Config, federation: Federation, folder: Path) -> Memories:
        """Nodes keep them; the server keeps which turn was accepted last."""
        return MemoryLedger(federation)

    def executor(
        self, config: Config, federation: Federation, rounds: int, trace: Trace, memories: Memories
    ) -> Executor:
        """Turns on nodes."""
        assert isinstance(memories, MemoryLedger)
        self._fleet = Fleet(self._nodes_file, federation.costs, federation.levels, self._settings.patience)
        self._executor = GridExecutor(self._grid, config, federation, self._fleet, memories, self._settings, trace)
        return self._executor

    def gather(self, federation: Federation, round: int) -> tuple[Federation, Sequence[int] | None]:
        """Waits for nodes, asks new ones what they can do, and returns the clients that can be reached.

        Raises:
            RunError: there are too few nodes for too long.
        """
        settings = self._settings
        least = max(1, settings.min_nodes or self._config.cohort_size, settings.min_replies)
        until, told = time.monotonic() + settings.wait, -1
        question = RecordDict({"question": ConfigRecord({"version": VERSION})})
        before: set[int] = set()
        while True:
            ids = ask(lambda: set(self._grid.get_node_ids()), max(settings.wait, TRANSFER))
            if ids != before:  # a node that was left out gets another chance: something has changed, or a round passed
                self._fleet.refused.clear()
                before = ids
            for node in sorted(set(self._fleet.meet(ids)) - self._asked.keys()):
                message = Message(question, node, MessageType.QUERY, ttl=settings.wait + CLOCKS)
                asked = Exchange(self._grid, message, max(settings.wait, TRANSFER))
                self._asked |= {node: asked} if asked.taken else {}
            self._hear()
            ready = len(self._fleet.present)
            expired = time.monotonic() > until
            wanted = self._config.num_clients if not self._begun and not expired else least
            if ready >= wanted:
                break
            if ready != told:
                told, left = ready, until - time.monotonic()
                LOG.info("incofl: waiting for nodes: %d of %d are ready; for %.0f s at most", ready, wanted, left)
            if expired:
                raise RunError(
                    f"round {round + 1}: {ready} of {len(ids)} connected nodes are ready after {settings.wait:g} s, "
                    f"expected at least {least} (min-nodes); {SAVED}"
                )
            time.sleep(settings.poll)
        self._begun = True
        self._fleet.save()
        levels, partition, nodes = self._fleet.levels, federation.partition, self._fleet.nodes
        if self._only_nodes_have_examples:  # only the number of a client's examples is asked for
            partition = [_some((c in nodes and nodes[c].examples) or 0) for c in range(len(levels))]
        return federation.with_clients(levels, partition), self._fleet.present

    def suffices(self, round: int, stats: RoundStats) -> bool:
        """Whether enough replies were accepted; a run whose round fails again and again ends."""
        self._fleet.save()
        accepted, settings = len(stats.clients) - len(stats.rejected), self._settings
        if accepted >= settings.min_replies:
            self._attempts = 0
            return True
        self._attempts += 1
        problem = f"round {round + 1}: {accepted} accepted replies, expected at least {settings.min_replies}"
        for refusal in stats.rejected:
            LOG.warning("incofl: %s", refusal["reason"])
        if self._attempts >= settings.attempts:
            raise RunError(f"{problem} (min-replies), {self._attempts} times; {SAVED}")
        LOG.warning("incofl: %s; it is repeated", problem)
        return False

    def observed(self) -> Row:
        """What the nodes measured."""
        executor, row = self._executor, Row(nodes=self._executor.observed)
        if (value := executor.held_out.value(executor.reports)) is not None:
            tested = sum(report.tested for report in executor.reports)
            LOG.info("incofl: on %d held-out examples of nodes, before they trained: %.4g", tested, value)
            row["accuracy_on_nodes"] = value
        return row

    def _hear(self) -> None:
        """Takes in the nodes whose answers have come."""
        for node, question in list(self._asked.items()):
            try:
                if (reply := question.reply()) is None:
                    continue
                if reply.has_content():
                    known = self._fleet.welcome(node, decode_answer(reply.content))
                    LOG.info("incofl: node %s is client %d, level %d", node, known.client, known.level)
                else:  # asked again as long as it is connected
                    LOG.warning("incofl: node %s does not answer: %s", node, reason_of(reply))
            except IncoflError as problem:
                self._fleet.refuse(node, str(problem))
                LOG.warning("incofl: node %s is left out: %s", node, problem)
            del self._asked[node]


def _some(examples: int) -> torch.Tensor:
    """The part of a client of whose examples only the number is known: it takes no memory."""
    return torch.zeros(1, dtype=torch.int64).expand(examples)
