"""Worker processes on this machine: persistent, one torch thread each, weights and uploads through shared memory.

Workers are fresh interpreters, neither forks nor imports of the main script: a script needs no
``if __name__ == "__main__"``, and threads of the parent do no harm.
"""

import contextlib
import signal
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from incofl.engine.executor import Died
from incofl.engine.federation import Federation
from incofl.engine.parcel import SharedBytes
from incofl.engine.pool import Made, Pool, WorkerLoop
from incofl.engine.worker import AnyJob, worker_environment


class WorkerProcesses(Pool):
    """An executor of ``workers`` processes on this machine."""

    kind = "worker process"

    def _prepare(self, setup: tuple[Federation, torch.dtype]) -> None:
        self._constant, self._state = SharedBytes(), SharedBytes()
        self._results = [SharedBytes() for _ in range(self._slots)]
        self._processes: dict[int, tuple[subprocess.Popen[bytes], Connection]] = {}
        self._setup = self._constant.put(setup)

    def _publish(self, published: tuple[Any, ...]) -> None:
        self._published = self._state.put(published)

    def _attempt(self, worker: int, job: AnyJob, slot: int, memory: Any) -> Made:
        if worker not in self._processes:
            self._processes[worker] = self._start()
        process, connection = self._processes[worker]
        if self._closed:  # too late for ``_end`` to see it
            process.kill()
        remembered = self._results[slot].put(memory)
        with contextlib.suppress(OSError):  # it has died: its closed connection is noticed next
            connection.send((job, slot, self._published, remembered))
        try:
            reply = connection.recv()
        except (EOFError, OSError):
            code = process.wait()
            del self._processes[worker]
            raise Died(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}") from None
        if isinstance(reply, Exception):
            raise reply
        made, seconds = reply
        return self._results[slot].get(made), seconds

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        fds = [theirs.fileno(), *(memory.fd for memory in (self._constant, self._state, *self._results))]
        options = {"pass_fds": fds, "stdin": subprocess.DEVNULL}
        process = start_python("incofl.engine.processes", *self._setup, *fds, **options)
        theirs.close()
        return process, ours

    def _end(self) -> None:
        for process, _ in list(self._processes.values()):
            process.kill()
            process.wait()


def start_python(module: str, *arguments: int, **options: Any) -> subprocess.Popen[bytes]:
    """A fresh interpreter that calls the function ``main`` of a module, and imports from where this one does."""
    command = [sys.executable, "-c", f"from {module} import main; main()", *map(str, arguments)]
    return subprocess.Popen(command, env=worker_environment(), **options)


def main() -> None:
    """A worker process: serves the parent whose pipe and shared memory the arguments name, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    start, end, pipe, *fds = map(int, sys.argv[1:])
    connection, (constant, state, *results) = Connection(pipe), [SharedBytes(fd) for fd in fds]
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        try:
            loop = WorkerLoop(constant.get((start, end)))
        except Exception:
            connection.send(RuntimeError(f"in a worker process, at its start:\n{traceback.format_exc()}"))
            return
        while True:
            job, slot, published, memory = connection.recv()
            try:
                made, seconds = loop.do(job, state.get(published), results[slot].get(memory))
                message: Made | Exception = (results[slot].put(made), seconds)
            except Exception:
                message = RuntimeError(f"in a worker process, {job}:\n{traceback.format_exc()}")
            connection.send(message)
