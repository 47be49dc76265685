"""Worker processes on this machine: persistent, one torch thread each, weights and uploads through shared memory.

Workers are fresh interpreters, neither forks nor imports of the main script: a script needs no
``if __name__ == "__main__"``, and threads of the parent do no harm.
"""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

from incofl.engine.executor import Died
from incofl.engine.federation import Federation
from incofl.engine.parcel import SharedBytes
from incofl.engine.pool import Pool, Reply, Task, WorkerHandle, WorkerLoop
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.worker import worker_environment
from incofl.tensors import Tensors


@dataclass(kw_only=True)
class _Process(WorkerHandle):
    process: subprocess.Popen[bytes]
    connection: Connection


class WorkerProcesses(Pool[_Process]):
    """An executor of ``workers`` processes on this machine."""

    kind = "worker process"

    def __init__(
        self, federation: Federation, workers: int, trace: Trace | None = None, store: ClientStore | None = None
    ) -> None:
        super().__init__(federation, workers, trace, store)
        self._constant, self._state = SharedBytes(), SharedBytes()
        self._slots = [SharedBytes() for _ in self._free_slots]

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        for worker in self._pool:
            worker.connection.close()
            worker.process.kill()
            worker.process.wait()
        self._pool = []

    def _prepare(self, setup: tuple[Federation, torch.dtype]) -> None:
        self._setup = self._constant.put(setup)

    def _publish(self, published: tuple[Any, ...]) -> None:
        self._published = self._state.put(published)

    def _send(self, worker: _Process, task: Task, memory: Tensors) -> None:
        remembered = self._slots[task.slot].put(memory)
        with contextlib.suppress(OSError):  # it has died: its closed connection is noticed in _collect
            worker.connection.send((task, self._published, remembered))

    def _replied(self) -> list[_Process]:
        busy = [worker for worker in self._pool if worker.task is not None]
        ready = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in ready]

    def _collect(self, worker: _Process, task: Task) -> Reply:
        try:
            reply: Reply | Exception = worker.connection.recv()
        except (EOFError, OSError):
            code = worker.process.wait()
            raise Died(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}") from None
        if isinstance(reply, Exception):
            raise reply
        return dataclasses.replace(reply, made=self._slots[task.slot].get(reply.made))

    def _start(self) -> _Process:
        ours, theirs = Pipe()
        fds = [theirs.fileno(), *(memory.fd for memory in (self._constant, self._state, *self._slots))]
        process = start_python("incofl.engine.processes", *fds, pass_fds=fds, stdin=subprocess.DEVNULL)
        theirs.close()
        with contextlib.suppress(OSError):  # it has died at once: noticed in _collect
            ours.send(self._setup)
        return _Process(process=process, connection=ours)


def start_python(module: str, *arguments: int, **options: Any) -> subprocess.Popen[bytes]:
    """A fresh interpreter that calls the function ``main`` of a module, and imports from where this one does."""
    command = [sys.executable, "-c", f"from {module} import main; main()", *map(str, arguments)]
    return subprocess.Popen(command, env=worker_environment(), **options)


def main() -> None:
    """A worker process: serves the parent whose pipe and shared memory the arguments name, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    pipe, *fds = map(int, sys.argv[1:])
    connection, (constant, state, *slots) = Connection(pipe), [SharedBytes(fd) for fd in fds]
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        setup = connection.recv()
        try:
            loop = WorkerLoop(constant.get(setup))
        except Exception:
            connection.send(RuntimeError(f"in a worker process, at its start:\n{traceback.format_exc()}"))
            return
        while True:
            task, published, memory = connection.recv()
            slot = slots[task.slot]
            try:
                reply = loop.do(task.job, state.get(published), slot.get(memory))
                message: Reply | Exception = dataclasses.replace(reply, made=slot.put(reply.made))
            except Exception:
                message = RuntimeError(f"in a worker process, {task.job}:\n{traceback.format_exc()}")
            connection.send(message)
