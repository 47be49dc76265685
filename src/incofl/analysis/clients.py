"""The client models of a run, computed again.

A client's model is the model of its level after the client's local training. Runs do not keep it, but a recorded server
state and the seeds of the run determine it: the same turn, computed again, gives the same bits as in the run.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from incofl.analysis.runs import Run
from incofl.client import Upload
from incofl.engine.checkpoint import load_checkpoint
from incofl.engine.executor import make_store
from incofl.engine.federation import Federation, Job
from incofl.engine.store import ClientStore
from incofl.engine.worker import Worker, one_thread
from incofl.errors import RunError
from incofl.seeds import Purpose, numpy_rng
from incofl.server import Server
from incofl.split import Slice


@dataclass(frozen=True)
class Member:
    """A client, and the level that it trains."""

    client: int
    level: int


def choose(federation: Federation, count: int) -> list[Member]:
    """All clients if they are at most ``count``; otherwise so many, evenly over the levels, drawn by the seed."""
    total = len(federation.levels)
    if total <= count:
        chosen = [Member(client, federation.level_of(client)) for client in range(total)]
    else:
        rng = numpy_rng(federation.seed, Purpose.ANALYSIS, CLIENTS)
        levels = federation.levels_in_use
        chosen, first = [], 0
        for place, level in enumerate(levels):
            size = federation.clients_by_level[level]  # clients of a level are neighbours
            wanted = count // len(levels) + (place < count % len(levels))
            drawn = rng.choice(size, min(wanted, size), replace=False)
            chosen += [Member(first + int(client), level) for client in drawn]
            first += size
    return sorted(
        (member for member in chosen if len(federation.partition[member.client])),
        key=lambda member: (member.level, member.client),
    )


CLIENTS, EXAMPLES = 0, 1  # the numbers of the streams that analyses draw from


class Replay:
    """Computes turns of clients again, from the recorded states of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.federation = run.federation
        self._worker = Worker(self.federation)

    @property
    def name(self) -> str:
        """Of its run, for messages."""
        return str(self._run.folder.path)

    @cached_property
    def remembers(self) -> bool:
        """Whether clients of the method remember something, which only the last checkpoint has."""
        return bool(self.federation.method.client.memory(self._run.layout))

    @cached_property
    def rounds(self) -> list[int]:
        """The recorded rounds after which turns can be computed again."""
        last = self._run.recorded[-1]
        return [round for round in self._run.recorded if not self.remembers or round in (0, last)]

    def server(self, round: int) -> Server:
        """The server after so many rounds; refuses those from which turns cannot be computed again."""
        server = self._run.server(round)
        if round not in self.rounds:
            raise RunError(
                f"{self.name}: what clients of {self._run.config.method} remembered after round {round} "
                f"is not on disk, expected one of the rounds {', '.join(map(str, self.rounds))}"
            )
        return server

    def train(self, server: Server, member: Member) -> Upload:
        """The turn of a client in the round after a recorded one."""
        job = Job(member.client, member.level, server.round)
        memory = self._store(server).get(member.client, self.slice(server, member)) if self.remembers else {}
        return self._worker.train(server, job, memory)

    def model(self, server: Server, member: Member) -> nn.Module:
        """The model of a client after this turn, for evaluation; valid until the next turn is computed."""
        self.train(server, member)
        return self._worker.module(member.level, server.round).eval()

    def slice(self, server: Server, member: Member) -> Slice:
        """What the client holds in this turn."""
        return self.federation.slice(member.level, server.round)

    @torch.inference_mode()
    def logits(self, module: nn.Module, x: Tensor) -> Tensor:
        """What a model makes of a batch, computed as in the run's evaluations."""
        with one_thread(), torch.compiler.set_stance("force_eager") if self.federation.compile else nullcontext():
            logits: Tensor = module(self._worker.input(module, x))
        return logits

    def _store(self, server: Server) -> ClientStore:
        if server.round == 0:
            return make_store(self.federation)  # nobody has had a turn
        return self._last_store

    @cached_property
    def _last_store(self) -> ClientStore:
        store = make_store(self.federation, self._run.folder.memories)
        store.manifest = load_checkpoint(self._run.folder.checkpoint, self.federation.start()).memories
        return store
