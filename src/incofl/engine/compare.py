"""Paired comparisons: several methods under the same seeds, and what can be said about their differences.

Runs of one seed share everything but the method: partition, cohorts and initial weights follow from the seed.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from incofl.config import Config
from incofl.config.schema import EngineConfig
from incofl.engine.build import build_method, build_model, build_splitter
from incofl.engine.checkpoint import atomic_write
from incofl.engine.records import Row, RunFolder, last_ten
from incofl.engine.run import Progress, run

# What is kept of an evaluation.
CURVE = ("round", "accuracy", "accuracy_by_level", "loss", "test_loss")
# A run of a comparison: method and seed.
Arm = tuple[str, int]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the seeds; the latter is ``None`` for one seed."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of some values."""
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


@dataclass(frozen=True)
class Difference:
    """The paired difference of a method to the first one, over the seeds.

    Attributes:
        mean: of the differences.
        half_width: of its 95 % confidence interval (Student's t); ``None`` for one seed.
        wins: seeds in which the method is better.
    """

    mean: float
    half_width: float | None
    wins: int

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Difference":
        """Of two methods' values, seed by seed."""
        gaps = np.subtract(ours, theirs)
        half = None
        if len(gaps) > 1:
            from scipy.stats import t as student  # half a second that no other command should wait for

            half = float(student.ppf(0.975, len(gaps) - 1) * np.std(gaps, ddof=1) / np.sqrt(len(gaps)))
        return cls(float(np.mean(gaps)), half, int((gaps > 0).sum()))


@dataclass(frozen=True)
class Result:
    """What the runs of one method came to.

    Attributes:
        method: its name.
        last: accuracy after the last round, mean over the levels.
        last_ten: mean over the evaluations in the last ten rounds.
        by_level: the same for each level that somebody trained.
        seeds: ``last_ten`` of each seed.
        difference: of ``last_ten`` to the first method's; ``None`` for the first.
    """

    method: str
    last: Spread
    last_ten: Spread
    by_level: dict[int, Spread]
    seeds: list[float]
    difference: Difference | None


def compare(
    configs: Mapping[Arm, Config], out: Path, *, jobs: int = 1, watch: Callable[[Arm], Progress] | None = None
) -> list[Result]:
    """Runs every arm that is not finished yet, and compares. Started again, it continues where it was.

    Args:
        configs: for each method and seed what to run.
        out: holds a run folder for each arm, and the tables.
        jobs: runs at a time, each in a process of its own with one worker.
        watch: gives whoever watches an arm, where one run at a time is made.
    """
    check_arms(configs)
    if jobs == 1:
        for arm, config in configs.items():
            run(config, folder_of(out, arm), resume=True, progress=watch(arm) if watch else None)
    else:
        for arm in run_side_by_side(configs, out, jobs):
            if watch:
                watch(arm)
    results = summarise(configs, out)
    tables = {"md": as_markdown(results), "csv": as_csv(results), "json": as_json(results, configs, out)}
    for suffix, text in tables.items():
        with atomic_write(out / f"comparison.{suffix}") as file:
            file.write(text.encode())
    return results


def check_arms(configs: Mapping[Arm, Config]) -> None:
    """Refuses an impossible arm before the first run."""
    for config in configs.values():
        model = build_model(config)
        build_splitter(config, model)
        build_method(config).client.check(model.template, model.example(2))


def folder_of(out: Path, arm: Arm) -> Path:
    """The run folder of an arm."""
    method, seed = arm
    return out / f"{method}-s{seed}"


def run_side_by_side(configs: Mapping[Arm, Config], out: Path, jobs: int) -> Iterator[Arm]:
    """Makes several runs at a time, and yields each arm that is finished; an interruption ends them all at once."""
    tasks = [(arm, dataclasses.replace(config, engine=one_worker(config)), out) for arm, config in configs.items()]
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run_arm, tasks)


def one_worker(config: Config) -> EngineConfig:
    """The engine's options with one worker: runs are made side by side."""
    return dataclasses.replace(config.engine, workers=1)


def _run_arm(task: tuple[Arm, Config, Path]) -> Arm:
    arm, config, out = task
    torch.set_num_threads(1)
    run(config, folder_of(out, arm), resume=True)
    return arm


def summarise(configs: Mapping[Arm, Config], out: Path) -> list[Result]:
    """Reads the runs' records."""
    methods = list(dict.fromkeys(method for method, _ in configs))
    seeds = list(dict.fromkeys(seed for _, seed in configs))
    rows = {arm: _evaluated(out, arm) for arm in configs}

    def over_seeds(method: str, value: Callable[[list[Row]], float]) -> list[float]:
        return [value(rows[method, seed]) for seed in seeds]

    def tail_of(position: int) -> Callable[[list[Row]], float]:
        return lambda evaluated: float(np.mean([r["accuracy_by_level"][position] for r in last_ten(evaluated)]))

    results = []
    reference = over_seeds(methods[0], last_ten_of)
    for method in methods:
        values = over_seeds(method, last_ten_of)
        summary = json.loads(RunFolder(folder_of(out, (method, seeds[0]))).summary.read_text())
        results.append(
            Result(
                method,
                Spread.of(over_seeds(method, lambda evaluated: float(evaluated[-1]["accuracy"]))),
                Spread.of(values),
                {level: Spread.of(over_seeds(method, tail_of(at))) for at, level in enumerate(summary["levels"])},
                values,
                None if method == methods[0] else Difference.of(values, reference),
            )
        )
    return results


def last_ten_of(rows: Sequence[Row], rounds: int = 10) -> float:
    """The mean accuracy of the evaluations in the last ten rounds, or so many."""
    evaluated = [row for row in rows if row["accuracy"] is not None]
    return float(np.mean([row["accuracy"] for row in last_ten(evaluated, rounds)]))


def _evaluated(out: Path, arm: Arm) -> list[Row]:
    return [row for row in RunFolder(folder_of(out, arm)).rows() if row["accuracy"] is not None]


def levels_of(results: Sequence[Result]) -> list[int]:
    """All levels that some method trained."""
    return sorted({level for result in results for level in result.by_level})


def table(results: Sequence[Result]) -> list[list[str]]:
    """All lines in percent, the headings first."""
    levels = levels_of(results)
    lines = [
        [
            *("method", "last round", "last ten"),
            *(f"level {level}" for level in levels),
            *(f"minus {results[0].method} [95 %]", "wins"),
        ]
    ]
    for result in results:
        by_level = [percent(result.by_level[level]) if level in result.by_level else "" for level in levels]
        difference, wins = "", ""
        if result.difference is not None:
            gap = result.difference
            interval = "" if gap.half_width is None else f" ± {100 * gap.half_width:.1f}"
            difference, wins = f"{100 * gap.mean:+.1f}{interval}", f"{gap.wins} of {len(result.seeds)}"
        lines.append([result.method, percent(result.last), percent(result.last_ten), *by_level, difference, wins])
    return lines


def percent(spread: Spread) -> str:
    """Mean and standard deviation in percent."""
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.1f}"
    return f"{100 * spread.mean:.1f}{deviation}"


def as_markdown(results: Sequence[Result]) -> str:
    """The table in Markdown."""
    head, *lines = table(results)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def as_csv(results: Sequence[Result]) -> str:
    """Plain numbers, a line per method."""
    levels = levels_of(results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spreads = ["last", "last_ten", *(f"level_{level}" for level in levels)]
    writer.writerow(
        ["method", *(f"{s}_{what}" for s in spreads for what in ("mean", "sd")), "difference", "half_width_95", "wins"]
    )
    for result in results:
        parts = [result.last, result.last_ten, *(result.by_level.get(level) for level in levels)]
        numbers = [n for part in parts for n in ((part.mean, part.deviation) if part else (None, None))]
        gap = result.difference
        writer.writerow([result.method, *numbers, *([gap.mean, gap.half_width, gap.wins] if gap else [None] * 3)])
    return text.getvalue()


def as_json(results: Sequence[Result], configs: Mapping[Arm, Config], out: Path) -> str:
    """Everything, with each seed's value, every evaluation, the configs, and the environment of the first run."""
    document = {
        "seeds": list(dict.fromkeys(seed for _, seed in configs)),
        "results": [dataclasses.asdict(result) for result in results],
        "configs": {method: config.to_dict() for (method, _), config in list(configs.items())[::-1]},
        "curves": [
            {"method": method, "seed": seed, "rows": [{key: row[key] for key in CURVE} for row in _evaluated(out, arm)]}
            for arm in configs
            for method, seed in [arm]
        ],
        "environment": json.loads(RunFolder(folder_of(out, next(iter(configs)))).environment.read_text()),
    }
    return json.dumps(document, indent=2) + "\n"
