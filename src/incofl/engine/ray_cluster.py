"""The connection to a Ray cluster: an existing one, or one that is started here; without Ray's words on the screen."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from incofl.engine.memory import worker_environment
from incofl.engine.pool import num_cores
from incofl.errors import ConfigError, RunError

# No report of use, no advice, and workers as eager as any process.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}


class Connection:
    """This process as a client of a cluster."""

    def __init__(self, address: str | None, cores: int | None) -> None:
        """Connects to an address; without one, starts Ray here with this number of ``cores``, or all of this machine's.

        A connection that the process has already is used as it is.
        """
        self.ray = _import_ray()
        self._ours = not self.ray.is_initialized()
        self._silence = contextlib.ExitStack()
        if self._ours:
            if address is None:
                _start(self.ray, cores)
            else:
                _connect(self.ray, address)
            self._silence.enter_context(_silence())

    @property
    def cores(self) -> int:
        """Of the whole cluster, in use or not; at least 1."""
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def close(self) -> None:
        """Disconnects, and so ends what was started here, unless the connection was there before."""
        if self._ours and self.ray.is_initialized():
            self.ray.shutdown()
        self._silence.close()


def _import_ray() -> Any:
    try:
        with _environment(_QUIET):
            import ray
    except ImportError:
        raise ConfigError(
            "engine.executor: got 'ray', expected Ray to be installed; try: pip install 'incofl[ray]'"
        ) from None
    return ray


def _start(ray: Any, cores: int | None) -> None:
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        with _environment(worker_environment() | paths | _QUIET), _own_signals():
            ray.init(
                address="local",  # whatever RAY_ADDRESS says
                num_cpus=cores or num_cores(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as problem:  # Ray has no class of its own for this
        raise RunError(
            f"engine.executor: Ray did not start on this machine ({_reason(problem)}); is it overloaded? try again"
        ) from problem


def _connect(ray: Any, address: str) -> None:
    _check(address)
    try:
        with _environment(_QUIET), _own_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, RuntimeError, ValueError) as problem:
        raise _unreachable(address, problem) from None


def _check(address: str) -> None:
    """Ray itself tries for minutes to reach an address where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # a name such as auto: Ray says at once what it thinks of it
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as problem:
        raise _unreachable(address, problem) from None


def _unreachable(address: str, problem: Exception) -> ConfigError:
    return ConfigError(
        f"engine.address: got {address!r}, expected the address of a running Ray cluster ({_reason(problem)}); "
        "start one with: ray start --head"
    )


def _reason(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0]


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Inside, some variables for processes that are started; afterwards all is as before."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; what the program had chosen is put back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # how Ray answers it
        if callable(before):
            before(signal.SIGTERM, None)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Inside, Ray does not print every dead worker over the display: a run reports its dead by itself."""
    from ray._private import worker

    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *arguments, **options: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before
