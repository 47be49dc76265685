"""Workers as Ray actors, on this machine or on a cluster: weights and uploads go through Ray's object store.

What never changes (plan, data set) is put into the store once, the server's state once per round; the actors of a node
read them in its shared memory, without a copy. An upload is one object, which the server reads in the same way. See
docs/cluster.md for how to use it.
"""

import contextlib
import dataclasses
import re
import traceback
import warnings
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from incofl.client import Upload
from incofl.engine.federation import Federation
from incofl.engine.memory import keep_freed_memory
from incofl.engine.pool import Died, Pool, WorkerHandle
from incofl.engine.ray_cluster import Connection
from incofl.engine.shared_tensors import TensorBytes
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.worker_setup import Reply, Task, WorkerLoop, WorkerSetup, constant_tensors, make_setup
from incofl.errors import RunError
from incofl.server import Server
from incofl.tensors import Tensors

Bytes = npt.NDArray[np.uint8]

PATIENCE = 120  # seconds that a run without a single living actor waits for one
STARTS = 3  # so many actors may die in a row before they have started


class Actor:
    """A worker, in a process of Ray's."""

    def start(self, pickled: bytes, data: Bytes, num_bytes: int) -> str:
        """Takes what never changes, and room for an upload; returns what went wrong."""
        torch.set_num_threads(1)
        keep_freed_memory()
        try:
            self._setup: WorkerSetup = cloudpickle.loads(pickled)
            self._loop = WorkerLoop(self._setup, _tensors(data))
        except Exception:
            return traceback.format_exc()
        self._uploads = TensorBytes(torch.empty(num_bytes, dtype=torch.uint8))
        return ""

    def do(self, task: Task, state: Bytes, memory: Bytes | None) -> tuple[Reply | str, Bytes | None]:
        """Does a task: the reply, or what went wrong, and the slot as far as it is used."""
        slot = self._setup.slots[0][task.job.level]
        if memory is not None:
            self._uploads.bytes[slot.memory_range].copy_(_tensors(memory).bytes)
        try:
            reply = self._loop.do(dataclasses.replace(task, slot=0), _tensors(state), self._uploads)
        except Exception:
            return traceback.format_exc(), None
        return reply, None if reply.score else self._uploads.bytes[: slot.end].numpy()


@dataclass(kw_only=True)
class _ActorHandle(WorkerHandle):
    """An actor, and where the result of what it is doing (starting, or its task) will be."""

    actor: Any
    result: Any


class RayActors(Pool[_ActorHandle]):
    """An executor of Ray actors, each on one core."""

    kind = "Ray actor"

    def __init__(
        self,
        federation: Federation,
        workers: int | None = None,
        address: str | None = None,
        trace: Trace | None = None,
        store: ClientStore | None = None,
        most: int | None = None,
    ) -> None:
        """Actors on the cluster at an ``address``; left out: on one that is started here and ends with the executor.

        Args:
            federation: whose turns they compute.
            workers: how many; left out, one for each of the cluster's cores, but not more than ``most``.
            address: as ``ray.init`` takes it.
            trace: told what they do.
            store: what clients remember.
            most: see ``workers``.
        """
        super().__init__(federation, trace, store)
        self._setup, (constant_size, state_size, self._num_bytes) = make_setup(federation, num_slots=1)
        self._uploads: dict[int, Bytes] = {}  # by slot, until they are consumed
        self._failures = 0
        self._cluster = Connection(address, workers)
        try:
            self._ray = self._cluster.ray
            self._remote = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Actor)
            constant = TensorBytes(torch.empty(constant_size, dtype=torch.uint8))
            for name, tensor in constant_tensors(federation).items():
                constant.view(self._setup.constant[name]).copy_(tensor)
            self._constant = [self._ray.put(cloudpickle.dumps(self._setup)), self._ray.put(constant.bytes.numpy())]
            self._state = TensorBytes(torch.empty(state_size, dtype=torch.uint8))
            self._published: Any = None
            self._open(workers or min(self._cluster.cores, most or self._cluster.cores))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the actors, whatever they are doing, and the connection if it was made here."""
        for worker in self._pool:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._ray.kill(worker.actor)
        self._pool, self._uploads, self._published, self._constant = [], {}, None, []
        self._cluster.close()

    def _publish(self, server: Server) -> None:
        super()._publish(server)
        self._published = self._ray.put(self._state.bytes.numpy())

    def _start(self) -> _ActorHandle:
        actor = self._remote.remote()
        return _ActorHandle(actor=actor, result=actor.start.remote(*self._constant, self._num_bytes), ready=False)

    def _send(self, worker: _ActorHandle, task: Task, memory: Tensors) -> None:
        remembered = None
        if memory:
            slot = self._setup.slots[0][task.job.level]
            block = TensorBytes(torch.empty(slot.end, dtype=torch.uint8))
            for name, tensor in block.views(slot.memory).items():
                tensor.copy_(memory[name])
            remembered = block.bytes[slot.memory_range].numpy()
        worker.result = worker.actor.do.remote(task, self._published, remembered)

    def _replied(self) -> list[_ActorHandle]:
        pending = {worker.result: worker for worker in self._pool if worker.task or not worker.ready}
        patience = None if any(worker.ready for worker in self._pool) else PATIENCE
        if not self._ray.wait(list(pending), timeout=patience)[0]:
            raise RunError(
                f"engine.executor: no Ray actor has started for {PATIENCE} s, expected one core that is free "
                f"(of {self._cluster.cores} in the cluster); see: ray status"
            )
        done, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for worker in [pending[ref] for ref in done if not pending[ref].ready]:
            self._started(worker)
        return [pending[ref] for ref in done if pending[ref].task]

    def _started(self, worker: _ActorHandle) -> None:
        """Takes in an actor that has started, or replaces one that has died over it."""
        try:
            problem, worker.result = self._ray.get(worker.result), None
        except self._ray.exceptions.RayError as error:
            self._failures += 1
            if self._failures == STARTS:
                raise RunError(
                    f"engine.executor: {STARTS} Ray actors in a row died at their start ({_how(error)}), expected "
                    "nodes with enough memory that have incofl installed, the same version as here"
                ) from error
            self._pool[self._pool.index(worker)] = self._start()
            return
        if problem:
            raise RuntimeError(f"in a Ray actor, at its start:\n{problem}")
        worker.ready, self._failures = True, 0

    def _collect(self, worker: _ActorHandle, task: Task) -> Reply:
        result, worker.result = worker.result, None
        try:
            reply, upload = self._ray.get(result)
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:  # the actor, its node, or what it had finished is gone
            with contextlib.suppress(Exception):
                self._ray.kill(worker.actor)
            raise Died(_how(error)) from None
        if isinstance(reply, str):
            raise RuntimeError(f"in a Ray actor, {task.job}:\n{reply}")
        if upload is not None:
            self._uploads[task.slot] = upload
        # The clocks of other machines are not ours.
        now = perf_counter()
        return Reply(reply.steps, reply.loss, reply.normaliser, reply.score, now - (reply.end - reply.start), now)

    def _slot(self, task: Task) -> Upload:
        return self._setup.slots[0][task.job.level].views(_tensors(self._uploads.pop(task.slot)))


def _tensors(data: Bytes) -> TensorBytes:
    """Bytes of the object store as tensors: only to be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written
        return TensorBytes(torch.from_numpy(data))


def _how(error: Exception) -> str:
    """In a few words what Ray says in many lines."""
    because = re.search(r"because (its [\w ]+)", str(error))
    return because[1] if because else type(error).__name__
