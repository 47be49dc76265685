"""Workers as tasks of Ray, on this machine or on a cluster: weights and uploads go through Ray's object store.

Ray finds a free core for each job and a process that does it; a process keeps what it has built for the next one. What
never changes (federation, data set) is put into the store once, the server's state once per round; the processes of a
node read them in its shared memory, without a copy. An upload is one object, which the server reads in the same way.
See docs/cluster.md for how to use it.
"""

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from incofl.engine.executor import Died
from incofl.engine.federation import Federation
from incofl.engine.parcel import Parcel, TensorBytes
from incofl.engine.pool import Made, Pool, WorkerLoop, num_cores
from incofl.engine.worker import AnyJob, worker_environment
from incofl.errors import ConfigError, RunError

Stored = tuple[Parcel, npt.NDArray[np.uint8]]  # an object as Ray's store holds it

PATIENCE = 120  # seconds that a run waits for the first worker, or for a cluster that has lost all its cores

# No report of use, no advice, and workers as eager as any process.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}


class RayTasks(Pool):
    """An executor of Ray tasks, each on one core."""

    kind = "Ray worker"

    def __init__(self, cluster: "Connection", federation: Federation, workers: int, **options: Any) -> None:
        """As many tasks at a time as there are ``workers``; the connection to the cluster ends with the executor."""
        super().__init__(federation, workers, **options)
        self._cluster, self._ray = cluster, cluster.ray
        self._do, self._running = self._remote(_do, max_retries=0), dict[int, Any]()

    def close(self) -> None:
        super().close()
        self._constant = self._state = None
        self._running.clear()
        self._cluster.close()

    def _remote(self, function: Callable[..., Any], max_retries: int) -> Any:
        """A function as a task on one core, which Ray itself tries again so many times if its process dies."""
        return self._ray.remote(num_cpus=1, max_retries=max_retries)(function)

    def _end(self) -> None:
        for task in list(self._running.values()):
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._ray.cancel(task, force=True)

    def _prepare(self, setup: tuple[Federation, torch.dtype]) -> None:
        self._constant = self._ray.put(_packed(setup))
        try:
            self._ray.get(self._remote(_begin, max_retries=2).remote([self._constant]), timeout=PATIENCE)
        except self._ray.exceptions.GetTimeoutError:
            want = f"expected one core that is free (of {self._cluster.cores} in the cluster); see: ray status"
            raise RunError(f"engine.executor: no Ray worker has started for {PATIENCE} s, {want}") from None
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().rpartition("\n")[2]
            want = "expected nodes with enough memory that have incofl and your own modules, the same versions as here"
            raise RunError(f"engine.executor: no Ray worker can start ({reason}), {want}") from error

    def _publish(self, published: tuple[Any, ...]) -> None:
        self._state = self._ray.put(_packed(published))

    def _attempt(self, worker: int, job: AnyJob, slot: int, memory: Any) -> Made:
        task = self._running[worker] = self._do.remote([self._constant], self._state, job, _packed(memory))
        if self._closed:  # too late for ``_end`` to see it
            self._end()
        while not self._ray.wait([task], timeout=PATIENCE)[0]:
            if not self._ray.cluster_resources().get("CPU"):
                raise RunError("engine.executor: no core is left in the Ray cluster, expected one; see: ray status")
        try:
            made, seconds = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"in a {self.kind}, {job}:\n{error}") from None
        except self._ray.exceptions.RayError as error:  # the process, its node, or what it had finished is gone
            raise Died(type(error).__name__) from None
        return _unpacked(made), seconds


@functools.lru_cache(maxsize=1)
def _loop(setup: Any) -> WorkerLoop:
    """In a process of Ray's: what does the jobs of a run, kept for the next one."""
    import ray

    return WorkerLoop(_unpacked(ray.get(setup)))


def _begin(setup: list[Any]) -> None:
    """A task: takes what never changes, which is in a list because Ray would fetch it for every job otherwise."""
    _loop(setup[0])


def _do(setup: list[Any], published: Stored, job: AnyJob, memory: Stored) -> tuple[Stored, float]:
    """A task: does a job."""
    made, seconds = _loop(setup[0]).do(job, _unpacked(published), _unpacked(memory))
    return _packed(made), seconds


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

    def __init__(self, address: str | None = None, cores: int | None = None) -> None:
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
