"""A run: rounds, evaluation, records, a checkpoint after each round, and its resumption bit for bit."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import nn

from incofl.config import Config, load_config, make_config
from incofl.data import Data, as_examples
from incofl.engine.backend import Backend, LocalBackend
from incofl.engine.checkpoint import Identity, checkpoint_round, load_checkpoint, save_checkpoint, write_json
from incofl.engine.executor import Executor
from incofl.engine.load import level_number, trained_module
from incofl.engine.memory import keep_freed_memory
from incofl.engine.progress import Lines, Progress, Silent
from incofl.engine.round import RoundStats, run_round
from incofl.engine.run_folder import Row, RunFolder, new_folder, summarise
from incofl.engine.tensorboard import TensorBoard, check_tensorboard
from incofl.engine.trace import SERVER, Trace
from incofl.engine.worker import Worker
from incofl.errors import ConfigError
from incofl.method import Method
from incofl.server import Server
from incofl.split.growth import OPEN
from incofl.task import Task

AnyConfig = Config | Mapping[str, Any] | str | Path | None
AnyModel = Any  # a factory, an nn.Module, a pair of module and Layout, or a name


class Result(dict[str, Any]):
    """The result of a run: the keys and values of ``summary.json``.

    ``history`` has the rows of ``metrics.jsonl``, one for each round, and ``folder`` is the run folder.
    """

    def __init__(self, summary: Mapping[str, Any], run: "Run") -> None:
        super().__init__(summary)
        self.history, self.folder, self._run = run.rows, run.folder.path, run

    def model(self, level: int = -1) -> nn.Module:
        """The trained module of a level, ready for evaluation; -1 is the largest."""
        return self._run.model(level)


def run(
    config: AnyConfig = None,
    out: str | Path | None = None,
    *,
    model: AnyModel = None,
    data: Data | str | None = None,
    method: Method | str | None = None,
    task: Task | str | None = None,
    resume: bool = False,
    progress: Progress | bool | None = None,
    backend: Backend | None = None,
) -> Result:
    """Trains a federation and returns its result.

    Args:
        config: a ``Config``, values as in a TOML file, the name of a preset, or the path of a file.
        out: the run folder; left out, a new one under ``runs``.
        model: a factory, an ``nn.Module``, or a pair of a module and its ``Layout``; replaces what the config says.
        data: your own ``Data``; replaces what the config says.
        method: a ``Method`` or its name; replaces what the config says.
        task: a ``Task`` or its name; replaces what the config says.
        resume: continue the run in that folder from its last finished round, if there is one.
        progress: receives an event for every client and round; left out, a line is printed for every round, and with
            ``False`` nothing.
        backend: where the clients are; left out, on this machine.

    Raises:
        KeyboardInterrupt: when the run is interrupted; every finished round is saved and the summary written.
    """
    objects = {"model": model, "data": data, "method": method, "task": task}
    with Run(config, out, **objects, resume=resume, progress=progress, backend=backend) as running:
        for _ in running:
            pass
    return running.result()


class Run:
    """A run, round by round: a context manager and an iterator that gives the row of each finished round.

    Leaving the loop stops cleanly with everything saved; ``resume=True`` continues later, bit for bit. The arguments
    are those of ``run``.
    """

    def __init__(
        self,
        config: AnyConfig = None,
        out: str | Path | None = None,
        *,
        model: AnyModel = None,
        data: Data | str | None = None,
        method: Method | str | None = None,
        task: Task | str | None = None,
        resume: bool = False,
        progress: Progress | bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.config = _as_config(config, model=model, data=data, method=method, task=task)
        self.folder = RunFolder(Path(out).expanduser() if out is not None else new_folder(self.config))
        self.rows: list[Row] = []
        default = Silent() if progress is False else Lines()
        self._progress: Progress = default if progress is None or isinstance(progress, bool) else progress
        self._backend = backend or LocalBackend()
        self._stack = contextlib.ExitStack()
        self._open = False
        self._summary: dict[str, Any] = {}
        keep_freed_memory()
        self.folder.check(self.config, resume)
        if self.config.record.tensorboard:
            check_tensorboard()

    def __enter__(self) -> Self:
        if not self._open:
            self.federation = self._backend.build(self.config, self.folder)
            self._open = True
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.folder.locked())
                self._start(stack)
                self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the workers and writes the summary; every finished round is saved already."""
        self._stack.close()
        self._open = False

    def _start(self, stack: contextlib.ExitStack) -> None:
        config, folder, federation = self.config, self.folder, self.federation
        self._identity = Identity(config.digest(), federation.data.fingerprint())
        self.server: Server = federation.start()
        self._store = self._backend.memories(config, federation, folder.memories)
        memories: dict[int, tuple[int, int]] = {}
        if folder.checkpoint.exists():
            checkpoint = load_checkpoint(folder.checkpoint, self.server, self._identity)
            self.server, memories = checkpoint.server, checkpoint.memories
        self._store.restore(memories)
        if self.server.round > config.rounds:
            raise ConfigError(
                f"rounds: got {config.rounds}, expected at least {self.server.round}: so many are finished already"
            )
        self.rows = folder.keep_rows(self.server.round)
        folder.save_config(config)
        if config.data.partition != "virtual" and len(federation.data.train):  # else it follows, or is not here
            folder.save_partition(federation.partition)
        if self.server.round < config.rounds:
            folder.save_environment()
        self._progress.started(config, federation, self.rows)
        if self.server.round == 0 and config.record.keeps(0):
            save_checkpoint(folder.snapshot(0), self.server, self._identity)
        self._trace = Trace(on=config.engine.trace)
        stack.callback(self._finish)
        self._board = TensorBoard(folder.tensorboard, federation.levels_in_use, self.rows, on=config.record.tensorboard)
        stack.callback(self._board.close)
        left = config.rounds - self.server.round
        self._executor: Executor = self._backend.executor(config, federation, left, self._trace, self._store)
        stack.callback(self._executor.close)

    def _finish(self) -> None:
        """Writes the summary; an interruption may have come between a record and its checkpoint, or right after."""
        self.rows = self.folder.keep_rows(checkpoint_round(self.folder.checkpoint))
        status = "done" if len(self.rows) == self.config.rounds else "interrupted"
        task, levels = self.federation.task, self.federation.levels_in_use
        self._summary = summarise(self.rows, self.config.method, self.config.seed, task, levels, status)
        write_json(self.folder.summary, self._summary)
        if self._trace.on:
            self._trace.save(self.folder.trace)

    def __iter__(self) -> Iterator[Row]:
        """The row of each round, when it is done and saved."""
        opened_here = not self._open
        self.__enter__()
        try:
            while self.server.round < self.config.rounds:
                if (row := self._round()) is not None:
                    yield row
        finally:
            if opened_here:
                self.close()

    def _round(self) -> Row | None:
        """Makes a round and saves it; ``None`` if too few uploads came and it must be repeated."""
        config, trace, store = self.config, self._trace, self._store
        federation, among = self._backend.gather(self.federation, self.server.round)
        before = federation.after(self.rows[:-1]).top
        self.federation = federation = federation.after(self.rows)
        server = dataclasses.replace(federation.opened(self.server, before), population=federation.population)
        remembered = dict(store.manifest)
        stats = RoundStats(
            extra_of=functools.partial(federation.method.server.extra_for_client, server),
            on_upload=self._progress.uploaded,
            on_accepted=store.keeper(server.round),
            trace=trace,
        )
        start = time.perf_counter()
        with trace.span("schedule"):
            jobs = federation.schedule(server.round, config.cohort_size, among)
        advanced = run_round(server, federation.method, jobs, self._executor, stats)
        trace.add("mean, transforms", SERVER, stats.last_arrival, time.perf_counter())
        if not self._backend.suffices(server.round, stats):
            store.restore(remembered)
            return None
        server, row = self._evaluated(advanced, stats)
        row |= self._backend.observed() | {"seconds": round(time.perf_counter() - start, 3)}
        with trace.span("records, checkpoint"):
            self.folder.append(row)
            if config.record.keeps(server.round):
                save_checkpoint(self.folder.snapshot(server.round), server, self._identity)
            save_checkpoint(self.folder.checkpoint, server, self._identity, store.manifest)
            store.saved()
        self.server = server
        self.rows.append(row)
        self._board.add(row)
        self._progress.finished_round(row)
        return row

    def _evaluated(self, server: Server, stats: RoundStats) -> tuple[Server, Row]:
        """The server after a round, with measured statistics where the method wants them, and the row of the round."""
        config, federation, task = self.config, self.federation, self.federation.task
        values: list[dict[str, float]] = []
        due = server.round % config.eval.every == 0 or server.round == config.rounds
        if due and len(federation.data.test):
            trained = [federation.trained_as(level) for level in federation.levels_in_use]
            distinct = sorted(set(trained))
            if federation.method.server.buffers == "static" and server.layout.buffers:
                server = server.measured(self._executor.measure(server, distinct))
            scores = dict(zip(distinct, self._executor.evaluate(server, distinct), strict=True))
            values = [task.values(scores[level]) for level in trained]
        by_metric = {name: [_finite(level[name]) for level in values] for name in task.all_metrics} if values else {}
        others = {name: by for name, by in by_metric.items() if name not in (task.first, "loss")}
        row: Row = {
            "round": server.round,
            "accuracy": _mean(by_metric.get(task.first)),
            "accuracy_by_level": by_metric.get(task.first),
            **({"metrics": others} if others else {}),
            "loss": _finite(stats.loss),
            "test_loss": _mean(by_metric.get("loss")),
            "clients": sorted(stats.clients),
            "rejected": stats.rejected,
            "bytes_up": stats.bytes_up,
            "bytes_down": stats.bytes_down,
            "seconds": 0.0,  # known when all is done
            **({} if federation.top is None else {OPEN: federation.top}),
            **{name: record for name, record in stats.records.items() if record},
        }
        return server, row

    def evaluate(self, level: int = -1, data: Any = None) -> dict[str, float]:
        """All metrics of a level's sub-model on the test set, or on other data in a form that ``Data`` takes."""
        federation = self.federation
        examples = federation.data.test if data is None else as_examples(data, "data")
        level = level_number(level, federation.splitter)
        state = federation.current_slice(level, self.server).look(self.server.state(level))
        return federation.task.values(Worker(federation).score(level, max(self.server.round - 1, 0), state, examples))

    def model(self, level: int = -1) -> nn.Module:
        """The module of a level as it is now, ready for evaluation; -1 is the largest."""
        return trained_module(self.federation, self.server, level)

    def result(self) -> Result:
        """The result so far; complete when the run is closed."""
        return Result(self._summary, self)


def _as_config(config: AnyConfig, **objects: Any) -> Config:
    if isinstance(config, Config):  # one that was put together by hand is checked here
        return make_config(
            config.to_dict(), **{**config.objects, **{k: v for k, v in objects.items() if v is not None}}
        )
    if isinstance(config, Mapping):
        return make_config(config, **objects)
    return load_config(config, **objects)


def _mean(values: list[float | None] | None) -> float | None:
    known = [value for value in values or [] if value is not None]
    return _finite(float(np.mean(known))) if known else None


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: what is none is null."""
    return value if value is not None and math.isfinite(value) else None
