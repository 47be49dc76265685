"""Workers as Ray actors, on this machine or on a cluster: weights and uploads go through Ray's object store.

What never changes (federation, data set) is put into the store once, the server's state once per round; the actors of a
node read them in its shared memory, without a copy. An upload is one object, which the server reads in the same way.
See docs/cluster.md for how to use it.
"""

import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from incofl.engine.executor import Died
from incofl.engine.federation import Federation
from incofl.engine.parcel import Parcel, TensorBytes
from incofl.engine.pool import Pool, Reply, Task, WorkerHandle, WorkerLoop, num_cores
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.worker import worker_environment
from incofl.errors import ConfigError, RunError
from incofl.tensors import Tensors

Stored = tuple[Parcel, npt.NDArray[np.uint8]]  # an object as Ray's store holds it

PATIENCE = 120  # seconds that a run without a single living actor waits for one
STARTS = 3  # so many actors may die in a row before they have started

# No report of use, no advice, and workers as eager as any process.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}


class Actor:
    """A worker, in a process of Ray's."""

    def start(self, setup: Stored) -> None:
        """Takes what never changes."""
        self._loop = WorkerLoop(_unpacked(setup))

    def do(self, task: Task, published: Stored, memory: Stored) -> tuple[Reply, Stored]:
        """Does a task: the reply, and what was made."""
        reply = self._loop.do(task.job, _unpacked(published), _unpacked(memory))
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
            want = f"expected one core that is free (of {self._cluster.cores} in the cluster); see: ray status"
            raise RunError(f"engine.executor: no Ray actor has started for {PATIENCE} s, {want}")
        done, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for worker in [pending[ref] for ref in done if not pending[ref].ready]:
            self._started(worker)
        return [pending[ref] for ref in done if pending[ref].task]

    def _started(self, worker: _ActorHandle) -> None:
        """Takes in an actor that has started, or replaces one that has died over it."""
        try:
            self._result(worker, "at its start")
        except Died as death:
            self._failures += 1
            if self._failures == STARTS:
                want = "expected nodes with enough memory that have incofl installed, the same version as here"
                found = f"{STARTS} Ray actors in a row died at their start ({death})"
                raise RunError(f"engine.executor: {found}, {want}") from death
            self._pool[self._pool.index(worker)] = self._start()
        else:
            worker.ready, self._failures = True, 0

    def _collect(self, worker: _ActorHandle, task: Task) -> Reply:
        reply, made = self._result(worker, str(task.job))
        now = perf_counter()  # the clocks of other machines are not ours
        return Reply(_unpacked(made), now - (reply.end - reply.start), now)

    def _result(self, worker: _ActorHandle, what: str) -> Any:
        """What an actor has done, if it lives."""
        result, worker.result = worker.result, None
        try:
            return self._ray.get(result)
        except self._ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"in a {self.kind}, {what}:\n{error}") from None
        except self._ray.exceptions.RayError as error:  # the actor, its node, or what it had finished is gone
            with contextlib.suppress(Exception):
                self._ray.kill(worker.actor)
            because = re.search(r"because (its [\w ]+)", str(error))  # of many lines
            raise Died(because[1] if because else type(error).__name__) from None


def _packed(value: object) -> Stored:
    memory = TensorBytes()
    return memory.put(value), memory.bytes.numpy()


def _unpacked(stored: Stored) -> Any:
    """The object; its tensors are only to be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written
        return TensorBytes(torch.from_numpy(stored[1])).get(stored[0])


class Connection:
    """This process as a client of a cluster, without Ray's words on the screen."""

    def __init__(self, address: str | None, cores: int | None) -> None:
        """Connects to an address; without one, starts Ray here with so many ``cores``, or all of this machine's.

        A connection that the process has already is used as it is.
        """
        try:
            with _as_before(_QUIET):
                import ray
        except ImportError:
            want = "expected Ray to be installed; try: pip install 'incofl[ray]'"
            raise ConfigError(f"engine.executor: got 'ray', {want}") from None
        self.ray: Any = ray
        self._stack = contextlib.ExitStack()
        if not ray.is_initialized():
            _connect(ray, address, cores)
            # Ray prints every dead worker over the display: a run reports its dead by itself.
            inside = ray._private.worker
            self._stack.callback(setattr, inside, "print_to_stdstream", inside.print_to_stdstream)
            inside.print_to_stdstream = lambda *arguments, **options: None
            self._stack.callback(ray.shutdown)

    @property
    def cores(self) -> int:
        """Of the whole cluster, in use or not; at least 1."""
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def close(self) -> None:
        """Disconnects, and so ends what was started here, unless the connection was there before."""
        self._stack.close()


def _connect(ray: Any, address: str | None, cores: int | None) -> None:
    options: dict[str, Any] = {"address": address}
    if address is None:  # whatever RAY_ADDRESS says
        options = {"address": "local", "num_cpus": cores or num_cores(), "include_dashboard": False}
    try:
        _check(address or "")
        with _as_before(_QUIET if address else worker_environment() | _QUIET):
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as problem:  # Ray has no class of its own for this
        reason = str(problem).strip().partition("\n")[0]
        if address is None:
            want = f"Ray did not start on this machine ({reason}); is it overloaded? try again"
            raise RunError(f"engine.executor: {want}") from problem
        want = f"expected the address of a running Ray cluster ({reason}); start one with: ray start --head"
        raise ConfigError(f"engine.address: got {address!r}, {want}") from None


def _check(address: str) -> None:
    """Ray itself tries for minutes to reach an address where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():  # else a name such as auto: Ray says at once what it thinks of it
        socket.create_connection((host, int(port)), timeout=10).close()


@contextlib.contextmanager
def _as_before(environment: dict[str, str]) -> Iterator[None]:
    """Inside, an environment for processes that are started; afterwards it is as before.

    So is the program's answer to SIGTERM, which Ray takes for itself.
    """
    variables, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ.update(environment)
    try:
        yield
    except SystemExit:  # how Ray answers it
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
