"""The fleet: which node is which client, and what it can afford; kept in the run folder, for when it comes back."""

import itertools
import secrets
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_low

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from incofl.client import Upload
from incofl.costs import DeviceClass, assign
from incofl.engine.checkpoint import Manifest
from incofl.engine.federation import ClientLevels, Federation
from incofl.engine.files import PRIVATE, read_json, write_json
from incofl.errors import ConfigError, RunError
from incofl.flower.protocol import VERSION, Answer, Refusal, decode_answer
from incofl.flower.settings import Settings
from incofl.flower.transport import CLOCKS, LOG, SAVED, Exchange, ask


@dataclass
class Node:
    """A node that has said what it can do."""

    client: int  # its number in the federation
    node: int  # its id in Flower
    level: int  # the largest level that it can hold
    wanted: int | None = None  # the level that it asked for
    limits: dict[str, int] = field(default_factory=dict)  # the limits that it named
    examples: int | None = None  # number of its training examples, where only the node has them
    missed: int = 0  # number of deadlines that it missed in a row


class Fleet:
    """All nodes of a run, by client."""

    def __init__(self, grid: Grid, settings: Settings, path: Path, federation: Federation) -> None:
        self._grid, self._settings, self._path = grid, settings, path
        self._federation, self._defaults = federation, federation.levels
        self._remembers = bool(federation.method.client.memory(federation.model.layout))
        self.manifest: Manifest = {}  # from which accepted turn a client's memory is, which its node keeps
        self._asked: dict[int, Exchange] = {}  # by node, questions without an answer
        self._present: dict[int, int] = {}  # by node, the clients that have answered in this process
        self._begun = False
        self.nodes: dict[int, Node] = {}
        self.refused: dict[int, str] = {}
        self.run = secrets.token_hex(8)
        again = "delete it, and nodes will be asked again"
        if not path.exists():
            return
        try:
            known = read_json(path, again)
            self.run = str(known["run"])
            nodes = [Node(**entry | {"node": int(entry["node"])}) for entry in known["nodes"]]
            if wrong := [node for node in nodes if not self._possible(node)]:
                raise ValueError(f"{wrong[0]} cannot be")
            self.nodes = {node.client: node for node in nodes}
        except (ValueError, TypeError, KeyError) as problem:
            raise RunError(f"{path}: damaged ({problem}); {again}") from None

    def _possible(self, node: Node) -> bool:
        levels = len(self._federation.splitter.depths)
        numbers = [
            (node.client, range(len(self._defaults))),
            (node.level, range(levels)),
            (node.wanted, range(levels)),
            (node.examples, range(2**63)),
            (node.missed, range(2**63)),
        ]
        return all(value is None or (type(value) is int and value in within) for value, within in numbers)

    def save(self) -> None:
        """Remembers it all. Ids are written as text: they are too large for many readers' numbers."""
        entries = [asdict(node) | {"node": str(node.node)} for _, node in sorted(self.nodes.items())]
        refused = [{"node": str(node), "reason": reason} for node, reason in sorted(self.refused.items())]
        write_json(self._path, {"run": self.run, "nodes": entries, "refused": refused}, PRIVATE)

    saved = save  # what is called when a checkpoint is on disk

    def keep(self, round: int, upload: Upload) -> None:
        if self._remembers:
            self.manifest[upload.client] = upload.level, round

    def restore(self, manifest: Manifest, spare: Manifest | None = None) -> None:
        self.manifest = dict(manifest)

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
            trained = [self._federation.trained(self.nodes[client].level) for client in self.present]
            if ready >= wanted and any(level is not None for level in trained):
                break
            if left < 0 or ready == len(self._defaults):
                found = f"{self._federation.method.name} needs the largest level, and none of {ready} nodes can hold it"
                if ready < least:
                    why = [f"; node {id} is left out: {reason}" for id, reason in self.refused.items()]
                    found = f"{ready} of {len(ids)} connected nodes are ready after {wait:g} s"
                    found = f"{found}, expected at least {least} (min-nodes){why[0] if why else ''}"
                raise RunError(f"round {round + 1}: {found}; {SAVED}")
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
        for id in (id for id in ids if id not in self._asked):
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
        level = self._federation.trained(node.level)
        share = "takes no part: it cannot hold the largest level" if level is None else f"gets level {level}"
        LOG.info("incofl: node %s is client %d and %s", id, node.client, share)
        return f"it is client {node.client} and {share} from now on"

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
        if self._settings.bound and node is not None and node.node != id:
            hint = f"delete its entry in {self._path.name} if that node is gone for good"
            raise ConfigError(
                f"partition-id: got {client}, which belongs to the key of node {node.node} (bound); {hint}"
            )
        if node is None or (node.wanted, node.limits) != (answer.level, answer.limits):
            node = Node(client, id, self._level(id, client, answer), answer.level, answer.limits)
        method, level = self._federation.method.name, self._federation.trained(node.level)
        device = DeviceClass(f"node {id}", 1, **answer.limits)
        if level is not None and (exceeded := device.exceeded(self._federation.costs[level])):
            hint = "choose another method, or leave these limits out of its node-config to train it anyway"
            raise ConfigError(f"{method} trains level {level} on it, which needs {'; '.join(exceeded)}; {hint}")
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
        free = (client for client in population if client not in present and not self._settings.bound)
        if (client := next(itertools.chain(known, never, free), None)) is None:
            raise ConfigError(f"no client number is left for it: data.clients is {len(population)}")
        return client

    def _level(self, id: int, client: int, answer: Answer) -> int:
        """The level that a node asks for, the largest within the limits that it names, or what the config says."""
        if answer.level is not None and answer.level >= len(self._federation.costs):
            raise ConfigError(f"level: got {answer.level}, expected 0 to {len(self._federation.costs) - 1}")
        if answer.level is None and answer.limits:
            return assign([DeviceClass(f"node {id}", 1, **answer.limits)], self._federation.costs)[0]
        return self._defaults[client] if answer.level is None else answer.level

    def missed(self, client: int, at_once: bool = False) -> bool:
        """Notes that a turn was too much for a node; whether it gets a smaller one, ``at_once`` or out of patience."""
        node = self.nodes[client]
        node.missed += 1
        if smaller := node.level > 0 and (at_once or node.missed >= self._settings.patience):
            node.missed, node.level = 0, node.level - 1
        return smaller

    @property
    def most_examples(self) -> int:
        """Number of examples of a node that count, where only nodes know them."""
        said = [node.examples for node in self.nodes.values() if node.examples]
        return int(self._settings.examples_multiple * median_low(said)) if said else 0

    @property
    def levels(self) -> ClientLevels:
        """The level of each client: of those that have not been seen, what the config says."""
        clients = range(len(self._defaults))
        levels = [self.nodes[c].level if c in self.nodes else self._defaults[c] for c in clients]
        return ClientLevels(levels, len(self._federation.costs))
