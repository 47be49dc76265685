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
from incofl.engine.run_folder import RunFolder
from incofl.engine.trace import Trace
from incofl.errors import ConfigError, RunError, UploadError
from incofl.flower.executor import GridExecutor
from incofl.flower.fleet import Fleet
from incofl.flower.memory import MemoryLedger
from incofl.flower.protocol import VERSION, decode_answer
from incofl.flower.settings import Settings
from incofl.flower.transport import CLOCKS, SAVED, Exchange, ask, reason_of

LOG = getLogger("flwr")  # Flower shows what is logged there to everybody who watches the run


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
        nobody = [_some(0)] * config.num_clients
        known = nobody if self._only_nodes_have_examples else folder.load_partition(config.num_clients)
        federation = build(config, known, begun=folder.checkpoint.exists())
        if self._only_nodes_have_examples and config.buffers == "static" and federation.model.layout.buffers:
            raise ConfigError("buffers: got 'static', expected another: the server has no examples to measure them on")
        return dataclasses.replace(federation, open=True)

    def memories(self, config: Config, federation: Federation, folder: Path) -> Memories:
        return MemoryLedger(federation)

    def executor(
        self, config: Config, federation: Federation, rounds: int, trace: Trace, memories: Memories
    ) -> Executor:
        assert isinstance(memories, MemoryLedger)
        self._fleet = Fleet(self._nodes_file, federation.costs, federation.levels, self._settings.patience)
        executor = GridExecutor(self._grid, self._settings, config, federation, self._fleet, memories, trace)
        self.observed = executor.observed
        return executor

    def gather(self, federation: Federation, round: int) -> tuple[Federation, Sequence[int] | None]:
        """Waits for nodes, not too long, asks new ones what they can do, and says which clients can be reached."""
        settings = self._settings
        least = max(1, settings.min_nodes or self._config.cohort_size, settings.min_replies)
        until, told = time.monotonic() + settings.wait, -1
        before: set[int] = set()
        while True:
            ids = ask(lambda: set(self._grid.get_node_ids()), settings.wait)
            if ids != before:  # a node that was left out gets another chance: something has changed, or a round passed
                self._fleet.refused.clear()
                before = ids
            self._question(self._fleet.meet(ids))
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

    def _question(self, nodes: Sequence[int]) -> None:
        """Asks nodes what they can do, and takes in those whose answers have come."""
        question = RecordDict({"question": ConfigRecord({"version": VERSION})})
        for node in set(nodes) - self._asked.keys():
            message = Message(question, node, MessageType.QUERY, ttl=self._settings.wait + CLOCKS)
            asked = Exchange(self._grid, message)
            self._asked |= {node: asked} if asked.taken else {}
        for node, asked in list(self._asked.items()):
            try:
                if (reply := asked.reply()) is None:
                    continue
                if reply.has_content():
                    news = self._fleet.hear(node, decode_answer(reply.content))
                else:  # asked again as long as it is connected
                    news = f"it does not answer: {reason_of(reply)}"
            except UploadError as problem:
                news = self._fleet.refuse(node, str(problem))
            LOG.info("incofl: node %s: %s", node, news)
            del self._asked[node]


def _some(examples: int) -> torch.Tensor:
    """The part of a client of whose examples only the number is known: it takes no memory."""
    return torch.zeros(1, dtype=torch.int64).expand(examples)
