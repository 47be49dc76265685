"""The client models of a run, computed again, and the outputs of their layers.

A recorded server state and the seeds of the run determine a client's model after its local training: the same turn,
computed again, gives the same bits as in the run.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from incofl.analysis.runs import RecordedRun
from incofl.client import Upload
from incofl.data import Examples
from incofl.data.pipeline import eval_batches
from incofl.engine.checkpoint import load_checkpoint
from incofl.engine.federation import Federation, Job
from incofl.engine.store import ClientStore
from incofl.engine.worker import Worker, one_thread
from incofl.errors import RunError
from incofl.layout import Layout
from incofl.models.stacks import PADDING
from incofl.seeds import Purpose, numpy_rng
from incofl.server import Server
from incofl.split import Slice
from incofl.task import Score
from incofl.tensors import Inputs, call

BATCH = 100  # examples that go through a model at a time
CLIENTS, EXAMPLES = 0, 1  # numbers of the random streams that analyses draw from


@dataclass(frozen=True)
class Member:
    """A client and the level that it trains."""

    client: int
    level: int


def choose(federation: Federation, count: int) -> list[Member]:
    """Chooses all clients, or ``count`` evenly over the levels, drawn by the seed; none without examples."""
    everyone = [Member(client, federation.level_of(client)) for client in range(len(federation.levels))]
    rng, levels, chosen = numpy_rng(federation.seed, Purpose.ANALYSIS, CLIENTS), federation.levels_in_use, []
    for place, level in enumerate(levels):
        same = [member for member in everyone if member.level == level]
        wanted = len(same) if len(everyone) <= count else count // len(levels) + (place < count % len(levels))
        chosen += [same[at] for at in rng.choice(len(same), min(wanted, len(same)), replace=False)]
    held = [member for member in chosen if len(federation.partition[member.client])]
    return sorted(held, key=lambda member: (member.level, member.client))


class Replay:
    """Computes turns of clients again, from the recorded states of a run."""

    def __init__(self, run: RecordedRun) -> None:
        self.run, self.federation, self._worker = run, run.federation, Worker(run.federation)
        # What clients remember is on disk after the last round only, and before the first it is nothing.
        self.remembers = bool(self.federation.method.client.memory(run.layout))
        self.rounds = [at for at in run.recorded if not self.remembers or at in (0, run.recorded[-1])]

    def server(self, round: int | None) -> Server:
        """Returns the server after a recorded round (or the last); refuses one without its clients' memories."""
        server = self.run.server(round)
        if server.round not in self.rounds:
            kept = ", ".join(map(str, self.rounds))
            what = f"what clients of {self.run.method} remembered after round {round}"
            raise RunError(f"{self.run.path}: {what} is not on disk, expected one of the rounds {kept}")
        return server

    def train(self, server: Server, member: Member) -> Upload:
        """Computes the turn of a client in the round after a recorded one."""
        known = self.remembers and server.round
        memory = self._store.get(member.client, self.slice(server, member)) if known else {}
        return self._worker.train(server, self._job(server, member), memory)

    def model(self, server: Server, member: Member) -> nn.Module:
        """Returns a client's model after this turn, for evaluation; it is valid until the next turn is computed."""
        self.train(server, member)
        return self._worker.module(member.level, server.round).eval()

    def slice(self, server: Server, member: Member) -> Slice:
        """Returns what the client holds in this turn."""
        return self.federation.slice_of(self._job(server, member))

    def _job(self, server: Server, member: Member) -> Job:
        (job,) = self.federation.jobs([member.client], server.round, server)
        return dataclasses.replace(job, level=member.level)

    @torch.inference_mode()
    def answers(self, module: nn.Module, x: Inputs) -> Any:
        """Returns the output of a model for a batch, computed as in the run's evaluations."""
        with one_thread(), torch.compiler.set_stance("force_eager") if self.federation.compile else nullcontext():
            return call(module, self._worker.input(module, x))

    def outputs(self, module: nn.Module, blocks: Sequence[str], batch: Examples) -> tuple[list[Tensor], float]:
        """Returns the outputs of some blocks, a row for each example, and the first metric of the task."""
        parts, score, task = [], Score(), self.federation.task
        for x, y in eval_batches(batch, self.federation.data.pipeline, BATCH):
            text = isinstance(x, Tensor) and not x.is_floating_point() and y.dim() == 1
            with watched({block: module.get_submodule(block) for block in blocks}) as seen:
                score += task.score(self.answers(module, x), y.to(self.federation.device))
            if missing := [block for block in blocks if block not in seen]:
                raise RunError(f"{self.run.path}: block {missing[0]!r} of its model was not called: it has no output")
            parts.append([rows(seen[block], len(y), x != PADDING if text else None) for block in blocks])
        return [torch.cat(own) for own in zip(*parts, strict=True)], task.values(score)[task.first]

    @cached_property
    def _store(self) -> ClientStore:
        store = ClientStore(self.federation, self.run.folder.memories)
        store.manifest = load_checkpoint(self.run.folder.checkpoint, self.federation.start()).memories
        return store


def common_points(layout: Layout, slices: Sequence[Slice]) -> dict[str, list[str]]:
    """Returns by name where models can be compared: the block of each slice after which that is.

    These are the ends of stages, or the blocks of a model of one stage, of which every slice holds something.
    """
    points: dict[str, tuple[str, ...]] = {block: (block,) for block in layout.blocks}
    if len(layout.stages) > 1:
        points = {stage_name(stage, number): stage for number, stage in enumerate(layout.stages, start=1)}
    held = [{layout.block_of[name] for name in slice_.index} for slice_ in slices]
    blocks = {name: [[block for block in point if block in own] for own in held] for name, point in points.items()}
    return {name: [own[-1] for own in found] for name, found in blocks.items() if all(found)}


def stage_name(stage: tuple[str, ...], number: int) -> str:
    """Returns what the names of a stage's blocks have in common, or else its number."""
    words = zip(*(block.split(".") for block in stage), strict=False)
    same = [word[0] for word in itertools.takewhile(lambda word: len(set(word)) == 1, words)]
    return ".".join(same) or f"stage {number}"


@contextmanager
def watched(layers: Mapping[str, nn.Module], *, inputs: bool = False) -> Iterator[dict[str, Tensor]]:
    """Collects the output (or input) of each layer while it is open, in the order of their last calls."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor | tuple[Tensor, ...]) -> None:
        seen.pop(name, None)
        first = value[0] if isinstance(value, tuple) else value  # recurrent layers also return their states
        seen[name] = first.clone()  # later layers may write into it

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = layer.register_forward_hook(lambda _, given, output, n=name: keep(n, given if inputs else output))
            hooks.enter_context(hook)
        yield seen


def rows(output: Tensor, examples: int, held: Tensor | None = None) -> Tensor:
    """Returns the whole output of each example as a row; of a text the mean over its words, which ``held`` marks."""
    if output.shape[0] != examples:  # a model of (position, example, channel)
        output = output.movedim(list(output.shape).index(examples), 0)
    if held is not None and output.dim() == 3 and output.shape[1] == held.shape[1]:
        held = held.to(output.device).unsqueeze(2)
        return output.where(held, 0).sum(1) / held.sum(1).clamp(min=1)
    return output.flatten(1)
