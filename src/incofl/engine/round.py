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
from incofl.tensors import Tensors, num_bytes, only
from incofl.transform import Record


def run_round(server: Server, method: Method, jobs: Sequence[Job], executor: Executor, stats: "RoundStats") -> Server:
    """One round: train the slices of the cohort, covered mean per position, transforms (InCo), add to the server."""
    arrivals = stats.validated(executor.train(server, jobs))  # lazily: an upload is added up when it arrives
    changes = method.server.aggregate(server, method.received(arrivals, server))
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

    def validated(self, arrivals: Iterator[Sequence[Upload | Lost]]) -> Iterator[list[Upload]]:
        """Passes on the uploads that can be aggregated; the others are rejected, with the reason."""
        for uploads in arrivals:
            accepted = [upload for upload in uploads if self._accepts(upload)]
            with self.trace.span("add up"):  # until the next ones are asked for
                yield accepted
        self.last_arrival = perf_counter()

    def _accepts(self, upload: Upload | Lost) -> TypeGuard[Upload]:
        self.on_upload(upload.client)
        self.clients.append(upload.client)
        if isinstance(upload, Lost):
            self.rejected.append({"client": upload.client, "reason": f"client {upload.client}: {upload.reason}"})
            return False
        size = num_bytes(upload.update) + num_bytes(upload.buffers)
        self.bytes_up += size + num_bytes(upload.extra) + num_bytes(upload.smallest)
        given = only(self.sent, upload.slice.given)
        self.bytes_down += size + upload.slice.num_bytes(given) + upload.slice.num_bytes(self.extra_of(upload.level))
        try:
            check(upload)
        except UploadError as problem:
            self.rejected.append({"client": upload.client, "reason": str(problem)})
            return False
        self.loss_sum += upload.loss * upload.examples
        self.examples += upload.examples
        self.on_accepted(upload)
        return True

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
    for what, name, value in ((what, *entry) for what, values in parts for entry in values.items()):
        floats = value.to(torch.promote_types(value.dtype, torch.float32))  # counters are whole numbers
        if not vector_norm(floats) <= LARGEST_NORM:  # so that NaN is refused too
            most = float(value.abs().max())
            if not math.isfinite(most):
                raise UploadError(f"{who}: its update is not finite; {why}")
            bound = f"values up to {most:.1e}, expected a norm of at most {LARGEST_NORM:.0e}"
            raise UploadError(f"{who}: its {what} {name!r} has {bound}; {why}")
