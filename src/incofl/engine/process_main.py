"""The program of a worker process."""

import contextlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import cloudpickle
import torch

from incofl.engine.memory import keep_freed_memory
from incofl.engine.shared_tensors import SharedTensors
from incofl.engine.worker_setup import Task, WorkerLoop


def main() -> None:
    """Serves the parent whose pipe and shared memory the arguments name, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    torch.set_num_threads(1)
    keep_freed_memory()
    pipe, *memory = (int(argument) for argument in sys.argv[1:])
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        _serve(Connection(pipe), *(SharedTensors(fd=fd) for fd in memory))


def _serve(connection: Connection, constant: SharedTensors, state: SharedTensors, uploads: SharedTensors) -> None:
    pickled = connection.recv_bytes()
    try:
        loop = WorkerLoop(cloudpickle.loads(pickled), constant)
    except Exception:
        connection.send(RuntimeError(f"in a worker process, at its start:\n{traceback.format_exc()}"))
        return
    while True:
        task: Task = connection.recv()
        try:
            reply = loop.do(task, state, uploads)
        except Exception:
            connection.send(RuntimeError(f"in a worker process, {task.job}:\n{traceback.format_exc()}"))
        else:
            connection.send(reply)
