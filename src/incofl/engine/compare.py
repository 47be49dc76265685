"""Paired comparisons: several methods under the same seeds, and what can be said about their differences.

Runs of one seed share everything but the method: partition, cohorts and initial weights follow from the seed.
"""

import csv
import dataclasses
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from incofl.config import Config
from incofl.engine.checkpoint import atomic_write
from incofl.engine.records import Row, RunFolder
from incofl.engine.run import WORKERS, Progress, run

LAST = 10  # evaluations whose mean is taken

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
        last_ten: mean of the last ten evaluations.
        by_level: mean of the last ten evaluations of each level.
        difference: of ``last_ten`` to the first method's; ``None`` for the first.
    """

    method: str
    last: Spread
    last_ten: Spread
    by_level: list[Spread]
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
    if jobs == 1:
        for arm, config in configs.items():
            run(config, folder_of(out, arm), resume=True, progress=watch(arm) if watch else None)
    else:
        for arm in run_side_by_side(configs, out, jobs):
            if watch:
                watch(arm)
    results = summarise(configs, out)
    seeds = len({seed for _, seed in configs})
    for suffix, text in (
        ("md", as_markdown(results, seeds)),
        ("csv", as_csv(results)),
        ("json", as_json(results, configs)),
    ):
        with atomic_write(out / f"comparison.{suffix}") as file:
            file.write(text.encode())
    return results


def folder_of(out: Path, arm: Arm) -> Path:
    """The run folder of an arm."""
    method, seed = arm
    return out / f"{method}-s{seed}"


def run_side_by_side(configs: Mapping[Arm, Config], out: Path, jobs: int) -> Iterator[Arm]:
    """Makes several runs at a time, and yields each arm that is finished."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), _one_worker) as pool:
        futures = {pool.submit(_run_arm, config.to_dict(), folder_of(out, arm)): arm for arm, config in configs.items()}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _one_worker() -> None:
    os.environ[WORKERS] = "1"
    import torch

    torch.set_num_threads(1)


def _run_arm(config: dict[str, Any], folder: Path) -> None:
    run(config, folder, resume=True)


def summarise(configs: Mapping[Arm, Config], out: Path) -> list[Result]:
    """Reads the runs' records."""
    methods = list(dict.fromkeys(method for method, _ in configs))
    seeds = list(dict.fromkeys(seed for _, seed in configs))
    rows = {arm: _evaluated(out, arm) for arm in configs}

    def over_seeds(method: str, value: Callable[[list[Row]], float]) -> list[float]:
        return [value(rows[method, seed]) for seed in seeds]

    def last_ten(evaluated: list[Row]) -> float:
        return float(np.mean([row["accuracy"] for row in evaluated[-LAST:]]))

    results = []
    reference = over_seeds(methods[0], last_ten)
    for method in methods:
        values = over_seeds(method, last_ten)
        levels = len(rows[method, seeds[0]][-1]["accuracy_by_level"])
        by_level = [
            Spread.of(
                over_seeds(method, lambda r, at=at: float(np.mean([x["accuracy_by_level"][at] for x in r[-LAST:]])))  # type: ignore[misc]
            )
            for at in range(levels)
        ]
        results.append(
            Result(
                method,
                Spread.of(over_seeds(method, lambda evaluated: float(evaluated[-1]["accuracy"]))),
                Spread.of(values),
                by_level,
                None if method == methods[0] else Difference.of(values, reference),
            )
        )
    return results


def _evaluated(out: Path, arm: Arm) -> list[Row]:
    return [row for row in RunFolder(folder_of(out, arm)).rows() if row["accuracy"] is not None]


def headings(results: Sequence[Result]) -> list[str]:
    """The columns of the table."""
    levels = max(len(result.by_level) for result in results)
    return [
        "method",
        "last round",
        "last ten",
        *(f"level {level}" for level in range(levels)),
        f"minus {results[0].method} [95 %]",
        "wins",
    ]


def cells(result: Result, levels: int, seeds: int) -> list[str]:
    """A line of the table, in percent."""
    by_level = [percent(spread) for spread in result.by_level]
    difference, wins = "", ""
    if result.difference is not None:
        gap = result.difference
        interval = "" if gap.half_width is None else f" ± {100 * gap.half_width:.1f}"
        difference, wins = f"{100 * gap.mean:+.1f}{interval}", f"{gap.wins} of {seeds}"
    blank = [""] * (levels - len(by_level))
    return [result.method, percent(result.last), percent(result.last_ten), *by_level, *blank, difference, wins]


def percent(spread: Spread) -> str:
    """Mean and standard deviation in percent."""
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.1f}"
    return f"{100 * spread.mean:.1f}{deviation}"


def table(results: Sequence[Result], seeds: int) -> list[list[str]]:
    """All lines, the headings first."""
    levels = max(len(result.by_level) for result in results)
    return [headings(results), *(cells(result, levels, seeds) for result in results)]


def as_markdown(results: Sequence[Result], seeds: int) -> str:
    """The table in Markdown."""
    head, *lines = table(results, seeds)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def as_csv(results: Sequence[Result]) -> str:
    """Plain numbers, a line per method."""
    levels = max(len(result.by_level) for result in results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spreads = ["last", "last_ten", *(f"level_{level}" for level in range(levels))]
    writer.writerow(
        ["method", *(f"{s}_{what}" for s in spreads for what in ("mean", "sd")), "difference", "half_width_95", "wins"]
    )
    for result in results:
        numbers = [n for s in (result.last, result.last_ten, *result.by_level) for n in (s.mean, s.deviation)]
        numbers += [None] * (2 * (levels - len(result.by_level)))
        gap = result.difference
        writer.writerow([result.method, *numbers, *([gap.mean, gap.half_width, gap.wins] if gap else [None] * 3)])
    return text.getvalue()


def as_json(results: Sequence[Result], configs: Mapping[Arm, Config]) -> str:
    """Everything, with the seeds."""
    seeds = list(dict.fromkeys(seed for _, seed in configs))
    return json.dumps({"seeds": seeds, "results": [dataclasses.asdict(result) for result in results]}, indent=2) + "\n"
