"""The federation of peers.py as much research code runs it: a new process for every client's turn, weights in files."""

import functools
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from peer_rounds import Played, play, read_config, received_server

from incofl.client import Upload
from incofl.config import Config
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.federation import Federation, Job
from incofl.engine.worker import Worker
from incofl.server import Server


def _turn(toml: str, job: Job, received: Path, result: Path) -> None:
    """The whole life of a client's process: it reads the data set and the weights, builds its model, and trains."""
    torch.set_num_threads(1)
    federation = build(read_config(toml))
    server = received_server(federation, torch.load(received))
    trained = Worker(federation).train(server, job)
    kept = ("update", "buffers", "steps", "loss")  # the server knows the rest
    torch.save({name: getattr(trained, name) for name in kept}, result)


class ProcessPerClient(InProcess):
    """An executor that starts a fresh interpreter for every job, as many at a time as there are workers."""

    def __init__(self, config: Config, federation: Federation) -> None:
        assert isinstance(config.engine.workers, int)
        self._config = config
        self._workers = config.engine.workers
        super().__init__(federation)

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
        """The uploads in the order of the jobs."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(self._workers) as pool:
            for upload in pool.map(functools.partial(self._start, server, Path(folder)), jobs):
                yield [upload]

    def _start(self, server: Server, folder: Path, job: Job) -> Upload:
        received, result = folder / f"{job.client}-received.pt", folder / f"{job.client}-result.pt"
        torch.save(self._federation.slice(job.level, job.round).take(server.state(job.level)), received)
        arguments = (self._config.to_toml(), job, received, result)
        process = multiprocessing.get_context("spawn").Process(target=_turn, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"process-per-client: {job} ended with exit code {process.exitcode}")
        return self._federation.identified(Upload(**torch.load(result)), job)


def run(config: Config, federation: Federation, server: Server, rounds: int) -> list[Played]:
    """Plays the rounds."""
    return play(config, federation, server, rounds, ProcessPerClient(config, federation))
