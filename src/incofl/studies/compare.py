"""Paired comparisons: several methods under the same seeds, and what can be said about their differences.

Runs of one seed share everything but the method: partition, cohorts and initial weights follow from the seed.
"""

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from incofl.client import Setting
from incofl.config import Config, find_parts
from incofl.engine.build import build_method, build_model, build_splitter
from incofl.engine.checkpoint import atomic_write
from incofl.engine.progress import Progress
from incofl.engine.run import run
from incofl.engine.run_folder import RunFolder
from incofl.errors import RunError
from incofl.statistics import Difference, mean_and_half_width, paired, tail, tail_mean, tail_name

CURVE = ("round", "accuracy", "accuracy_by_level", "loss", "test_loss")  # what comparison.json keeps of an evaluation
CAPTION = (
    "mean ± half width of the 95 % interval over the seeds (Student's t); "
    "visible from: the smallest true difference that these seeds find with 80 % power"
)
Row = Mapping[str, Any]
Arm = tuple[str, int]  # a run of a comparison: its name, such as the method, and its seed
Watch = Callable[[Arm], Progress]


@dataclass(frozen=True)
class Estimate:
    """A mean over the seeds with the half width of its 95 % interval, which is ``None`` for one seed."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Returns the estimate from one value per seed."""
        return cls(*mean_and_half_width(values))


@dataclass(frozen=True)
class MethodResult:
    """What the runs of one method achieved.

    Attributes:
        method: name of the method.
        metric: what is compared: the first metric of the task.
        percent: whether the metric is shown in percent.
        measure: the evaluations by which it is judged, such as ``mean of rounds 41-50``.
        last: the metric after the last round, averaged over the levels.
        tail: the metric by that measure.
        by_level: the same for each level that some client trains.
        seeds: ``tail`` of each seed.
        difference: paired difference of ``tail`` to the first method; ``None`` for the first.
    """

    method: str
    metric: str
    percent: bool
    measure: str
    last: Estimate
    tail: Estimate
    by_level: dict[int, Estimate]
    seeds: list[float]
    difference: Difference | None = None


def compare(
    configs: Mapping[Arm, Config], out: Path, *, jobs: int = 1, watch: Watch | None = None
) -> list[MethodResult]:
    """Runs every arm that is not finished yet and compares them; called again, it continues an interrupted comparison.

    Args:
        configs: the config of each arm.
        out: folder for the run folder of each arm, and for the tables.
        jobs: number of runs at a time, each in its own process with one worker.
        watch: returns the receiver of an arm's progress; with several jobs it is called when the arm is finished.
    """
    check_arms(configs)
    run_arms(configs, out, jobs, watch)
    results = summarise(configs, out)
    tables = {"md": markdown(table(results)), "csv": as_csv(results), "json": as_json(results, configs, out)}
    for suffix, text in tables.items():
        with atomic_write(out / f"comparison.{suffix}") as file:
            file.write(text.encode())
    return results


def check_arms(configs: Mapping[Arm, Config]) -> None:
    """Refuses an impossible arm before the first run."""
    for config in configs.values():
        parts = find_parts(config)
        model, method = build_model(config, parts), build_method(config, parts)
        build_splitter(config, model, method)
        buffers, compiled = method.server.buffers, config.engine.compile
        method.check(Setting(model.template, model.example(2), model.layout, parts.task, buffers, compiled))


def run_arms(configs: Mapping[Arm, Config], out: Path, jobs: int = 1, watch: Watch | None = None) -> None:
    """Starts or resumes the run of each arm, several at a time if asked to."""
    if jobs == 1:
        for arm, config in configs.items():
            run(config, folder_of(out, arm), resume=True, progress=watch(arm) if watch else False)
        return
    tasks = [
        (arm, dataclasses.replace(config, engine=dataclasses.replace(config.engine, workers=1)), out)
        for arm, config in configs.items()
    ]
    with get_context("spawn").Pool(jobs) as pool:
        for arm in pool.imap_unordered(_run_arm, tasks):
            if watch:
                watch(arm)


def _run_arm(task: tuple[Arm, Config, Path]) -> Arm:
    arm, config, out = task
    torch.set_num_threads(1)
    run(config, folder_of(out, arm), resume=True, progress=False)
    return arm


def folder_of(out: Path, arm: Arm) -> Path:
    """Returns the run folder of an arm."""
    name, seed = arm
    return out / f"{re.sub(r'[^a-zA-Z0-9_.+-]+', '-', name)}-s{seed}"


def evaluations(folder: Path) -> list[Row]:
    """Returns the rounds of a run in which it was evaluated."""
    return [row for row in RunFolder(folder).rows() if row["accuracy"] is not None]


def summarise(configs: Mapping[Arm, Config], out: Path) -> list[MethodResult]:
    """Reads the records of the runs."""
    methods = list(dict.fromkeys(method for method, _ in configs))
    seeds = list(dict.fromkeys(seed for _, seed in configs))
    task = find_parts(next(iter(configs.values()))).task
    metric = task.all_metrics[task.first]
    results: list[MethodResult] = []
    for method in methods:
        folders = [folder_of(out, (method, seed)) for seed in seeds]
        runs = [evaluations(folder) for folder in folders]
        if not all(runs):
            raise RunError(f"{folders[runs.index([])]}: was never evaluated, expected data with a test set")
        levels = json.loads(RunFolder(folders[0]).summary.read_text())["levels"]
        by_level = [[row["accuracy_by_level"] for row in tail(evaluated)] for evaluated in runs]
        means = np.array([np.mean(np.array(own, dtype=np.float64), axis=0) for own in by_level])  # seeds x levels
        values = [tail_mean(evaluated) for evaluated in runs]
        result = MethodResult(
            method,
            task.first,
            metric.percent,
            tail_name(tail(runs[0])),
            Estimate.of([float(evaluated[-1]["accuracy"]) for evaluated in runs]),
            Estimate.of(values),
            {level: Estimate.of(own) for level, own in zip(levels, means.T.tolist(), strict=True)},
            values,
        )
        if results:
            difference = paired(values, results[0].seeds)
            wins = difference.wins if metric.higher_is_better else paired(results[0].seeds, values).wins
            result = dataclasses.replace(result, difference=dataclasses.replace(difference, wins=wins))
        results.append(result)
    return results


def table(results: Sequence[MethodResult]) -> list[list[str]]:
    """Returns the lines of the table, headings first."""
    first, levels = results[0], sorted({level for result in results for level in result.by_level})
    last = ["last round"] if first.last != first.tail else []  # a short run is judged by its last round
    gap_headings = (f"minus {first.method}", "visible from", "wins")
    lines = [["method", *last, first.measure, *(f"level {level}" for level in levels), *gap_headings]]
    scale, spec = (100, ".1f") if first.percent else (1, ".3f")

    def shown(mean: float, half_width: float | None = None, sign: str = "") -> str:
        return plus_minus(scale * mean, half_width and scale * half_width, sign + spec)

    for result in results:
        means = [*([result.last] if last else []), result.tail, *(result.by_level.get(level) for level in levels)]
        cells, gap = [shown(mean.mean, mean.half_width) if mean else "" for mean in means], ["", "", ""]
        if (found := result.difference) is not None:
            visible = "" if found.visible_from is None else shown(found.visible_from)
            gap = [shown(found.mean, found.half_width, "+"), visible, f"{found.wins} of {len(result.seeds)}"]
        lines.append([result.method, *cells, *gap])
    return lines


def plus_minus(mean: float, half_width: float | None, spec: str = ".1f") -> str:
    """Writes a mean and the half width of its interval."""
    return format(mean, spec) + ("" if half_width is None else f" ± {format(half_width, spec.lstrip('+'))}")


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Writes a table, headings first, in Markdown."""
    head, *rest = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rest))


def as_csv(results: Sequence[MethodResult]) -> str:
    """Writes plain numbers, one line per method."""
    rows = [dict(_flat(dataclasses.asdict(result))) for result in results]
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}_")
        elif value is not None and not isinstance(value, list):
            yield f"{prefix}{key}", value


def as_json(results: Sequence[MethodResult], configs: Mapping[Arm, Config], out: Path) -> str:
    """Writes everything: each seed's value, every evaluation, the configs, and the environment of the first run."""
    curves = {arm: [{key: row[key] for key in CURVE} for row in evaluations(folder_of(out, arm))] for arm in configs}
    document = {
        "seeds": list(dict.fromkeys(seed for _, seed in configs)),
        "caption": CAPTION,
        "results": [dataclasses.asdict(result) for result in results],
        "configs": {method: config.to_dict() for (method, _), config in list(configs.items())[::-1]},
        "curves": [{"method": method, "seed": seed, "rows": rows} for (method, seed), rows in curves.items()],
        "environment": json.loads(RunFolder(folder_of(out, next(iter(configs)))).environment.read_text()),
    }
    return json.dumps(document, indent=2) + "\n"
