"""Computes single turns: a client's training, or the evaluation of a level on a part of the test set.

The same code runs in this process and in worker processes, always with one torch thread: sums of floats depend on how
they are divided over threads, and a turn must give the same bits everywhere.
"""

import copy
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from incofl.anchor import SmallestPath
from incofl.client import Batch, ClientInput, LocalSettings, Trainee, Upload, train
from incofl.data import Examples
from incofl.data.pipeline import EVAL_BATCH, eval_batches, local_batches
from incofl.engine.best_path import in_halves
from incofl.engine.federation import Federation, Job
from incofl.engine.stacked_batches import Declined
from incofl.engine.vectorised import StackJob, Vectorised
from incofl.evaluate import evaluate, measure_buffers
from incofl.path import Path, image_format, within
from incofl.seeds import Purpose, seed_of, torch_rng
from incofl.server import Server
from incofl.split import Slice, submodel
from incofl.task import Score
from incofl.tensors import Inputs, Tensors, call, map_inputs
from incofl.tensors import one_thread as one_thread

MEASURED_BATCH = 500
EVAL_CHUNK = 2_000  # test examples of one evaluation job: small enough to spread, large enough to be worth a message


@dataclass(frozen=True)
class EvalJob:
    """The evaluation of a level on the test examples from ``start`` on."""

    level: int
    start: int

    def __str__(self) -> str:
        return f"evaluation, level {self.level}"


@dataclass(frozen=True)
class MeasureJob:
    """The measurement of a level's batch-norm statistics."""

    level: int

    def __str__(self) -> str:
        return f"statistics, level {self.level}"


AnyJob = Job | StackJob | EvalJob | MeasureJob


class Worker:
    """Computes turns. Sub-models are built once per level and used again."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._modules: dict[tuple[int, bool], nn.Module] = {}  # by level, and whether a client's slice is its own
        self._formats: dict[nn.Module, torch.memory_format] = {}
        self._trainees: dict[nn.Module, Trainee] = {}
        self._vectorised: dict[nn.Module, Vectorised | Declined] = {}
        self._sent: dict[int, tuple[Server, Slice, Tensors, Tensors]] = {}  # by level, what its last client received

    def do(self, server: Server, job: AnyJob, memory: Any = None) -> Sequence[Upload] | Upload | Score | Tensors:
        """Does a job: turns, with what each client remembers; an evaluation; a measurement."""
        match job:
            case Job():
                return self.train(server, job, memory)
            case StackJob(jobs):
                return self.train_stack(server, jobs, memory or [{}] * len(jobs))
            case EvalJob(level, start):
                self._sent.clear()  # the server of a round that is over
                examples = self._federation.data.test.pick(slice(start, start + EVAL_CHUNK))
                return self.evaluate(server, level, examples)
            case MeasureJob(level):
                return self.measure(server, level)

    def train(self, server: Server, job: Job, memory: Tensors | None = None) -> Upload:
        """One client's turn, with the slice of the server that it holds."""
        return self.turn(job, *self.sent(server, job), memory)

    def train_stack(self, server: Server, jobs: Sequence[Job], memories: Sequence[Tensors]) -> Sequence[Upload]:
        """The turns of clients of one level, side by side; one after the other if their batches do not allow it."""
        try:
            return self.vectorised(jobs[0]).train(jobs, *self.sent(server, jobs[0]), memories)
        except Declined:
            return [self.train(server, job, memory) for job, memory in zip(jobs, memories, strict=True)]

    def vectorised(self, job: Job) -> Vectorised:
        """The stacked training of a client's level.

        Raises:
            Declined: if its module cannot be stacked.
        """
        module = self.module(job.level, job.round, job.client)
        if module not in self._vectorised:
            try:
                self._vectorised[module] = Vectorised(module, self._federation)
            except Declined as problem:
                self._vectorised[module] = problem
        found = self._vectorised[module]
        if isinstance(found, Declined):
            raise found
        return found

    def sent(self, server: Server, job: Job) -> tuple[Tensors, Tensors]:
        """The model and what else a client receives, only to be read: the server does not change during a round."""
        slice_ = self._federation.slice_of(job)
        known = self._sent.get(job.level)
        if known is None or known[0] is not server or known[1] is not slice_:
            if known is not None and known[0] is not server:
                self._sent.clear()
            extra = self._federation.method.extra_for_client(server, job.level)
            known = server, slice_, slice_.look(server.state(job.level)), slice_.look(extra)
            self._sent[job.level] = known
        return known[2:]

    def turn(self, job: Job, state: Tensors, extra: Tensors, memory: Tensors | None = None) -> Upload:
        """One client's turn from what it received, in the coordinates of its slice."""
        f = self._federation
        labels = f.labels(job.client)
        given = ClientInput(
            state=self._on_device(state),
            extra=self._on_device(extra),
            memory=self._on_device(memory or {}),
            labels=labels if labels is None or f.device == "cpu" else labels.to(f.device),
            round=job.round,
        )
        rng = torch_rng(f.seed, Purpose.TRAINING, job.round, job.client)
        module = self.module(job.level, job.round, job.client)
        smallest = self._smallest(job)

        def batches(settings: LocalSettings) -> Iterator[Batch]:
            for x, y in local_batches(f.data.train, f.partition[job.client], f.data.pipeline, settings, rng):
                yield self.input(module, x), y.to(f.device)

        beyond = f.method.anchor.epochs(0, job.level)
        further = batches(replace(f.local, epochs=beyond)) if beyond else ()
        randomness = own_randomness(seed_of(f.seed, Purpose.LAYERS, job.round, job.client), f.device)
        watching = nullcontext() if smallest is None else smallest.watch(module)
        with one_thread(), randomness, watching:
            upload = train(
                self.trainee(module),
                given,
                batches(f.local),
                f.method.client,
                f.local,
                f.task,
                smallest,
                f.computing,
                further,
            )
        return f.identified(upload, job)

    def _smallest(self, job: Job) -> SmallestPath | None:
        """The smallest path in the model of a larger level, if the method trains it."""
        f, layout = self._federation, self._federation.model.layout
        if not f.method.anchor.on or job.level == 0:
            return None
        small, large = (f.slice(level, job.round, job.client) for level in (0, job.level))
        names = small.index.keys() & (layout.parameters | layout.frozen | layout.given)
        index = {name: within(small.index[name], large.index[name], layout.shapes[name]) for name in names}
        module = self.module(0, job.round)
        return SmallestPath(f.method.anchor, Path(module, Slice(index, small.shapes), self._formats[module]))

    def evaluate(self, server: Server, level: int, examples: Examples) -> Score:
        """The score of a level's sub-model on some examples, those of unseen clients under names of their own."""
        f = self._federation
        state = f.current_slice(level, server).look(server.state(level))

        def score(part: Examples) -> Score:
            return self.score(level, server.round, state, part)

        parts = f.data.seen_and_unseen(examples)
        seen = in_halves(*map(score, f.data.halves(parts.pop("")))) if f.best_path else score(parts.pop(""))
        return sum((score(part).renamed(name) for name, part in parts.items()), seen)

    def score(self, level: int, round: int, state: Tensors, examples: Examples, size: int = EVAL_BATCH) -> Score:
        """The score of a sub-model with some values on some examples, in batches of a size."""
        f, state = self._federation, self._on_device(state)
        module = self.module(level, round)
        batches = ((self.input(module, x), y.to(f.device)) for x, y in eval_batches(examples, f.data.pipeline, size))
        # Compiling for another mode and batch size would take longer than an evaluation.
        with one_thread(), torch.compiler.set_stance("force_eager") if f.compile else nullcontext():
            return evaluate(module, state, batches, f.task, f.computing)

    def measure(self, server: Server, level: int) -> Tensors:
        """Batch-norm statistics of a level's sub-model on a fixed sample of the training images."""
        f = self._federation
        state = self._on_device(f.current_slice(level, server).look(server.state(level)))
        images = f.data.train
        chosen = torch.randperm(len(images), generator=torch_rng(f.seed, Purpose.MEASURING, 0))[: f.measured]
        parts = chosen.tensor_split(-(-len(chosen) // MEASURED_BATCH))  # of equal weight, so of equal size
        module = self.module(level, server.round)
        batches = (self.input(module, f.data.pipeline.test(images.pick(part).x)) for part in parts)
        with one_thread(), torch.compiler.set_stance("force_eager") if f.compile else nullcontext():
            return measure_buffers(module, state, batches, f.computing)

    def module(self, level: int, round: int, client: int | None = None) -> nn.Module:
        """The sub-model of a level, with the values of its last use; without a client, the one that is evaluated."""
        f = self._federation
        if (key := (level, client is not None and f.splitter.by_client)) not in self._modules:
            module = submodel(f.model.template, f.model.layout, f.slice(level, round, client)).to(f.device)
            format = image_format(module)
            if format == torch.channels_last and not computes_channels_last(module, f.model.example(2)):
                format = torch.contiguous_format
            self._modules[key] = module.to(memory_format=format)  # type: ignore[call-overload]  # not among its typed forms
            self._formats[module] = format
            f.method.client.prepare(module, f.model.layout)
            f.method.client.nest(module, f.model.layout, f.splitter, level)
            if f.compile:
                module.compile()  # happens at the first batch
        return self._modules[key]

    def trainee(self, module: nn.Module) -> Trainee:
        """A module ready for its next turn."""
        if module not in self._trainees:
            self._trainees[module] = Trainee(module)
        return self._trainees[module]

    def input(self, module: nn.Module, x: Inputs) -> Inputs:
        """A batch on the device and in the memory format in which a module computes."""

        def moved(tensor: Tensor) -> Tensor:
            image = tensor.dim() == 4 and tensor.is_floating_point()
            format = self._formats[module] if image else torch.contiguous_format
            return tensor.to(self._federation.device, memory_format=format)

        return map_inputs(moved, x)

    def _on_device(self, state: Tensors) -> Tensors:
        device = self._federation.device
        return state if device == "cpu" else {name: value.to(device) for name, value in state.items()}


def computes_channels_last(module: nn.Module, example: Inputs) -> bool:
    """Whether a module can train and evaluate channels-last; one that uses ``x.view(len(x), -1)`` cannot."""
    trial = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as above
    for parameter in trial.parameters():
        nn.init.constant_(parameter, 0.01)  # the same in every process
    first = next(trial.parameters())

    def zeros(like: Tensor) -> Tensor:
        x = torch.zeros(like.shape, device=first.device, dtype=first.dtype if like.is_floating_point() else like.dtype)
        return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x

    x = map_inputs(zeros, example)
    try:
        with one_thread(), own_randomness(0):
            outputs = [out for out in tree_leaves(call(trial.train(), x)) if isinstance(out, Tensor)]
            torch.stack([out.sum() for out in outputs if out.requires_grad]).sum().backward()  # type: ignore[no-untyped-call]
            with torch.inference_mode():
                call(trial.eval(), x)
    except Exception:  # whatever a user's module may raise; if it is another problem, training will say so
        return False
    return True


@contextmanager
def own_randomness(seed: int, device: str = "cpu") -> Iterator[None]:
    """Inside, layers that draw random numbers (dropout) draw those of a seed; outside, on a CPU, nothing changes."""
    before = torch.default_generator.get_state()
    try:
        (torch.default_generator.manual_seed if device == "cpu" else torch.manual_seed)(seed)
        yield
    finally:
        torch.default_generator.set_state(before)


def keep_freed_memory() -> None:
    """Keeps freed memory of this process for the next allocation of its size, where the C library is glibc.

    By default large blocks are returned to the system. Every training step and every round allocates the same ones
    again, and the system must find and clear each of their pages anew: about a tenth of a training step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def return_freed_memory() -> None:
    """Returns freed blocks of 64 KiB and more to the system, where the C library is glibc: for small devices.

    By default glibc soon keeps them, and what lies between them, so that a turn can take twice the memory that is used.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 2**16)  # M_MMAP_THRESHOLD


def worker_environment() -> dict[str, str]:
    """The environment of a process that computes with one thread, in large pages where the system has them."""
    tunables = [os.environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb=1"]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": ":".join(filter(None, tunables)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
