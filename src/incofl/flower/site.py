"""A fleet of Flower nodes as the place where the clients of a run are."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from incofl.config import Config
from incofl.engine.build import build
from incofl.engine.executor import Executor
from incofl.engine.federation import Federation
from incofl.engine.records import Row, RunFolder
from incofl.engine.round import Tally
from incofl.engine.site import Memories
from incofl.engine.trace import Trace
from incofl.errors import IncoflError, RunError
from incofl.flower.grid import CLOCKS, STALL, GridExecutor
from incofl.flower.memory import Accepted
from incofl.flower.messages import decode_answer, encode_question
from incofl.flower.nodes import Fleet
from incofl.flower.post import TRANSFER, Fetch, ask, push, words
from incofl.flower.settings import Settings
from incofl.flower.task import Task, build_own

LOG = getLogger("flwr")  # Flower shows what is logged there to whoever watches the run


@dataclass
class Question:
    """To a node, and the look for its answer that is under way."""

    node: int
    fetch: Fetch | None = None


class FlowerSite:
    """Nodes that come and go."""

    def __init__(self, grid: Grid, settings: Settings, task: Task | None = None) -> None:
        self._grid, self._settings, self._task = grid, settings, task
        self._asked: dict[str, Question] = {}
        self._attempts = 0
        self._begun = False

    def build(self, config: Config, folder: RunFolder) -> Federation:
        """The federation; with a task, of examples that only the nodes have."""
        self._config, self._nodes_file = config, folder.nodes
        self._settings.check(config)
        if self._task is None:
            known = folder.load_partition(config.data.clients)
            federation = build(config, known, begun=folder.checkpoint.exists())
        else:
            federation = build_own(config, self._task)
        return dataclasses.replace(federation, open=True)

    def memories(self, config: Config, federation: Federation, folder: Path) -> Memories:
        """Nodes keep them; the server keeps whose turn was accepted when."""
        return Accepted(federation)

    def executor(
        self, config: Config, federation: Federation, rounds: int, trace: Trace, memories: Memories
    ) -> Executor:
        """Turns on nodes."""
        assert isinstance(memories, Accepted)
        self._fleet = Fleet(self._nodes_file, federation.costs, federation.levels, self._settings.patience)
        self._executor = GridExecutor(self._grid, config, federation, self._fleet, memories, self._settings, trace)
        return self._executor

    def gather(self, federation: Federation, round: int) -> tuple[Federation, Sequence[int] | None]:
        """Waits for nodes, learns what new ones can do, and says who can be reached.

        Raises:
            RunError: there are too few nodes for too long.
        """
        settings, population = self._settings, self._config.data.clients
        least = max(1, settings.min_nodes or self._config.cohort_size, settings.min_replies)
        until, told = time.monotonic() + settings.wait, -1
        before: set[int] = set()
        while True:
            ids = ask(lambda: set(self._grid.get_node_ids()), max(settings.wait, TRANSFER))
            if ids != before:  # who was left out gets another chance: something has changed, or a round has passed
                self._fleet.refused.clear()
                before = ids
            waiting = {question.node for question in self._asked.values()}
            self._question([node for node in self._fleet.meet(ids) if node not in waiting])
            self._hear()
            clients = self._fleet.present
            expired = time.monotonic() > until
            wanted = population if not self._begun and not expired else least
            if len(clients) >= wanted:
                break
            if len(clients) != told:
                told = len(clients)
                LOG.info(
                    "incofl: waiting for nodes: %d of %d are ready; for %.0f s at most",
                    told,
                    wanted,
                    until - time.monotonic(),
                )
            if expired:
                raise RunError(
                    f"round {round + 1}: {len(clients)} of {len(ids)} connected nodes are ready after "
                    f"{settings.wait:g} s, expected at least {least} (min-nodes); finished rounds are saved: "
                    f"resume=true continues"
                )
            time.sleep(settings.poll)
        self._begun = True
        self._fleet.save()
        return self._as_they_are(federation), clients

    def suffices(self, round: int, tally: Tally) -> bool:
        """Whether enough replies were accepted; a run whose round fails again and again ends."""
        self._fleet.save()
        accepted, settings = len(tally.clients) - len(tally.rejected), self._settings
        if accepted >= settings.min_replies:
            self._attempts = 0
            return True
        self._attempts += 1
        problem = f"round {round + 1}: {accepted} accepted replies, expected at least {settings.min_replies}"
        for refusal in tally.rejected:
            LOG.warning("incofl: %s", refusal["reason"])
        if self._attempts >= settings.attempts:
            raise RunError(
                f"{problem} (min-replies), {self._attempts} times; finished rounds are saved: resume=true continues"
            )
        LOG.warning("incofl: %s; it is repeated", problem)
        return False

    def observed(self) -> Row:
        """What the nodes measured."""
        nodes = self._executor.observed
        tested = sum(node.get("tested", 0) for node in nodes)
        if not tested:
            return {"nodes": nodes}
        share = sum(node.get("correct", 0) for node in nodes) / tested
        LOG.info("incofl: accuracy on nodes, before they trained: %.3f of %d examples", share, tested)
        return {"nodes": nodes, "accuracy_on_nodes": share}

    def _question(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            message = Message(encode_question(), node, MessageType.QUERY, ttl=self._settings.wait + CLOCKS)
            if (id := push(self._grid, message, max(self._settings.wait, TRANSFER))) is not None:
                self._asked[id] = Question(node)

    def _hear(self) -> None:
        """Takes in the nodes whose answers have come."""
        for id, question in list(self._asked.items()):
            node = question.node
            fetch = question.fetch = question.fetch or Fetch(self._grid, id)
            try:
                reply = fetch.reply(STALL)
                question.fetch = None
                if reply is None:
                    continue
                del self._asked[id]
                if not reply.has_content():  # asked again as long as it is connected
                    LOG.warning("incofl: node %s does not answer: %s", node, words(reply))
                    continue
                known = self._fleet.welcome(node, decode_answer(reply.content))
            except TimeoutError:
                if time.monotonic() > fetch.begun + TRANSFER:
                    self._leave_out(id, node, "its answer was announced and has not arrived")
            except IncoflError as problem:
                self._leave_out(id, node, str(problem))
            else:
                LOG.info("incofl: node %s is client %d, level %d", node, known.client, known.level)

    def _leave_out(self, question: str, node: int, reason: str) -> None:
        self._asked.pop(question, None)
        self._fleet.refuse(node, reason)
        LOG.warning("incofl: node %s is left out: %s", node, reason)

    def _as_they_are(self, federation: Federation) -> Federation:
        """The federation with the levels, and where only they know the numbers of examples, of its nodes."""
        levels, partition, nodes = self._fleet.levels, federation.partition, self._fleet.nodes
        if self._task is not None:  # only the lengths of the parts are asked for
            sizes = [nodes[client].examples or 0 if client in nodes else 0 for client in range(len(levels))]
            partition = [torch.empty(size, device="meta") for size in sizes]
        return federation.with_clients(levels, partition)
