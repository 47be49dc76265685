"""Messages to nodes and their replies, without ever waiting longer than we want to.

Flower waits for a SuperLink that does not answer for as long as it takes, and two hours for a reply that was announced
and does not arrive. So its calls are made in threads, which are left alone when their time is over.
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from incofl.errors import RunError, UploadError
from incofl.flower.protocol import Missed, one_line

T = TypeVar("T")
TRANSFER = 60.0  # least seconds that a reply has from its announcement until it has arrived
CLOCKS = 60.0  # seconds by which the clocks of server and nodes may differ
STALL = 2.0  # seconds after which a fetch keeps nobody else waiting
SAVED = "finished rounds are saved: resume=true continues"
# What Flower raises at what a stranger sent.
DAMAGED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    DecodeError,
)


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
    """A message to a node, and the look for its reply that is under way.

    The message says whose reply it is: errors are sent by the SuperLink.
    """

    def __init__(self, grid: Grid, message: Message, deadline: float = math.inf) -> None:
        """Sends a message, whose node has ``deadline`` seconds to reply."""
        ids = ask(lambda: list(grid.push_messages([message])), message.metadata.ttl)
        self._grid, self._id, self._sent, self._deadline = grid, ids[0] if ids else "", time.monotonic(), deadline
        self._look: Future[list[Message]] | None = None

    @property
    def taken(self) -> bool:
        """Whether the SuperLink has taken the message."""
        return bool(self._id)

    @property
    def running(self) -> bool:
        """Whether a reply was announced, or the SuperLink asked, and nothing is known yet."""
        return self._look is not None and not self._look.done()

    def reply(self) -> Message | None:
        """The reply, if it has come; raises ``Missed`` if it is too late, ``UploadError`` if it cannot be read."""
        if not self.taken:
            raise UploadError("its order could not be sent")
        if self._look is None:
            self._begun = time.monotonic()
            self._look = in_background(lambda: list(self._grid.pull_messages([self._id])))
        until = self._sent + self._deadline
        try:
            replies = self._look.result(STALL)
        except TimeoutError:
            now = time.monotonic()
            if now > self._begun + TRANSFER and (now > until or math.isinf(until)):
                raise Missed(f"its reply has not arrived whole after {now - self._sent:.0f} s") from None
            return None
        except DAMAGED as problem:
            reason = one_line(str(problem) or type(problem).__name__)
            raise UploadError(f"its reply cannot be read: {reason}") from None
        self._look = None
        reply = next((reply for reply in replies if reply.metadata.reply_to_message_id == self._id), None)
        if reply is None and self._begun > until:  # a look that began before might have missed what came since
            raise Missed(f"silent for {self._deadline:g} s, its deadline")
        return reply


def reason_of(reply: Message) -> str:
    """Why there is no content in a reply."""
    return one_line(reply.error.reason or f"error {reply.error.code}") if reply.has_error() else "an empty reply"
