"""The client models of a run, computed again, and the outputs of their layers.

A client's model is the model of its level after the client's local training. Runs do not keep it, but a recorded server
state and the seeds of the run determine it: the same turn, computed again, gives the same bits as in the run.

A model of several stages (ResNet) is looked at after each stage, one of a single stage (ViT, LSTM) after each block,
both only where every client has something. An example's representation is the whole output there, flattened, as
Kornblith et al. do; of texts with padding it is the mean over the words, as their classifier sees them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from incofl.analysis.runs import RecordedRun
from incofl.client import Upload
from incofl.data.batches import eval_batches
from incofl.data.dataset import Examples
from incofl.engine.checkpoint import load_checkpoint
from incofl.engine.executor import make_store
from incofl.engine.federation import Federation, Job
from incofl.engine.store import ClientStore
from incofl.engine.worker import Worker, one_thread
from incofl.errors import RunError
from incofl.inputs import Inputs, call
from incofl.layout import Layout
from incofl.models.stacks import PADDING
from incofl.seeds import Purpose, numpy_rng
from incofl.server import Server
from incofl.split import Slice
from incofl.task import Score

BATCH = 100  # examples that go through a model at a time
CLIENTS, EXAMPLES = 0, 1  # numbers of the random streams that analyses draw from


@dataclass(frozen=True)
class Member:
    """A client and the level that it trains."""

    client: int
    level: int


def choose(federation: Federation, count: int) -> list[Member]:
    """Chooses all clients, or ``count`` evenly over the levels, drawn by the seed; none without examples."""
    members = [Member(client, federation.level_of(client)) for client in range(len(federation.levels))]
    if len(members) > count:
        rng = numpy_rng(federation.seed, Purpose.ANALYSIS, CLIENTS)
        chosen, levels = [], federation.levels_in_use
        for place, level in enumerate(levels):
            same = [member for member in members if member.level == level]
            wanted = count // len(levels) + (place < count % len(levels))
            chosen += [same[at] for at in rng.choice(len(same), min(wanted, len(same)), replace=False)]
        members = chosen
    held = [member for member in members if len(federation.partition[member.client])]
    return sorted(held, key=lambda member: (member.level, member.client))


class Replay:
    """Computes turns of clients again, from the recorded states of a run."""

    def __init__(self, run: RecordedRun) -> None:
        self._run, self.name, self.federation = run, str(run.path), run.federation
        self.remembers = remembers(run)
        self._worker = Worker(self.federation)

    @cached_property
    def rounds(self) -> list[int]:
        """The recorded rounds after which turns can be computed again."""
        last = self._run.recorded[-1]
        return [round for round in self._run.recorded if not self.remembers or round in (0, last)]

    def server(self, round: int | None) -> Server:
        """Returns the server after a recorded round (or the last); refuses one without its clients' memories."""
        server = self._run.server(round)
        if server.round not in self.rounds:
            raise RunError(
                f"{self.name}: what clients of {self._run.method} remembered after round {round} "
                f"is not on disk, expected one of the rounds {', '.join(map(str, self.rounds))}"
            )
        return server

    def train(self, server: Server, member: Member) -> Upload:
        """Computes the turn of a client in the round after a recorded one."""
        job = Job(member.client, member.level, server.round)
        memory = self._store(server).get(member.client, self.slice(server, member)) if self.remembers else {}
        return self._worker.train(server, job, memory)

    def model(self, server: Server, member: Member) -> nn.Module:
        """Returns a client's model after this turn, for evaluation; it is valid until the next turn is computed."""
        self.train(server, member)
        return self._worker.module(member.level, server.round).eval()

    def slice(self, server: Server, member: Member) -> Slice:
        """Returns what the client holds in this turn."""
        return self.federation.slice(member.level, server.round, member.client)

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
            held = x != PADDING if text else None
            with watched({block: module.get_submodule(block) for block in blocks}) as seen:
                score += task.score(self.answers(module, x), y.to(self.federation.device))
            if missing := [block for block in blocks if block not in seen]:
                raise RunError(f"{self.name}: block {missing[0]!r} of its model was not called, so it has no output")
            parts.append([rows(seen[block], len(y), held) for block in blocks])
        return [torch.cat(own) for own in zip(*parts, strict=True)], task.values(score)[task.first]

    def _store(self, server: Server) -> ClientStore:
        return self._last_store if server.round else make_store(self.federation)  # at first nobody has had a turn

    @cached_property
    def _last_store(self) -> ClientStore:
        store = make_store(self.federation, self._run.folder.memories)
        store.manifest = load_checkpoint(self._run.folder.checkpoint, self.federation.start()).memories
        return store


def remembers(run: RecordedRun) -> bool:
    """Returns whether clients of the method remember something, which only the last checkpoint has."""
    return bool(run.federation.method.client.memory(run.layout))


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
    parts = [block.split(".") for block in stage]
    same = [words[0] for words in itertools.takewhile(lambda w: len(set(w)) == 1, zip(*parts, strict=False))]
    return ".".join(same) or f"stage {number}"


@contextmanager
def watched(layers: Mapping[str, nn.Module], *, inputs: bool = False) -> Iterator[dict[str, Tensor]]:
    """Collects the output (or input) of each layer while it is open, in the order of their last calls."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor | tuple[Tensor, ...]) -> None:
        seen.pop(name, None)
        first = value[0] if isinstance(value, tuple) else value  # recurrent layers also return their states
        seen[name] = first.clone()  # later layers may write into it

    hooks = [
        layer.register_forward_hook(lambda _, given, output, name=name: keep(name, given if inputs else output))
        for name, layer in layers.items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def rows(output: Tensor, examples: int, held: Tensor | None = None) -> Tensor:
    """Returns one row for each example; ``held`` says which positions of a text are words."""
    if output.shape[0] != examples:  # a model of (position, example, channel)
        output = output.movedim(list(output.shape).index(examples), 0)
    if held is not None and output.dim() == 3 and output.shape[1] == held.shape[1]:
        held = held.to(output.device).unsqueeze(2)
        return output.where(held, 0).sum(1) / held.sum(1).clamp(min=1)
    return output.flatten(1)
