"""The fleet: which node is which client, the largest sub-model that each can afford, and what it remembers.

All of it is kept in the run folder and found again when a run is resumed or a node comes back.
"""

import itertools
import json
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from incofl.client import Upload
from incofl.costs import DeviceClass, assign
from incofl.engine.checkpoint import write_json
from incofl.engine.federation import ClientLevels, Federation
from incofl.engine.store import Manifest
from incofl.errors import ConfigError, RunError
from incofl.flower.protocol import VERSION, Answer, Refusal, decode_answer
from incofl.flower.settings import Settings
from incofl.flower.transport import CLOCKS, LOG, SAVED, Exchange, ask


@dataclass
class Node:
    """A node that has said what it can do."""

    client: int  # its number in the federation
    node: int  # its id in Flower
    level: int  # the level that it gets
    wanted: int | None = None  # the level that it asked for
    limits: dict[str, int] = field(default_factory=dict)  # the limits that it named
    examples: int | None = None  # number of its training examples, where only the node has them
    missed: int = 0  # number of deadlines that it missed in a row


class Fleet:
    """All nodes of a run, by client."""

    def __init__(self, grid: Grid, settings: Settings, path: Path, federation: Federation) -> None:
        self._grid, self._settings, self._path = grid, settings, path
        self._costs, self._defaults = federation.costs, federation.levels
        self._remembers = bool(federation.method.client.memory(federation.model.layout))
        self.manifest: Manifest = {}  # from which accepted turn a client's memory is, which its node keeps
        self._asked: dict[int, Exchange] = {}  # by node, questions without an answer
        self._present: dict[int, int] = {}  # by node, the clients that have answered in this process
        self._begun = False
        self.nodes: dict[int, Node] = {}
        self.refused: dict[int, str] = {}
        self.run = secrets.token_hex(8)
        if not path.exists():
            return
        try:
            known = json.loads(path.read_text())
            self.run = str(known["run"])
            self.nodes = {entry["client"]: Node(**entry | {"node": int(entry["node"])}) for entry in known["nodes"]}
        except (ValueError, TypeError, KeyError) as problem:
            raise RunError(f"{path}: damaged ({problem}); delete it, and nodes will be asked again") from None

    def save(self) -> None:
        """Remembers it all. Ids are written as text: they are too large for many readers' numbers."""
        entries = [asdict(node) | {"node": str(node.node)} for _, node in sorted(self.nodes.items())]
        refused = [{"node": str(node), "reason": reason} for node, reason in sorted(self.refused.items())]
        write_json(self._path, {"run": self.run, "nodes": entries, "refused": refused})

    def keeper(self, round: int) -> Callable[[Upload], None]:
        def keep(upload: Upload) -> None:
            if self._remembers:
                self.manifest[upload.client] = upload.level, round

        return keep

    def restore(self, manifest: Manifest) -> None:
        self.manifest = dict(manifest)

    def saved(self) -> None:
        self.save()

    def gather(self, round: int, least: int) -> None:
        """Waits, not too long, for all nodes before the first round and for the ``least`` number before others."""
        wait, told, before = self._settings.wait, -1, set[int]()
        until = time.monotonic() + wait
        while True:
            ids = ask(lambda: set(self._grid.get_node_ids()), wait)
            if ids != before:  # a node that was left out gets another chance: something has changed, or a round passed
                self.refused.clear()
                before = ids
            self._question(self.meet(ids))
            ready, left = len(self._present), until - time.monotonic()
            wanted = least if self._begun or left < 0 else len(self._defaults)
            if ready >= wanted:
                break
            if left < 0:
                found = f"{ready} of {len(ids)} connected nodes are ready after {wait:g} s"
                raise RunError(f"round {round + 1}: {found}, expected at least {least} (min-nodes); {SAVED}")
            if ready != told:
                LOG.info("incofl: waiting for nodes: %d of %d are ready; for %.0f s at most", ready, wanted, left)
                told = ready
            time.sleep(self._settings.poll)
        self._begun = True
        self.save()

    def meet(self, ids: Collection[int]) -> list[int]:
        """The connected nodes that have not answered yet; one that was away is new when it comes back."""
        self._present = {id: client for id, client in self._present.items() if id in ids}
        return sorted(set(ids) - self._present.keys() - self.refused.keys())

    def _question(self, ids: Collection[int]) -> None:
        """Asks nodes what they can do, and takes in those whose answers have come."""
        question = RecordDict({"question": ConfigRecord({"version": VERSION})})
        for id in sorted(set(ids) - self._asked.keys()):
            message = Message(question, id, MessageType.QUERY, ttl=self._settings.wait + CLOCKS)
            self._asked[id] = Exchange(self._grid, message)
        for id, asked in list(self._asked.items()):
            try:
                if (content := asked.reply()) is None:
                    continue
                self.hear(id, decode_answer(content))
            except Refusal as problem:
                if problem.kind in ("unreachable", "crashed"):  # asked again as long as it is connected
                    LOG.warning("incofl: node %s does not answer: %s", id, problem)
                else:
                    self.refuse(id, str(problem))
            del self._asked[id]

    @property
    def present(self) -> list[int]:
        """The clients whose nodes were connected when last seen, and have answered."""
        return sorted(self._present.values())

    def hear(self, id: int, answer: Answer) -> str:
        """Takes in what a node says, or leaves it out; in words."""
        try:
            node = self.welcome(id, answer)
        except ConfigError as problem:
            return self.refuse(id, str(problem))
        LOG.info("incofl: node %s is client %d, level %d", id, node.client, node.level)
        return f"it is client {node.client} and gets level {node.level} from now on"

    def refuse(self, id: int, reason: str) -> str:
        """Leaves a node out until it is asked again; in words."""
        LOG.warning("incofl: node %s is left out: %s", id, reason)
        self.refused[id] = reason
        self._present.pop(id, None)
        return f"it is left out: {reason}"

    def welcome(self, id: int, answer: Answer) -> Node:
        """Takes in a node that has answered; a client that comes back under the same limits keeps its level."""
        client = self._number(id, answer)
        node = self.nodes.get(client)
        if node is not None and node.node != id and self._present.get(node.node) == client:  # while it is connected
            raise ConfigError(f"partition-id: got {client}, which node {node.node} is, expected one of its own")
        if node is None or (node.wanted, node.limits) != (answer.level, answer.limits):
            node = Node(client, id, self._level(id, client, answer), answer.level, answer.limits)
        self.nodes[client] = replace(node, node=id, examples=answer.examples)
        self._present[id] = client
        self.refused.pop(id, None)
        return self.nodes[client]

    def _number(self, id: int, answer: Answer) -> int:
        """The client that a node is: as it says, as it was, or the next number that is free."""
        population = range(len(self._defaults))
        if answer.client is not None:
            if answer.client not in population:
                raise ConfigError(f"partition-id: got {answer.client}, expected 0 to {population[-1]} (data.clients)")
            return answer.client
        present = set(self._present.values())
        known = (node.client for node in self.nodes.values() if node.node == id)
        never = (client for client in population if client not in self.nodes)
        free = (client for client in population if client not in present)
        for client in itertools.chain(known, never, free):
            return client
        raise ConfigError(f"no client number is left for it: data.clients is {len(population)}")

    def _level(self, id: int, client: int, answer: Answer) -> int:
        """The level that a node asks for, the largest within the limits that it names, or what the config says."""
        if answer.level is not None and answer.level >= len(self._costs):
            raise ConfigError(f"level: got {answer.level}, expected 0 to {len(self._costs) - 1}")
        if answer.level is None and answer.limits:
            return assign([DeviceClass(f"node {id}", 1, **answer.limits)], self._costs)[0]
        return self._defaults[client] if answer.level is None else answer.level

    def missed(self, client: int, at_once: bool = False) -> bool:
        """Notes that a turn was too much for a node; whether it gets a smaller one, ``at_once`` or out of patience."""
        node = self.nodes[client]
        node.missed += 1
        if node.missed < self._settings.patience and not at_once:
            return False
        node.missed, smaller = 0, node.level > 0
        node.level -= smaller
        return smaller

    @property
    def levels(self) -> ClientLevels:
        """The level of each client: of those that have not been seen, what the config says."""
        clients = range(len(self._defaults))
        levels = [self.nodes[c].level if c in self.nodes else self._defaults[c] for c in clients]
        return ClientLevels(levels, len(self._costs))
