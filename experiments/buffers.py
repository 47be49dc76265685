"""Two buffer policies, with and without InCo, paired by seed: same partition, cohorts and initial weights.

usage: python experiments/buffers.py {digits,cifar10} [--root DIR] [--seeds 0,1,2] [--jobs 2]

Every run is resumable: start the command again after an interruption. Writes experiments/results/buffers-NAME.json
(every evaluation of every finished run, with the commit) and buffers-NAME.md (the table).
"""

import argparse
import itertools
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import incofl
from incofl.statistics import Estimate, plus_minus

HERE = Path(__file__).parent
METHODS = ("heteroavg", "incoavg")
POLICIES = ("average", "per-level")


def train(data: str, root: str, method: str, policy: str, seed: int) -> dict[str, Any]:
    overrides = [f"data.root={root!r}", f"method={method}", f"buffers={policy}", f"seed={seed}"]
    config = incofl.load_config(HERE / f"buffers-{data}.toml", overrides)
    out = HERE.parent / "runs" / "buffers" / data / f"{method}-{policy}-s{seed}"
    incofl.run(config, out, resume=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    keys = ("round", "accuracy", "accuracy_by_level", "loss")
    return {
        "method": method,
        "buffers": policy,
        "seed": seed,
        "commit": json.loads((out / "environment.json").read_text())["commit"],
        "rows": [{key: row[key] for key in keys} for row in rows if row["accuracy"] is not None],
    }


def spread(values: list[float]) -> str:
    return plus_minus(Estimate.of([100 * value for value in values]))


def table(runs: list[dict[str, Any]]) -> str:
    """Accuracy in percent at the last evaluation, mean and 95 % interval over the seeds that are complete."""
    last = {(run["method"], run["buffers"], run["seed"]): run["rows"][-1] for run in runs}
    arms = list(itertools.product(POLICIES, METHODS))
    seeds = sorted(s for s in {seed for *_, seed in last} if all((m, p, s) in last for p, m in arms))
    if not seeds:
        return "No seed is complete yet.\n"
    lines = [
        "| buffers | method | mean of the levels | smallest | 2 | 3 | 4 | largest "
        "| mean of the last five evaluations |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    tail = {(r["method"], r["buffers"], r["seed"]): mean(row["accuracy"] for row in r["rows"][-5:]) for r in runs}
    for policy, method in arms:
        rows = [last[method, policy, seed] for seed in seeds]
        levels = zip(*(row["accuracy_by_level"] for row in rows), strict=True)
        cells = [
            spread([row["accuracy"] for row in rows]),
            *(spread(list(level)) for level in levels),
            spread([tail[method, policy, seed] for seed in seeds]),
        ]
        lines.append(f"| {policy} | {method} | {' | '.join(cells)} |")
    lines += ["", "Paired differences of the mean over the levels, in points (last round; mean of the last five):", ""]
    contrasts = [
        ("per-level - average, heteroavg", ("heteroavg", "per-level"), ("heteroavg", "average")),
        ("per-level - average, incoavg", ("incoavg", "per-level"), ("incoavg", "average")),
        ("incoavg - heteroavg, average", ("incoavg", "average"), ("heteroavg", "average")),
        ("incoavg - heteroavg, per-level", ("incoavg", "per-level"), ("heteroavg", "per-level")),
    ]
    for name, a, b in contrasts:
        final = [last[*a, s]["accuracy"] - last[*b, s]["accuracy"] for s in seeds]
        later = [tail[*a, s] - tail[*b, s] for s in seeds]
        wins = sum(d > 0 for d in later)
        lines.append(f"- {name}: {spread(final)}; {spread(later)}, better in {wins} of {len(seeds)} seeds")
    commits = sorted({run["commit"][:12] for run in runs if run["commit"]})
    lines += [
        "",
        f"Seeds {', '.join(map(str, seeds))}; accuracy in percent, mean ± half width of the 95 % interval; "
        f"commit {', '.join(commits)}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=("digits", "cifar10"))
    parser.add_argument("--root", default="data")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        grid = itertools.product(seeds, POLICIES, METHODS)
        futures = [pool.submit(train, args.data, args.root, method, policy, seed) for seed, policy, method in grid]
        for future in as_completed(futures):
            run = future.result()
            runs.append(run)
            runs.sort(key=lambda r: (r["seed"], r["buffers"], r["method"]))
            print(f"{run['method']} {run['buffers']} seed {run['seed']}: {run['rows'][-1]['accuracy']:.4f}", flush=True)
            path = HERE / "results" / f"buffers-{args.data}"
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".json").write_text(json.dumps(runs, indent=1) + "\n")
            path.with_suffix(".md").write_text(table(runs))
    print(table(runs))


if __name__ == "__main__":
    main()
