"""The federation of peers.py in Flower's simulation: one Ray actor per worker, slices and updates as array records."""

import functools
import time
from collections.abc import Iterator, Sequence

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from peer_rounds import Played, play, read_config, received_server

from incofl.client import Upload
from incofl.config import Config
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.federation import Federation, Job
from incofl.engine.worker import Worker
from incofl.server import Server

client_app = ClientApp()


@functools.cache
def _at_work(toml: str) -> tuple[Federation, Worker]:
    """The data and the modules: built once per actor, not once per message."""
    torch.set_num_threads(1)
    federation = build(read_config(toml))
    return federation, Worker(federation)


@client_app.train()
def turn(message: Message, context: Context) -> Message:
    """A client's turn. The message says which client a node is, so that nodes need not be asked."""
    order = message.content["order"]
    job = Job(int(order["client"]), int(order["level"]), int(order["round"]))
    federation, worker = _at_work(str(order["config"]))
    received = message.content["slice"].to_torch_state_dict()
    trained = worker.train(received_server(federation, received), job)
    reply = RecordDict(
        {
            "upload": ArrayRecord({**trained.update, **trained.buffers}),
            "metrics": MetricRecord({"client": job.client, "steps": trained.steps, "loss": trained.loss}),
        }
    )
    return Message(reply, reply_to=message)


class Flower(InProcess):
    """An executor that sends every job to a node of the grid."""

    def __init__(self, config: Config, federation: Federation, grid: Grid) -> None:
        self._config = config.to_toml()
        super().__init__(federation)
        self._grid = grid
        # The nodes register while the server app starts.
        while len(nodes := sorted(grid.get_node_ids())) < config.num_clients:
            time.sleep(0.1)
        self._nodes = nodes

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload]]:
        """The uploads in the order of the jobs; the replies come in any order."""
        replies = {}
        for reply in self._grid.send_and_receive([self._order(server, job) for job in jobs]):
            if reply.has_error():
                raise RuntimeError(f"flower: {reply.error.reason}")
            replies[int(reply.content["metrics"]["client"])] = reply.content
        for job in jobs:
            content = replies.pop(job.client)
            tensors, metrics = content["upload"].to_torch_state_dict(), content["metrics"]
            update = {name: value for name, value in tensors.items() if name in server.layout.parameters}
            buffers = {name: value for name, value in tensors.items() if name in server.layout.buffers}
            steps, loss = int(metrics["steps"]), float(metrics["loss"])
            upload = Upload(update=update, buffers=buffers, steps=steps, loss=loss)
            yield [self._federation.identified(upload, job)]

    def _order(self, server: Server, job: Job) -> Message:
        piece = self._federation.slice(job.level, job.round).take(server.state(job.level))
        order = {"client": job.client, "level": job.level, "round": job.round, "config": self._config}
        content = RecordDict({"slice": ArrayRecord(piece), "order": ConfigRecord(order)})
        return Message(content, dst_node_id=self._nodes[job.client], message_type=MessageType.TRAIN)


def run(config: Config, federation: Federation, server: Server, rounds: int) -> list[Played]:
    """Plays the rounds inside a server app; the start of Ray is outside of the clock."""
    played: list[Played] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        played.extend(play(config, federation, server, rounds, Flower(config, federation, grid)))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": config.engine.workers}}
    run_simulation(app, client_app, num_supernodes=config.num_clients, backend_config=resources)
    return played
