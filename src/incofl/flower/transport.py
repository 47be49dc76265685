"""Messages to nodes and their replies, without ever waiting longer than we want to.

Flower waits for a SuperLink that does not answer for as long as it takes, and two hours for a reply that was announced
and does not arrive. So its calls are made in threads, which are left alone when their time is over.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from incofl.errors import RunError, UploadError
from incofl.flower.protocol import one_line

T = TypeVar("T")
TRANSFER = 60.0  # least seconds that a reply has from its announcement until it has arrived
CLOCKS = 60.0  # seconds by which the clocks of server and nodes may differ
STALL = 2.0  # seconds after which a fetch keeps nobody else waiting
# What Flower raises at what a stranger sent.
UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, DecodeError),
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
    """What the SuperLink answers.

    Raises:
        RunError: it does not answer within that time.
    """
    try:
        return in_background(act).result(seconds)
    except TimeoutError:
        raise RunError(
            f"the SuperLink has not answered for {seconds:g} s; finished rounds are saved: resume=true continues"
        ) from None


def push(grid: Grid, message: Message, seconds: float) -> str | None:
    """Sends a message; its id, if the SuperLink has taken it."""
    ids = ask(lambda: list(grid.push_messages([message])), seconds)
    return ids[0] or None if ids else None


class Fetch:
    """A look for the reply to a message, which says whose reply it is: errors are sent by the SuperLink."""

    def __init__(self, grid: Grid, message: str) -> None:
        self.begun = time.monotonic()

        def look() -> Message | None:
            replies = grid.pull_messages([message])
            return next((reply for reply in replies if reply.metadata.reply_to_message_id == message), None)

        self._reply = in_background(look)

    @property
    def running(self) -> bool:
        """Whether a reply was announced, or the SuperLink asked, and nothing is known yet."""
        return not self._reply.done()

    def reply(self, seconds: float) -> Message | None:
        """The reply, if there is one.

        Raises:
            UploadError: it cannot be read.
            TimeoutError: it has not arrived within that time; it may come later.
        """
        try:
            return self._reply.result(seconds)
        except UNREADABLE as problem:
            reason = one_line(str(problem)) if str(problem) else type(problem).__name__
            raise UploadError(f"its reply cannot be read: {reason}") from None


def reason_of(reply: Message) -> str:
    """Why there is no content in a reply."""
    return one_line(reply.error.reason or f"error {reply.error.code}") if reply.has_error() else "an empty reply"
