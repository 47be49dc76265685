"""THE loop body of federated learning: one round. It knows no method, model, parameter or engine by name."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeGuard

import torch
from torch import Tensor
from torch.linalg import vector_norm

from incofl.client import Upload
from incofl.engine.executor import Executor, Lost
from incofl.engine.federation import Job
from incofl.engine.trace import Trace
from incofl.errors import UploadError
from incofl.method import Method
from incofl.server import Server
from incofl.tensors import Tensors, all_bounded, num_bytes, only
from incofl.transform import Record
from incofl.upload import UploadStack


def run_round(server: Server, method: Method, jobs: Sequence[Job], executor: Executor, stats: "RoundStats") -> Server:
    """One round: train the slices of the cohort, covered mean per position, transforms (InCo), add to the server."""
    arrivals = stats.validated(executor.train(server, jobs))  # lazily: an upload is added up when it arrives
    changes = method.aggregate(server, arrivals)
    stats.records |= changes.records
    for transform in method.transforms:
        changes, stats.records[transform.name] = changes.transformed(transform, server)
    return server.advance(changes)


@dataclass
class RoundStats:
    """What a round's uploads amount to, counted as they stream past.

    ``extra_of`` says what the server sends to a level in addition to the model; see ``ServerRule.extra_for_client``.
    ``sent`` is the server model, of which some entries may be sent and not uploaded.
    """

    clients: list[int] = field(default_factory=list)
    rejected: list[dict[str, int | str]] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    loss_sum: float = 0.0
    examples: int = 0
    records: dict[str, Record] = field(default_factory=dict)
    extra_of: Callable[[int], Tensors] = lambda level: {}
    sent: Mapping[str, Tensor] = field(default_factory=dict)
    on_upload: Callable[[int], None] = lambda client: None
    on_accepted: Callable[[Upload], None] = lambda upload: None
    trace: Trace = field(default_factory=Trace)
    last_arrival: float = 0.0

    def validated(self, arrivals: Iterator[Sequence[Upload | Lost]]) -> Iterator[Sequence[Upload]]:
        """Passes on the uploads that can be aggregated; the others are rejected, with the reason."""
        for uploads in arrivals:
            accepted: Sequence[Upload] = (
                uploads
                if isinstance(uploads, UploadStack) and self._accepts_all(uploads)
                else [upload for upload in uploads if self._accepts(upload)]
            )
            with self.trace.span("add up"):  # until the next ones are asked for
                yield accepted
        self.last_arrival = perf_counter()

    def _accepts(self, upload: Upload | Lost) -> TypeGuard[Upload]:
        if isinstance(upload, Lost):
            self._arrived(upload.client)
            self.rejected.append({"client": upload.client, "reason": f"client {upload.client}: {upload.reason}"})
            return False
        self._arrived(upload.client)
        self._weigh(upload)
        try:
            check(upload)
        except UploadError as problem:
            self.rejected.append({"client": upload.client, "reason": str(problem)})
            return False
        self._count(upload.loss, upload.examples)
        self.on_accepted(upload)
        return True

    def _accepts_all(self, stack: UploadStack) -> bool:
        """Whether nothing is wrong with any upload of a stack; if something is, each is looked at by itself."""
        values = [*stack.update.values(), *stack.extra.values(), *stack.buffers.values()]
        try:
            stack.slice.check({name: value[0] for name, value in (stack.update | stack.buffers).items()}, "stack")
        except UploadError:
            return False
        if not all(stack.steps) or not all_bounded(values, LARGEST_NORM):
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


# Bound of the norm of a tensor in an upload. The server sums buffers, and squares updates (InCo, the norms it records)
# that it may have multiplied (FedNova by ratios of normalisers, InCo by theta): 1e4 times this norm, squared, is still
# a float32.
LARGEST_NORM = 1e15


def check(upload: Upload) -> None:
    """Refuses what must not reach the server model: wrong names or shapes, values out of bounds, no training."""
    who, why = f"client {upload.client}", "the training diverged, lower local.lr"
    upload.slice.check(upload.update | upload.buffers, who)
    if upload.steps == 0:
        raise UploadError(f"{who}: trained on nothing; it has {upload.examples} example(s)")
    parts = ("update of", upload.update), ("update of", upload.extra), ("buffer", upload.buffers | upload.smallest)
    values = [*upload.update.values(), *upload.extra.values(), *upload.buffers.values()]
    values += upload.smallest.values()
    if all_bounded(values, LARGEST_NORM):
        return
    for what, name, value in ((what, *entry) for what, values in parts for entry in values.items()):
        floats = value.to(torch.promote_types(value.dtype, torch.float32))  # counters are whole numbers
        if not vector_norm(floats) <= LARGEST_NORM:  # so that NaN is refused too
            most = float(value.abs().max())
            if not math.isfinite(most):
                raise UploadError(f"{who}: its update is not finite; {why}")
            bound = f"values up to {most:.1e}, expected a norm of at most {LARGEST_NORM:.0e}"
            raise UploadError(f"{who}: its {what} {name!r} has {bound}; {why}")
