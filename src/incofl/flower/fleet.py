"""The fleet: which node is which client, and the largest sub-model that each can afford.

A node says its limits, or the level it wants; one that says nothing gets the level that the config gives its client
number. A node that misses deadlines or runs out of memory gets a smaller one. All of it is remembered in the run folder
(``nodes.json``) and found again when a run is resumed or a node comes back.
"""

import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from incofl.costs import Cost, DeviceClass, assign
from incofl.engine.checkpoint import write_json
from incofl.engine.federation import ClientLevels
from incofl.errors import ConfigError, RunError
from incofl.flower.protocol import Answer


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

    @property
    def known(self) -> Answer:
        """What it has said, as far as its level depends on it."""
        return Answer(self.client, self.wanted, self.limits or None)


class Fleet:
    """All nodes of a run, by client."""

    def __init__(self, path: Path, costs: Sequence[Cost], defaults: ClientLevels, patience: int) -> None:
        self._path, self._costs, self._defaults, self._patience = path, list(costs), defaults, patience
        self.nodes: dict[int, Node] = {}
        self.refused: dict[int, str] = {}
        self._present: set[int] = set()  # the clients whose node has answered in this process
        self.run = secrets.token_hex(8)
        if path.exists():
            self._load()

    def _load(self) -> None:
        try:
            known = json.loads(self._path.read_text())
            self.run = str(known["run"])
            for entry in known["nodes"]:
                node = Node(**entry | {"node": int(entry["node"])})
                self.nodes[node.client] = node
        except (ValueError, TypeError, KeyError) as problem:
            raise RunError(f"{self._path}: damaged ({problem}); delete it, and nodes will be asked again") from None

    def save(self) -> None:
        """Remembers it all. Ids are written as text: they are too large for many readers' numbers."""
        entries = [asdict(node) | {"node": str(node.node)} for _, node in sorted(self.nodes.items())]
        refused = [{"node": str(node), "reason": reason} for node, reason in sorted(self.refused.items())]
        write_json(self._path, {"run": self.run, "nodes": entries, "refused": refused})

    def meet(self, ids: Collection[int]) -> list[int]:
        """The connected nodes that have not answered yet; one that was away is new when it comes back."""
        self._present = {client for client in self._present if self.nodes[client].node in ids}
        return sorted(set(ids) - {self.nodes[client].node for client in self._present} - self.refused.keys())

    @property
    def present(self) -> list[int]:
        """The clients whose nodes were connected when last seen, and have answered."""
        return sorted(self._present)

    def welcome(self, id: int, answer: Answer) -> Node:
        """Takes in a node that has answered; a client that comes back under the same limits keeps its level.

        Of two nodes that claim to be the same client, the first is believed as long as it is connected.

        Raises:
            ConfigError: no level fits it, or it asks for a level or number that does not exist or is taken.
        """
        client = self._number(id, answer)
        limits = dict(answer.limits or {})
        before = self.nodes.get(client)
        if client in self._present and before is not None and before.node != id:
            raise ConfigError(f"partition-id: got {client}, which node {before.node} is, expected one of its own")
        if before is not None and (before.wanted, before.limits) == (answer.level, limits):
            level, missed = before.level, before.missed
        else:
            level, missed = self._level(id, client, answer.level, limits), 0
        self._present -= {other for other in self._present if self.nodes[other].node == id}
        self.nodes[client] = Node(client, id, level, answer.level, limits, answer.examples, missed)
        self._present.add(client)
        self.refused.pop(id, None)
        return self.nodes[client]

    def hear(self, id: int, answer: Answer) -> str:
        """Takes in what a node says, or leaves it out; in words."""
        try:
            node = self.welcome(id, answer)
        except ConfigError as problem:
            self.refuse(id, str(problem))
            return f"it is left out: {problem}"
        return f"it is client {node.client} and gets level {node.level} from now on"

    def _number(self, id: int, answer: Answer) -> int:
        """The client that a node is: as it says, as it was, or the next number that is free."""
        population = len(self._defaults)
        if answer.client is not None:
            if answer.client >= population:
                raise ConfigError(f"partition-id: got {answer.client}, expected 0 to {population - 1} (data.clients)")
            return answer.client
        for node in self.nodes.values():
            if node.node == id:
                return node.client
        for taken in (self.nodes.keys(), self._present):  # first a number that nobody ever had
            free = [client for client in range(population) if client not in taken]
            if free:
                return free[0]
        raise ConfigError(f"no client number is left for it: data.clients is {population}")

    def _level(self, id: int, client: int, wanted: int | None, limits: dict[str, int]) -> int:
        if wanted is not None:
            if wanted >= len(self._costs):
                raise ConfigError(f"level: got {wanted}, expected 0 to {len(self._costs) - 1}")
            return wanted
        return assign([DeviceClass(f"node {id}", 1, **limits)], self._costs)[0] if limits else self._defaults[client]

    def refuse(self, id: int, reason: str) -> None:
        """Leaves a node out until it is asked again."""
        self.refused[id] = reason
        self._present -= {client for client in self._present if self.nodes[client].node == id}

    def succeeded(self, client: int) -> None:
        """A node has replied in time."""
        self.nodes[client].missed = 0

    def missed(self, client: int) -> bool:
        """A node has missed its deadline; whether it gets a smaller model now."""
        node = self.nodes[client]
        node.missed += 1
        return node.missed >= self._patience and self.overwhelmed(client)

    def overwhelmed(self, client: int) -> bool:
        """A model was too much for a node; whether there is a smaller one, which it gets from now on."""
        node = self.nodes[client]
        node.missed = 0
        if node.level == 0:
            return False
        node.level -= 1
        return True

    @property
    def levels(self) -> ClientLevels:
        """The level of each client: of those that have not been seen, what the config says."""
        everybody = range(len(self._defaults))
        levels = [self.nodes[c].level if c in self.nodes else self._defaults[c] for c in everybody]
        return ClientLevels(levels, len(self._costs))
