"""THE loop body of federated learning: one round. It knows no method, model, parameter or engine by name."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from incofl.client import Upload
from incofl.config.schema import ValidationConfig
from incofl.engine.executor import Executor, Lost
from incofl.engine.federation import Job
from incofl.engine.trace import Trace
from incofl.engine.validation import NORMS, Validation
from incofl.errors import UploadError
from incofl.method import Method
from incofl.server import Server
from incofl.tensors import Tensors, num_bytes, only
from incofl.transform import Record
from incofl.upload import UploadStack


def run_round(server: Server, method: Method, jobs: Sequence[Job], executor: Executor, stats: "RoundStats") -> Server:
    """One round: train the slices of the cohort, covered mean per position, transforms (InCo), add to the server."""
    arrivals = stats.validated(executor.train(server, jobs), server)  # lazily: each is added up when it arrives
    changes = method.aggregate(server, arrivals)
    stats.records |= changes.records
    for transform in method.transforms:
        changes, stats.records[transform.name] = changes.transformed(transform, server)
    return stats.kept(server, server.advance(changes))


@dataclass
class RoundStats:
    """What a round's uploads amount to, counted as they stream past.

    ``extra_of`` says what the server sends to a level in addition to the model; see ``ServerRule.extra_for_client``.
    ``sent`` is the server model, of which some entries may be sent and not uploaded.
    """

    clients: list[int] = field(default_factory=list)
    rejected: list[dict[str, int | str]] = field(default_factory=list)
    clipped: list[dict[str, Any]] = field(default_factory=list)  # uploads that were made shorter
    taken_back: str | None = None  # why the round has changed nothing
    bytes_up: int = 0
    bytes_down: int = 0
    loss_sum: float = 0.0
    examples: int = 0
    records: dict[str, Record] = field(default_factory=dict)
    extra_of: Callable[[int], Tensors] = lambda level: {}
    sent: Mapping[str, Tensor] = field(default_factory=dict)
    on_upload: Callable[[int], None] = lambda client: None
    on_accepted: Callable[[Upload], None] = lambda upload: None
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    confidential: bool = False  # whether nothing but the mean may depend on what several clients sent
    trace: Trace = field(default_factory=Trace)
    last_arrival: float = 0.0

    def validated(self, arrivals: Iterator[Sequence[Upload | Lost]], server: Server) -> Iterator[Sequence[Upload]]:
        """Passes on the uploads that can be aggregated; the others are rejected, with the reason."""
        off = dataclasses.replace(self.validation, norm="off")
        self._rules = Validation(server, off if self.confidential else self.validation)
        for uploads in arrivals:
            accepted: Sequence[Upload] = (
                uploads
                if isinstance(uploads, UploadStack) and self._accepts_all(uploads)
                else [valid for upload in uploads if (valid := self._accepted(upload)) is not None]
            )
            with self.trace.span("add up"):  # until the next ones are asked for
                yield accepted
        self.clipped = self._rules.clipped
        self.last_arrival = perf_counter()

    def kept(self, server: Server, after: Server) -> Server:
        """The server after a round, with what was learned of norms; as it was if the round must be taken back."""
        if self.confidential:  # a round that is taken back, and the norms of others, would tell
            return after
        self.taken_back = self._rules.problem(after, len(self.clients) - len(self.rejected))
        if self.taken_back is not None:
            return dataclasses.replace(server, round=after.round)
        return dataclasses.replace(after, states={**after.states, NORMS: self._rules.state()})

    def _accepted(self, upload: Upload | Lost) -> Upload | None:
        self._arrived(upload.client)
        if isinstance(upload, Lost):
            self.rejected.append({"client": upload.client, "reason": f"client {upload.client}: {upload.reason}"})
            return None
        self._weigh(upload)
        try:
            upload = self._rules.accept(upload)
        except UploadError as problem:
            self.rejected.append({"client": upload.client, "reason": str(problem)})
            return None
        self._count(upload.loss, upload.examples)
        self.on_accepted(upload)
        return upload

    def _accepts_all(self, stack: UploadStack) -> bool:
        """Whether nothing is wrong with any upload of a stack; if something is, each is looked at by itself."""
        if not self._rules.accepts_all(stack):
            return False
        self._weigh(stack, len(stack))
        for client, loss, examples in zip(stack.clients, stack.losses, stack.examples, strict=True):
            self._arrived(client)
            self._count(loss, examples)
        for upload in stack if stack.memory else ():
            self.on_accepted(upload)
        return True

    def _arrived(self, client: int) -> None:
        self.on_upload(client)
        self.clients.append(client)

    def _weigh(self, upload: Upload | UploadStack, clients: int = 1) -> None:
        size = num_bytes(upload.update) + num_bytes(upload.buffers)
        self.bytes_up += size + num_bytes(upload.extra)
        self.bytes_up += num_bytes(upload.smallest) if isinstance(upload, Upload) else 0
        slice_, extra = upload.slice, self.extra_of(upload.level)
        given = slice_.num_bytes(only(self.sent, slice_.given)) if slice_.given else 0
        self.bytes_down += size + clients * (given + (slice_.num_bytes(extra) if extra else 0))

    def _count(self, loss: float, examples: int) -> None:
        self.loss_sum += loss * examples
        self.examples += examples

    @property
    def loss(self) -> float | None:
        """Mean training loss over the cohort's examples."""
        return self.loss_sum / self.examples if self.examples else None
