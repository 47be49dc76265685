"""Paired comparisons: several methods under the same seeds, and what can be said about their differences.

Runs of one seed share everything but the method: partition, cohorts and initial weights follow from the seed.
"""

import csv
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from subprocess import DEVNULL, Popen
from typing import Any

import cloudpickle
import torch

from incofl.analysis.runs import RecordedRun
from incofl.config import AnyConfig, Config, find_parts, make_config
from incofl.config.resolve import GIVEN
from incofl.data import Data
from incofl.engine.best_path import BEST
from incofl.engine.build import outline
from incofl.engine.files import write_json
from incofl.engine.processes import start_python
from incofl.engine.progress import Lines, Progress
from incofl.engine.run import AnyModel, run
from incofl.errors import ConfigError, IncoflError, RunError
from incofl.method import Method
from incofl.statistics import Difference, Estimate, estimate, paired, plus_minus, tail, tail_name
from incofl.studies.gains import DEVICES, GAP, Evaluation, Setting, answer, evaluations, gain_table, settings
from incofl.task import Task

CURVE = ("round", "accuracy", "accuracy_by_level", "loss", "test_loss")  # what comparison.json keeps of an evaluation
CAPTION = (
    "mean ± half width of the 95 % interval over the seeds (Student's t); "
    "visible from: the smallest true difference that these seeds find with 80 % power"
)
Arm = tuple[str, int]  # a run of a comparison: its name, such as the method, and its seed
Watch = Callable[[Arm], Progress]  # of an arm that begins; with several jobs, of one that is finished


@dataclass(frozen=True)
class MethodResult:
    """What the runs of one method achieved."""

    method: str
    metric: str  # the first of the task
    percent: bool  # whether the metric is shown in percent
    measure: str  # the evaluations by which it is judged, such as ``mean of rounds 41-50``
    last: Estimate  # the metric after the last round, averaged over the levels
    tail: Estimate  # the metric by that measure
    by_level: dict[int, Estimate]  # the same for each level that some client trains
    seeds: list[float]  # ``tail`` of each seed
    difference: Difference | None = None  # of ``tail`` to the first method, paired by seed


class Comparison(list[MethodResult]):
    """The result of each method, and what each level of devices gets from it, where there are baselines among them."""

    setting: Setting | None = None
    baselines: Sequence[str] = ()
    called: Callable[[int], str] = "level {}".format  # the devices of a level

    @property
    def gains(self) -> list[list[str]]:
        """A table, headings first, of what each method gains over the best baseline; empty without baselines."""
        return gain_table(self.setting, self.baselines) if self.setting else []

    @property
    def best_path(self) -> bool:
        """Whether devices use the best of the models that they hold."""
        return self.setting is not None and self.setting.metric.endswith(BEST)

    @property
    def how(self) -> str:
        """Which of its models a device uses, as the end of a title."""
        return ", each device with the best model that it holds" if self.best_path else ""

    @property
    def answer(self) -> str:
        """Which method to use, and how sure that is, in words."""
        return answer(self.setting, self.baselines) if self.setting else ""


def compare(
    methods: Sequence[Method | str],
    config: AnyConfig = None,
    out: str | Path = "runs/comparison",
    *,
    seeds: int | Sequence[int] = 3,
    jobs: int = 1,
    model: AnyModel = None,
    data: Data | str | None = None,
    task: Task | str | None = None,
    overrides: Sequence[str] = (),
    progress: Watch | bool | None = None,
) -> Comparison:
    """Runs several methods under the same seeds and compares them; called again, it continues where it was interrupted.

    Args:
        methods: methods or their names; the others are compared to the first.
        config: as for ``run``; it should leave out what the methods choose for themselves, such as ``split.kind``.
        out: the folder for a run folder of each method and seed, and for the tables: Markdown, CSV and JSON.
        seeds: a number of seeds, which are then 0, 1, ..., or the seeds.
        jobs: number of runs at a time, each in a process of its own with one worker.
        model: as for ``run``.
        data: as for ``run``.
        task: as for ``run``.
        overrides: more values for the config, each as after ``--set``.
        progress: is called with the method and the seed of each run for the receiver of its events; left out, a line
            is printed for every round, and with ``False`` nothing.
    """
    arms: dict[Arm, Config] = {}
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        for method in methods:
            objects = {"model": model, "data": data, "method": method, "task": task}
            chosen = make_config(config, [*overrides, f"seed={seed}"], also=methods, **objects)
            name = chosen.method.removeprefix(GIVEN)
            if arms.setdefault((name, seed), chosen).objects.get("method") != chosen.objects.get("method"):
                raise ConfigError(
                    f"methods: got two called {name!r}, expected a name for each: replace(method, name=...)"
                )
    if not arms:
        raise ConfigError(f"compare: got methods {methods!r} and seeds {seeds!r}, expected at least one of each")
    if any(chosen.eval.best_path for chosen in arms.values()):  # then all are judged by it
        arms = {arm: replace(chosen, eval=replace(chosen.eval, best_path=True)) for arm, chosen in arms.items()}
    default = Progress() if progress is False else Lines()
    folder = Path(out).expanduser()
    run_arms(arms, folder, jobs, progress if callable(progress) else lambda arm: default)
    runs = {arm: RecordedRun(folder_of(folder, arm), config.objects) for arm, config in arms.items()}
    results = Comparison(summarise(runs))
    results.setting, results.baselines = levels_of_devices(runs)
    results.called = next(iter(runs.values())).called
    document = {
        "seeds": list(dict.fromkeys(seed for _, seed in arms)),
        "caption": CAPTION,
        "answer": results.answer,
        "results": list(map(asdict, results)),
        "configs": {method: config.to_dict() for (method, _), config in list(arms.items())[::-1]},
        "curves": [
            {"method": method, "seed": seed, "rows": [{key: row[key] for key in CURVE} for row in run.evaluated]}
            for (method, seed), run in runs.items()
        ],
        "environment": next(iter(runs.values())).json("environment.json"),
    }
    page = write_tables(folder / "comparison", table(results, results.called), document)
    if results.gains:
        opening = f"{results.answer}\n\n{page.read_text()}"
        page.write_text(f"{opening}\n{markdown(results.gains)}\n{GAP}{results.how}\n", encoding="utf-8")
    write_csv(folder / "comparison.csv", results)
    return results


def run_arms(configs: Mapping[Arm, Config], out: Path, jobs: int, watch: Watch) -> None:
    """Starts or resumes the run of each arm, some at a time with one worker each; refuses impossible ones at once."""
    for config in {name: config for (name, _), config in configs.items()}.values():
        outline(config).check()
    if jobs == 1:
        for arm, config in configs.items():
            run(config, folder_of(out, arm), resume=True, progress=watch(arm))
        return
    # In processes of their own, with whatever objects their configs have; each serves many runs.
    idle = SimpleQueue[tuple[Popen[bytes], Connection]]()

    def run_apart(arm: Arm) -> Arm:
        (process, connection), folder = idle.get(), folder_of(out, arm)
        try:
            connection.send_bytes(cloudpickle.dumps((folder, configs[arm])))
            problem = connection.recv()
        except (EOFError, OSError):
            problem = f"{folder}: its process died ({process.wait()})"
        finally:
            idle.put((process, connection))
        if problem:
            raise RunError(problem)
        return arm

    with ExitStack() as processes, ThreadPoolExecutor(jobs) as pool:
        for _ in range(min(jobs, len(configs))):
            ours, theirs = Pipe()
            place, nothing = theirs.fileno(), dict.fromkeys(("stdin", "stdout", "stderr"), DEVNULL)
            process = start_python("incofl.studies.compare", place, pass_fds=[place], **nothing)
            processes.enter_context(process)
            processes.callback(process.kill)
            theirs.close()
            idle.put((process, ours))
        try:
            for done in as_completed([pool.submit(run_apart, arm) for arm in configs]):
                watch(done.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.close()


def main() -> None:
    """Makes the runs that come through a pipe, one after the other; says of each what went wrong, if anything."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError):  # no more of them
        while True:
            folder, config = pickle.loads(connection.recv_bytes())
            problem = None
            try:
                run(replace(config, engine=replace(config.engine, workers=1)), folder, resume=True, progress=False)
            except IncoflError as refusal:
                problem = str(refusal)
            except Exception:
                problem = f"{folder}: {traceback.format_exc()}"
            connection.send(problem)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def folder_of(out: Path, arm: Arm) -> Path:
    """Returns the run folder of an arm."""
    name, seed = arm
    return out / f"{re.sub(r'[^a-zA-Z0-9_.+-]+', '-', name)}-s{seed}"


def summarise(every: Mapping[Arm, RecordedRun]) -> list[MethodResult]:
    """Reads the records of the runs."""
    results: list[MethodResult] = []
    for method in dict.fromkeys(method for method, _ in every):
        runs = [run for arm, run in every.items() if arm[0] == method]
        if never := [run.path for run in runs if not run.judged]:
            raise RunError(f"{never[0]}: was never evaluated, expected data with a test set")
        task = runs[0].task
        metric = task.all_metrics[task.first]
        seeds, difference = [fmean(row["accuracy"] for row in run.judged) for run in runs], None
        if results:
            difference = paired(seeds, results[0].seeds)
            if not metric.higher_is_better:
                difference = replace(difference, wins=paired(results[0].seeds, seeds).wins)
        result = MethodResult(
            method,
            task.first,
            metric.percent,
            measure=tail_name(runs[0].judged),
            last=Estimate.of([float(run.judged[-1]["accuracy"]) for run in runs]),
            tail=Estimate.of(seeds),
            by_level={level: one for level in runs[0].levels if (one := estimate(run.tail(level) for run in runs))},
            seeds=seeds,
            difference=difference,
        )
        results.append(result)
    return results


def levels_of_devices(runs: Mapping[Arm, RecordedRun]) -> tuple[Setting | None, list[str]]:
    """What each level of devices gets from each method, in percent, and which of these are baselines.

    By the best path, where that was recorded. Nothing without baselines, and for metrics that are not shown in percent.
    """
    methods = {name: find_parts(run.config).method for (name, _), run in runs.items()}
    baselines = [name for name, method in methods.items() if method.is_baseline]
    task = next(iter(runs.values())).task
    if not baselines or not task.all_metrics[task.first].percent:
        return None, baselines
    found = [evaluations("", name, run, run.outline.levels.counts) for (name, _), run in runs.items()]
    rows = [row for own in found for row in own]
    known = {found.metric: found for found in settings(rows, _judged)}
    own, best = known["accuracy"], known.get(task.first + BEST)
    setting = best if best is not None and best.values.keys() == own.values.keys() else own
    first = next(iter(runs.values()))
    names = {measure: first.called(int(measure)) for measure in setting.measures if measure != DEVICES}
    work = {name: max(map(run.outline.turn, run.outline.levels_in_use)) for (name, _), run in runs.items()}
    return replace(setting, names=names, work=work), baselines


def _judged(evaluated: Sequence[Evaluation]) -> Sequence[Evaluation]:
    return evaluated[-len(tail([{"round": row.round} for row in evaluated])) :]


def table(results: Sequence[MethodResult], called: Callable[[int], str] = "level {}".format) -> list[list[str]]:
    """Returns the lines of the table, headings first; ``called`` names the devices of a level."""
    first, levels = results[0], sorted({level for result in results for level in result.by_level})
    last = ["last round"] if first.last != first.tail else []  # a short run is judged by its last round
    gap_headings = (f"minus {first.method}", "visible from", "wins")
    lines = [["method", *last, first.measure, *map(called, levels), *gap_headings]]
    scale, spec = (100, ".1f") if first.percent else (1, ".3f")

    for result in results:
        means = [*([result.last] if last else []), result.tail, *(result.by_level.get(level) for level in levels)]
        cells, gap = [plus_minus(mean, spec, scale) if mean else "" for mean in means], ["", "", ""]
        if (found := result.difference) is not None:
            visible = "" if found.visible_from is None else format(scale * found.visible_from, spec)
            gap = [plus_minus(found, f"+{spec}", scale), visible, f"{found.wins} of {len(result.seeds)}"]
        lines.append([result.method, *cells, *gap])
    return lines


def write_tables(path: Path, lines: Sequence[Sequence[str]], document: Mapping[str, Any]) -> Path:
    """Writes a table, headings first, as Markdown and everything behind it as JSON; returns the Markdown file."""
    write_json(path.with_name(f"{path.name}.json"), document)
    page = path.with_name(f"{path.name}.md")
    page.write_text(markdown(lines), encoding="utf-8")
    return page


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Writes a table, headings first, in Markdown."""
    head, *rest = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rest))


def write_csv(path: Path, results: Sequence[MethodResult]) -> None:
    """Writes plain numbers, one line per method."""
    rows = [dict(_flat(asdict(result))) for result in results]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}_")
        elif value is not None and not isinstance(value, list):
            yield f"{prefix}{key}", value
