"""What the engines of peers.py have in common: the federation, and its rounds with the clock running."""

import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass

from incofl.config import Config, make_config
from incofl.engine.executor import Executor
from incofl.engine.federation import Federation
from incofl.engine.round import RoundStats, run_round
from incofl.server import Server
from incofl.tensors import Tensors


@dataclass(frozen=True)
class Played:
    """A round that was played: the server after it, and how long it took."""

    server: Server
    seconds: float


# Plays so many rounds from a server on; the federation is that of the config.
Engine = Callable[[Config, Federation, Server, int], list[Played]]


def play(config: Config, federation: Federation, server: Server, rounds: int, executor: Executor) -> list[Played]:
    """Rounds of incofl with the clients' turns computed by any executor."""
    played = []
    for _ in range(rounds):
        start = time.perf_counter()
        jobs = federation.schedule(server.round, config.cohort_size)
        server = run_round(server, federation.method, jobs, executor, RoundStats())
        played.append(Played(server, time.perf_counter() - start))
    return played


def received_server(federation: Federation, received: Tensors) -> Server:
    """What a client received, for a worker to train on.

    Splitting by depth, the only kind here, holds a tensor whole or not at all: a slice is a server that lacks the rest.
    """
    return Server(federation.model.layout, received)


def read_config(toml: str) -> Config:
    """A config from the text that went to another process."""
    return make_config(tomllib.loads(toml))
