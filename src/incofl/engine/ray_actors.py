"""Workers as Ray actors, on this machine or on a cluster: weights and uploads go through Ray's object store.

What never changes (federation, data set) is put into the store once, the server's state once per round; the actors of a
node read them in its shared memory, without a copy. An upload is one object, which the server reads in the same way.
See docs/cluster.md for how to use it.
"""

import contextlib
import dataclasses
import re
import traceback
import warnings
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from incofl.engine.executor import Died
from incofl.engine.federation import Federation
from incofl.engine.memory import keep_freed_memory
from incofl.engine.parcel import Parcel, TensorBytes
from incofl.engine.pool import Pool, Reply, Task, WorkerHandle, WorkerLoop
from incofl.engine.ray_cluster import Connection
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.errors import RunError
from incofl.tensors import Tensors

Stored = tuple[Parcel, npt.NDArray[np.uint8]]  # an object as Ray's store holds it

PATIENCE = 120  # seconds that a run without a single living actor waits for one
STARTS = 3  # so many actors may die in a row before they have started


class Actor:
    """A worker, in a process of Ray's."""

    def start(self, setup: Stored) -> str:
        """Takes what never changes; returns what went wrong."""
        torch.set_num_threads(1)
        keep_freed_memory()
        try:
            self._loop = WorkerLoop(_unpacked(setup))
        except Exception:
            return traceback.format_exc()
        return ""

    def do(self, task: Task, published: Stored, memory: Stored) -> tuple[Reply | str, Stored | None]:
        """Does a task: the reply and what was made, or what went wrong."""
        try:
            reply = self._loop.do(task.job, _unpacked(published), _unpacked(memory))
        except Exception:
            return traceback.format_exc(), None
        return dataclasses.replace(reply, made=None), _packed(reply.made)


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

        There are ``workers`` of them; left out, one for each of the cluster's cores, but not more than ``most``.
        """
        self._cluster = Connection(address, workers)
        self._ray, self._failures = self._cluster.ray, 0
        self._remote = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Actor)
        cores = self._cluster.cores
        super().__init__(federation, workers or min(cores, most or cores), trace, store)

    def close(self) -> None:
        """Ends the actors, whatever they are doing, and the connection if it was made here."""
        for worker in self._pool:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._ray.kill(worker.actor)
        self._pool, self._constant, self._state = [], None, None
        self._cluster.close()

    def _prepare(self, setup: tuple[Federation, torch.dtype]) -> None:
        self._constant = self._ray.put(_packed(setup))

    def _publish(self, published: tuple[Any, ...]) -> None:
        self._state = self._ray.put(_packed(published))

    def _start(self) -> _ActorHandle:
        actor = self._remote.remote()
        return _ActorHandle(actor=actor, result=actor.start.remote(self._constant), ready=False)

    def _send(self, worker: _ActorHandle, task: Task, memory: Tensors) -> None:
        worker.result = worker.actor.do.remote(task, self._state, _packed(memory))

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
            reply, made = self._ray.get(result)
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:  # the actor, its node, or what it had finished is gone
            with contextlib.suppress(Exception):
                self._ray.kill(worker.actor)
            raise Died(_how(error)) from None
        if isinstance(reply, str):
            raise RuntimeError(f"in a Ray actor, {task.job}:\n{reply}")
        now = perf_counter()  # the clocks of other machines are not ours
        return Reply(_unpacked(made), now - (reply.end - reply.start), now)


def _packed(value: object) -> Stored:
    memory = TensorBytes()
    return memory.put(value), memory.bytes.numpy()


def _unpacked(stored: Stored) -> Any:
    """The object; its tensors are only to be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written
        return TensorBytes(torch.from_numpy(stored[1])).get(stored[0])


def _how(error: Exception) -> str:
    """In a few words what Ray says in many lines."""
    because = re.search(r"because (its [\w ]+)", str(error))
    return because[1] if because else type(error).__name__
