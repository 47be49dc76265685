"""A grid in this process: real messages, serialised as on the wire, to a real client app, one node after the other."""

import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto
from flwr.supercore.task_identity import TaskIdentity

# What becomes of a node's reply on its way: another one, an error, nothing, or nothing yet.
Fate = Callable[[Message], Any]
LATER = object()


def wired(content: RecordDict) -> RecordDict:
    """What arrives of what was sent."""
    proto = Proto()
    proto.ParseFromString(recorddict_to_proto(content).SerializeToString())
    return recorddict_from_proto(proto)


@dataclass
class LoopGrid:
    """Nodes by id; a turn is computed when its reply is asked for."""

    app: Any
    nodes: dict[int, Context] = field(default_factory=dict)
    fates: dict[int, Fate] = field(default_factory=dict)
    orders: list[tuple[int, RecordDict]] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    most: int = 0  # orders that waited at a time
    _waiting: dict[str, Message] = field(default_factory=dict)
    _lost: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        app, lock = self.app, threading.Lock()

        def one_at_a_time(message: Message, context: Context) -> Message:  # as nodes of one process cannot but be
            with lock:
                return app(message, context)

        self.app = one_at_a_time
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # as Flower sets it in its processes

    def add(self, id: int, **node_config: Any) -> None:
        """A node more; dashes of its config are written as underscores."""
        known = {key.replace("_", "-"): value for key, value in node_config.items()}
        self.nodes[id] = Context(0, id, known, RecordDict(), {})

    def restart(self, id: int, new: int) -> None:
        """A node comes back under another id, with an empty memory."""
        context = self.nodes.pop(id)
        self.nodes[new] = Context(0, new, context.node_config, RecordDict(), {})

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            id = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = id
            self._waiting[id] = message
            trains = [other for other in self._waiting.values() if other.metadata.message_type == MessageType.TRAIN]
            self.most = max(self.most, len(trains))
            ids.append(id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [reply for id in message_ids if (reply := self._reply(id)) is not None]

    def _reply(self, id: str) -> Message | None:
        message = self._waiting.get(id)
        if message is None or id in self._lost:
            return None
        node = message.metadata.dst_node_id
        query = message.metadata.message_type == MessageType.QUERY
        if node not in self.nodes:
            del self._waiting[id]
            return Message(Error(5, "Error: Node Unavailable"), reply_to=message)
        arrived = Message(wired(message.content), metadata=message.metadata)
        if query:
            self.questions.append(node)
        else:
            self.orders.append((node, arrived.content))
        if not query and node in self.fates:
            reply = self.fates[node](arrived)
            if reply is LATER:
                return None
            if reply is None:
                self._lost.add(id)
                return None
        else:
            reply = self.app(arrived, self.nodes[node])
        del self._waiting[id]
        return reply if reply.has_error() else Message(wired(reply.content), metadata=reply.metadata)
