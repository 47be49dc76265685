"""The program of a worker process."""

import contextlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import cloudpickle
import torch

from incofl.engine.arena import Arena
from incofl.engine.memory import keep_freed_memory
from incofl.engine.plan import Station, Task


def main() -> None:
    """Serves the parent whose pipe and arenas the arguments name, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    torch.set_num_threads(1)
    keep_freed_memory()
    pipe, *arenas = (int(argument) for argument in sys.argv[1:])
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        _serve(Connection(pipe), *(Arena(fd=fd) for fd in arenas))


def _serve(connection: Connection, data: Arena, state: Arena, uploads: Arena) -> None:
    pickled = connection.recv_bytes()
    try:
        station = Station(cloudpickle.loads(pickled), data)
    except Exception:
        connection.send(RuntimeError(f"in a worker process, at its start:\n{traceback.format_exc()}"))
        return
    while True:
        task: Task = connection.recv()
        try:
            reply = station.do(task, state, uploads)
        except Exception:
            connection.send(RuntimeError(f"in a worker process, {task.job}:\n{traceback.format_exc()}"))
        else:
            connection.send(reply)
