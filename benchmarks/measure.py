"""What the benchmarks share: how a ratio is described, the machine, and where results go.

Machines are noisy, so no benchmark reports a time by itself: every figure is a ratio of two times that were measured in
turn in one run, repeated, with its spread.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def seconds(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the smallest and largest value."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def publish(name: str, text: str, measured: Mapping[str, Any]) -> None:
    """Prints a result, and writes it to results/NAME.md and, with every single measurement, to results/NAME.json."""
    where = machine()
    commit = (where["commit"] or "unknown")[:12] + (" with changes" if where["dirty"] else "")
    text += f"\nMedian (smallest to largest); {where['cores']} cores, torch {where['torch']}, commit {commit}.\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": where, **measured}, indent=1) + "\n")
    print(text)


def machine() -> dict[str, Any]:
    """Where and with what the measurement was made."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)benchmarks/results")),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return answer.stdout.strip()
