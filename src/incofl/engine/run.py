"""A run: rounds, evaluation, records, a checkpoint after each round, and its resumption bit for bit."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from torch import nn

from incofl.config import AnyConfig, make_config
from incofl.data import Data, as_examples
from incofl.data.cache import digest
from incofl.engine.backend import Backend
from incofl.engine.build import attackers
from incofl.engine.checkpoint import (
    Checkpoint,
    checkpoint_memories,
    checkpoint_round,
    keep_previous,
    load_checkpoint,
    previous,
    save_checkpoint,
)
from incofl.engine.evaluation import attack_row, cannot_be_evaluated, evaluated
from incofl.engine.files import write_json
from incofl.engine.progress import Lines, Progress
from incofl.engine.result import Result
from incofl.engine.round import RoundStats, run_round
from incofl.engine.run_folder import Row, RunFolder, new_folder, summarise
from incofl.engine.trace import SERVER, Trace
from incofl.engine.trackers import make_trackers
from incofl.engine.under_attack import UnderAttack
from incofl.engine.worker import Worker, keep_freed_memory
from incofl.errors import ConfigError, RunError
from incofl.method import Method
from incofl.server import Server
from incofl.task import Task

AnyModel = Any  # a factory, an nn.Module, a pair of module and Layout, or a name


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
        resume: bool = False,
        progress: Progress | bool | None = None,
        backend: Backend | None = None,
        **objects: Any,
    ) -> None:
        self.config = make_config(config, **objects)
        self.folder = RunFolder(Path(out).expanduser() if out is not None else new_folder(self.config))
        self.rows: list[Row] = []
        default = Progress() if progress is False else Lines()
        self._progress = default if progress is None or isinstance(progress, bool) else progress
        self._receivers = [self._progress]
        self._backend = backend or Backend()
        self._stack = contextlib.ExitStack()
        self._open = False
        self._summary: dict[str, Any] = {}
        keep_freed_memory()
        self.folder.check(self.config, resume)
        self._receivers += make_trackers(self.config, self.folder.path)

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
        self._identity = {"config": config.digest(), "data": federation.data.fingerprint()}
        self._secret = federation.method.server.mean.has_secret
        has_partition = config.data.partition != "virtual" and len(
            federation.data.train
        )  # else it follows, or is not here
        if has_partition:
            self._identity["partition"] = digest({str(n): part for n, part in enumerate(federation.partition)})
        if not folder.config.exists():
            folder.save_config(config)  # first of all: whatever else is there, it can be resumed
        self.server: Server = federation.start()
        self._store = self._backend.memories(config, federation, folder.memories)
        if folder.checkpoint.exists():
            self.server = self._load_last_good()
        else:
            self._store.restore({})
            self.rows = folder.keep_rows(0)
        if self.server.round > config.rounds:
            least = f"expected at least {self.server.round}: so many are finished already"
            raise ConfigError(f"rounds: got {config.rounds}, {least}")
        folder.save_config(config)
        if has_partition:
            folder.save_partition(federation.partition)
        if self.server.round < config.rounds:
            folder.save_environment()
        for receiver in self._receivers:
            receiver.started(config, federation, self.rows)
            stack.callback(receiver.close)
        if self.server.round == 0 and config.record.keeps(0):
            save_checkpoint(folder.snapshot(0), self.server, self._identity, secret=self._secret)
        self._trace = Trace(on=config.engine.trace)
        stack.callback(self._finish)
        left = config.rounds - self.server.round
        self._executor = self._backend.executor(config, federation, left, self._trace)
        stack.callback(self._executor.close)
        self._attackers = attackers(config, federation)
        grouping = self._executor.grouping
        grouping.choices, grouping.say = folder.load_choices(), self._progress.noted
        if config.engine.vectorise == "auto":  # what was measured once holds for the whole run, also when it is resumed
            grouping.on_choice = lambda: folder.save_choices(grouping.choices)

    def _load_last_good(self) -> Server:
        """The server of the last checkpoint, or of the one before it if that, or its records, are damaged."""
        folder, path = self.folder, self.folder.checkpoint

        def load(path: Path) -> Checkpoint:
            found = load_checkpoint(path, self.server, self._identity)
            self.rows = folder.keep_rows(found.server.round)
            self._store.restore(found.memories, checkpoint_memories(previous(path)))
            return found

        try:
            return load(path).server
        except RunError as problem:
            try:
                found = load(previous(path))
            except RunError:
                hint = "restore the file from a copy, or start again in another folder"
                raise RunError(f"{problem}; {hint}") from None
            previous(path).replace(path)
            self._progress.noted(f"{problem}; continued from the checkpoint before it, round {found.server.round}")
            return found.server

    def _finish(self) -> None:
        """Writes the summary; an interruption may have come between a record and its checkpoint, or right after."""
        self.rows = self.folder.keep_rows(checkpoint_round(self.folder.checkpoint))
        status = "done" if len(self.rows) == self.config.rounds or self._stopped else "interrupted"
        task, levels = self.federation.task, self.federation.levels_in_use
        self._summary = summarise(self.rows, self.config.method, self.config.seed, task, levels, status)
        if self._stopped:
            self._summary["stopped"] = self._stopped
            self._progress.noted(f"stopped after round {self.server.round}: {self._stopped}")
        write_json(self.folder.summary, self._summary)
        if self._trace.on:
            self._trace.save(self.folder.trace)

    def __iter__(self) -> Iterator[Row]:
        """The row of each round, when it is done and saved."""
        opened_here = not self._open
        self.__enter__()
        try:
            while self.server.round < self.config.rounds and self._stopped is None:
                if (row := self._round()) is not None:
                    yield row
            self._check_accepted()
        finally:
            if opened_here:
                self.close()

    @property
    def _stopped(self) -> str | None:
        """Why there are no more rounds though the config has more."""
        if self.server.round >= self.config.rounds:
            return None
        return self.federation.method.server.mean.ended(self.server, self.config.cohort_size)

    def _check_accepted(self) -> None:
        """Refuses to call a run done in which no client was ever of use, or no round was kept."""
        rejected = [refusal for row in self.rows for refusal in row["rejected"]]
        reasons = [row["taken_back"] for row in self.rows if row.get("taken_back")]
        if rejected and len(rejected) == sum(len(row["clients"]) for row in self.rows):
            said, why = "nothing was accepted", rejected[-1]["reason"]
        elif reasons and len(reasons) == len(self.rows):
            said, why = "every round was taken back", reasons[-1]
        else:
            return
        what = f"{said} in {len(self.rows)} round(s), so nothing was trained; the last reason: {why}"
        raise RunError(f"{self.folder.path}: {what}")

    def _round(self) -> Row | None:
        """Makes a round and saves it; ``None`` if too few uploads came and it must be repeated."""
        config, trace, store = self.config, self._trace, self._store
        federation, among = self._backend.gather(self.federation, self.server.round)
        before = federation.after(self.rows[:-1]).top
        self.federation = federation = federation.after(self.rows)
        server = dataclasses.replace(federation.opened(self.server, before), population=federation.population)
        remembered = dict(store.manifest)
        stats = RoundStats(
            extra_of=functools.partial(federation.method.extra_for_client, server),
            sent=server.shared,
            on_upload=self._progress.uploaded,
            on_accepted=functools.partial(store.keep, server.round),
            validation=config.validation,
            confidential=federation.method.server.mean.confidential,
            trace=trace,
        )
        start = time.perf_counter()
        with trace.span("schedule"):
            jobs = federation.schedule(server.round, config.cohort_size, among, server)
        executor = self._executor
        if self._attackers:
            executor = UnderAttack(executor, config.attack, self._attackers, self.folder.path / "attack")
        server_before, advanced = server, run_round(server, federation.method, jobs, executor, stats)
        trace.add("mean, transforms", SERVER, stats.last_arrival, time.perf_counter())
        if not self._backend.suffices(server.round, stats):
            store.restore(remembered)
            return None
        evaluate = functools.partial(evaluated, config, federation, self._executor)
        server, row = evaluate(advanced, stats)
        if stats.taken_back is None and cannot_be_evaluated(row):
            back, row_before = evaluate(dataclasses.replace(server_before, round=advanced.round), stats)
            if not cannot_be_evaluated(row_before):  # else it was so before, and says nothing of this round
                server, row, stats.taken_back = back, row_before, "its test loss is not finite"
        if stats.taken_back is not None:
            row["taken_back"] = stats.taken_back
            store.restore(remembered)
        if config.attack.kind is not None:
            row["attack"] = attack_row(config.attack, self._attackers, federation, server, row)
        row |= self._backend.observed() | {"seconds": round(time.perf_counter() - start, 3)}
        with trace.span("records, checkpoint"):
            self.folder.append(row)
            if config.record.keeps(server.round):
                save_checkpoint(self.folder.snapshot(server.round), server, self._identity, secret=self._secret)
            keep_previous(self.folder.checkpoint)
            save_checkpoint(self.folder.checkpoint, server, self._identity, store.manifest, self._secret)
            store.saved()
        self.server = server
        self.rows.append(row)
        for receiver in self._receivers:
            receiver.finished_round(row)
        return row

    def evaluate(self, level: int = -1, data: Any = None) -> dict[str, float]:
        """All metrics of a level's sub-model on the test set, or on other data in a form that ``Data`` takes."""
        federation = self.federation
        examples = federation.data.test if data is None else as_examples(data, "data")
        score = Worker(federation).evaluate(self.server, federation.level_number(level), examples)
        return federation.task.values(score)

    def model(self, level: int = -1, exit: int | None = None) -> nn.Module:
        """The module of a level as it is now, ready for evaluation; ``exit`` is as in ``load_model``."""
        return self.federation.module(self.server, level, exit)

    def result(self) -> Result:
        """The result so far; complete when the run is closed."""
        return Result(self._summary, self)
