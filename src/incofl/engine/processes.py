"""Worker processes on this machine: persistent, one torch thread each, weights and uploads through shared memory.

Workers are fresh interpreters, neither forks nor imports of the main script: a script needs no
``if __name__ == "__main__"``, and threads of the parent do no harm.
"""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

import cloudpickle

from incofl.client import Upload
from incofl.engine.federation import Federation
from incofl.engine.memory import worker_environment
from incofl.engine.pool import Died, Pool, WorkerHandle, num_slots
from incofl.engine.shared_tensors import SharedTensors
from incofl.engine.store import ClientStore
from incofl.engine.trace import Trace
from incofl.engine.worker_setup import Reply, Task, constant_tensors, make_setup
from incofl.tensors import Tensors


@dataclass(kw_only=True)
class _Process(WorkerHandle):
    """A worker process."""

    process: subprocess.Popen[bytes]
    connection: Connection


class WorkerProcesses(Pool[_Process]):
    """An executor of ``workers`` processes on this machine."""

    kind = "worker process"

    def __init__(
        self, federation: Federation, workers: int, trace: Trace | None = None, store: ClientStore | None = None
    ) -> None:
        super().__init__(federation, trace, store)
        self._setup, sizes = make_setup(federation, num_slots(workers))
        self._constant, state, self._uploads = (SharedTensors(size) for size in sizes)
        self._state, self._state_fd = state, state.fd
        for name, tensor in constant_tensors(federation).items():
            self._constant.view(self._setup.constant[name]).copy_(tensor)
        self._pickled = cloudpickle.dumps(self._setup)
        self._open(workers)

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        for worker in self._pool:
            worker.connection.close()
            worker.process.kill()
            worker.process.wait()
        self._pool = []

    def _slot(self, task: Task) -> Upload:
        return self._setup.slots[task.slot][task.job.level].views(self._uploads)

    def _send(self, worker: _Process, task: Task, memory: Tensors) -> None:
        for name, tensor in self._slot(task).memory.items() if memory else ():
            tensor.copy_(memory[name])
        with contextlib.suppress(OSError):  # it has died: its closed connection is noticed in _collect
            worker.connection.send(task)

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
        return reply

    def _start(self) -> _Process:
        ours, theirs = Pipe()
        fds = [theirs.fileno(), self._constant.fd, self._state_fd, self._uploads.fd]
        command = [sys.executable, "-c", "from incofl.engine.process_main import main; main()", *map(str, fds)]
        environment = worker_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        with contextlib.suppress(OSError):  # it has died at once: noticed in _collect
            ours.send_bytes(self._pickled)
        return _Process(process=process, connection=ours)
