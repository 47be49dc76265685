"""Messages to nodes and their replies, without ever waiting longer than we want to.

Flower waits for a SuperLink that does not answer for as long as it takes, and two hours for a reply that was announced
and does not arrive. So its calls are made in threads, which are left alone when their time is over.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from logging import getLogger
from typing import Any, TypeVar

from flwr.app import Array, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_object_children_ids_from_object_content
from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry
from google.protobuf.message import DecodeError

from incofl.errors import RunError
from incofl.flower.protocol import Refusal, one_line

T = TypeVar("T")
REPLY = 2**20  # bytes that a reply may unpack to in addition to what is expected of it, and that an answer may
TRANSFER = 60.0  # least seconds that a reply has from its announcement until it has arrived
CLOCKS = 60.0  # seconds by which the clocks of server and nodes may differ
LOG = getLogger("flwr")  # Flower shows what is logged there to everybody who watches the run
STALL = 2.0  # seconds after which a fetch keeps nobody else waiting
CRASHED = 8  # Flower's code for a client app whose process died
SAVED = "finished rounds are saved: resume=true continues"
# What Flower raises at what a stranger sent.
BROKEN = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError, DecodeError)


class Allowance(threading.local):
    """How many bytes of arrays the messages may unpack to that this thread reads."""

    left: float = math.inf


ALLOWANCE = Allowance()


class BoundedArray(Array):  # type: ignore[misc]  # flwr has no types for it
    """Flower's array. A message can name one piece of it any number of times: that is refused before it is unpacked."""

    @classmethod
    def inflate(cls, object_content: bytes, children: dict[str, Any] | None = None) -> Array:
        names = get_object_children_ids_from_object_content(object_content)
        pieces = json.loads(bytes(object_content).partition(b"\x00")[2])["arraychunk_ids"]
        ALLOWANCE.left -= sum(len((children or {})[names[piece]].data) for piece in pieces)
        if ALLOWANCE.left < 0:
            raise ValueError("it would unpack to more than a reply can be")
        return Array.inflate(object_content, children)


inflatable_class_registry[Array.__qualname__] = BoundedArray


def in_background(act: Callable[[], T]) -> Future[T]:
    """The outcome of a call that goes on whether anybody waits for it or not."""
    outcome: Future[T] = Future()

    def perform() -> None:
        try:
            outcome.set_result(act())
        except BaseException as problem:  # passed on to the thread that waits for the outcome
            outcome.set_exception(problem)

    threading.Thread(target=perform, daemon=True).start()
    return outcome


def ask(act: Callable[[], T], seconds: float) -> T:
    """What the SuperLink answers, for which it has ``TRANSFER`` seconds at least."""
    seconds = max(seconds, TRANSFER)
    try:
        return in_background(act).result(seconds)
    except TimeoutError:
        raise RunError(f"the SuperLink has not answered for {seconds:g} s; {SAVED}") from None


class Exchange:
    """A message to a node, and the look for its reply that is under way."""

    def __init__(self, grid: Grid, message: Message, deadline: float = math.inf, most: int = REPLY) -> None:
        """Sends a message, whose node has ``deadline`` seconds to reply with ``most`` bytes of arrays."""
        self._most = most
        ids = ask(lambda: list(grid.push_messages([message])), message.metadata.ttl)
        self._grid, self._id, self._sent, self._deadline = grid, ids[0] if ids else "", time.monotonic(), deadline
        self._look: Future[list[Message]] | None = None

    @property
    def running(self) -> bool:
        """Whether a reply was announced, or the SuperLink asked, and nothing is known yet."""
        return self._look is not None and not self._look.done()

    def _pull(self) -> list[Message]:
        ALLOWANCE.left = self._most  # of this thread, which ends with it
        return list(self._grid.pull_messages([self._id]))

    def reply(self) -> RecordDict | None:
        """The content of the reply, if it has come."""
        if not self._id:  # the SuperLink has not taken the message
            raise Refusal("its order could not be sent", "unreachable")
        if self._look is None:
            self._begun = time.monotonic()
            self._look = in_background(self._pull)
        until = self._sent + self._deadline
        try:
            replies = self._look.result(STALL)
        except TimeoutError:
            now = time.monotonic()
            if now > self._begun + TRANSFER and (now > until or math.isinf(until)):
                raise Refusal(f"its reply has not arrived whole after {now - self._sent:.0f} s", "late") from None
            return None
        except BROKEN as problem:
            raise Refusal(f"its reply cannot be read: {one_line(str(problem) or type(problem).__name__)}") from None
        self._look = None
        for reply in replies:
            if reply.metadata.reply_to_message_id != self._id:  # Flower hands out what the SuperLink sends us, too
                continue
            if reply.has_content():
                return reply.content
            code, reason = (reply.error.code, reply.error.reason) if reply.has_error() else (0, "an empty reply")
            raise Refusal(one_line(reason or f"error {code}"), "crashed" if code == CRASHED else "unreachable")
        if self._begun > until:  # a look that began before might have missed what came since
            raise Refusal(f"silent for {self._deadline:g} s, its deadline", "late")
        return None
