"""Rules for adapters of unequal rank on two pretrained models, paired by seed (PROTOCOL.md).

usage: python experiments/lora/study.py [--root DIR] [--out runs/lora] [--jobs 2] [--seeds 0,1,2,3,4]
           [--tasks text,image] [--tables-only]

Pretrains both models where that is not done, makes the runs, and writes experiments/results/lora.csv (every evaluation
of every finished run, with its commit), lora-TASK.md (the tables) and lora.md (both tasks). Interrupted, it continues
when it is started again.
"""

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import incofl
from incofl.config import Config, make_config
from incofl.costs import human
from incofl.data import find_source
from incofl.data.texts import list_words
from incofl.engine.build import outline
from incofl.engine.progress import Progress
from incofl.engine.run_folder import RunFolder
from incofl.statistics import Difference, Estimate, holm, paired, plus_minus, tail_mean
from incofl.studies.compare import Arm, folder_of, markdown, run_arms
from incofl.studies.reproduce import is_finished

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
WORDS = 2046
TAIL = 6  # rounds: the last two evaluations
RULES = (
    *("fedit", "covered", "hetlora", "random-ranks", "flexlora", "raflora"),
    *("flora", "ffa", "rolora", "fedex"),
)
SMALL, LARGE, FULL = "equal rank 2", "equal rank 16", "full fine-tuning"
ARMS = {
    SMALL: ["method=fedit", "split.levels=[2]"],
    LARGE: ["method=fedit", "split.levels=[16]"],
    FULL: ["method=alllarge", "split.levels=1", "aggregate.weighting=samples", "local.lr=1e-3"],
    **{rule: [f"method={rule}", "split.levels=[2,4,8,12,16]"] for rule in RULES},
}
TASKS = {"text": "SST-2 after IMDb", "image": "Fashion-MNIST after CIFAR-10"}
CSV = [
    "task",
    "arm",
    "seed",
    "commit",
    "round",
    "accuracy",
    "accuracy_by_level",
    "loss",
    "bytes_up",
    "bytes_down",
    "turns",
]


class Cell(NamedTuple):
    """What came of an arm, a value for each seed."""

    accuracy: list[float]  # mean over the levels, in percent
    smallest: list[float]
    largest: list[float]
    bytes_down: float  # of a client's turn, mean over all
    bytes_up: float
    memory: tuple[int, int]  # of the smallest and the largest level, as ``incofl plan`` estimates it


def config_of(task: str, keys: Sequence[str], data: str, out: Path, seed: int = 0) -> Config:
    """A config of this folder with the places that it needs."""
    places = [f"data.root={data!r}", f"seed={seed}", "engine.workers=1"]
    if task.endswith("text"):
        places.append(f"data.tokenizer={str(out / 'words.txt')!r}")
    if not task.startswith("pretrain"):
        places.append(f"model.pretrained={str(out / f'pretrained-{task}')!r}")
    return make_config(HERE / f"{task}.toml", [*places, *keys])


def pretrain(task: str, data: str, out: Path) -> None:
    """Trains the model of a task in one place, unless that is done."""
    words = out / "words.txt"
    if task == "text" and not words.exists():
        out.mkdir(parents=True, exist_ok=True)
        words.write_text("".join(f"{word}\n" for word in list_words(find_source("imdb"), Path(data), WORDS)))
    incofl.run(config_of(f"pretrain-{task}", [], data, out), out / f"pretrained-{task}", resume=True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder) if row["accuracy"] is not None]


def cell(runs: Path, name: str, configs: dict[Arm, Config]) -> Cell:
    """Reads the runs of an arm."""
    folders = [folder_of(runs, arm) for arm in configs]
    evaluated, rows = [evaluations(folder) for folder in folders], [r for f in folders for r in rows_of(f)]
    levels = [
        np.mean([row["accuracy_by_level"] for row in own if row["round"] > own[-1]["round"] - TAIL], axis=0)
        for own in evaluated
    ]
    federation = outline(next(iter(configs.values())))
    used = [federation.costs[level].memory for level in federation.levels_in_use]
    turns = sum(len(row["clients"]) for row in rows)
    return Cell(
        [100 * tail_mean(own, TAIL) for own in evaluated],
        [100 * float(level[0]) for level in levels],
        [100 * float(level[-1]) for level in levels],
        sum(row["bytes_down"] for row in rows) / turns,
        sum(row["bytes_up"] for row in rows) / turns,
        (used[0], used[-1]),
    )


def table(cells: dict[str, Cell]) -> str:
    """Accuracy, bytes and memory of each arm, and its paired differences to the three that everybody can do."""
    head = ["arm", "accuracy", "smallest level", "largest level", "down", "up", "memory"]
    lines = [[*head, *(f"minus {base}" for base in (SMALL, LARGE, FULL)), "visible from"]]
    against: dict[str, dict[str, Difference]] = {
        base: {name: paired(own.accuracy, cells[base].accuracy) for name, own in cells.items() if name != base}
        for base in (SMALL, LARGE, FULL)
    }
    clear: dict[tuple[str, str], bool] = {}
    for base, found in against.items():
        rules = [name for name in RULES if name in found]
        corrected = holm([found[name].p_value or 1.0 for name in rules])
        clear |= {(base, name): value < 0.05 for name, value in zip(rules, corrected, strict=True)}
    for name, own in cells.items():
        gaps = [against[base].get(name) for base in against]
        stars = ["*" if clear.get((base, name)) else "" for base in against]
        differences = [
            "" if gap is None else plus_minus(gap, "+.1f") + star for gap, star in zip(gaps, stars, strict=True)
        ]
        visible = ", ".join("-" if gap is None else f"{gap.visible_from or 0:.1f}" for gap in gaps)
        accuracies = [plus_minus(Estimate.of(values)) for values in (own.accuracy, own.smallest, own.largest)]
        memory = " to ".join(dict.fromkeys(human(value, "B") for value in own.memory))
        sent = [human(own.bytes_down, "B"), human(own.bytes_up, "B")]
        lines.append([name, *accuracies, *sent, memory, *differences, visible])
    return markdown(lines)


def both(cells: dict[str, dict[str, Cell]]) -> str:
    """The mean of both tasks for every rule, and its paired difference to the best."""
    tasks = list(cells)
    mean = {rule: np.mean([cells[task][rule].accuracy for task in tasks], axis=0).tolist() for rule in RULES}
    best = max((rule for rule in RULES if rule != "fedit"), key=lambda rule: float(np.mean(mean[rule])))
    lines = [
        ["rule", "accuracy, mean of both tasks", f"minus {best}", "visible from", "down and up, mean of both tasks"]
    ]
    for rule in sorted(RULES, key=lambda rule: -float(np.mean(mean[rule]))):
        gap = None if rule == best else paired(mean[rule], mean[best])
        sent = float(np.mean([cells[task][rule].bytes_down + cells[task][rule].bytes_up for task in tasks]))
        gaps = ["", ""] if gap is None else [plus_minus(gap, "+.1f"), f"{gap.visible_from or 0:.1f}"]
        lines.append([rule, plus_minus(Estimate.of(mean[rule])), *gaps, human(sent, "B")])
    return markdown(lines)


def note(seeds: Sequence[int], commits: set[str]) -> str:
    made = f"Seeds {', '.join(map(str, seeds))}; commit {', '.join(sorted(commits))}"
    return (
        f"\n{made}. Accuracy in percent, mean over the "
        "levels and the last two evaluations; ± is the half width of the 95 % interval over the seeds (Student's t), "
        "differences are paired by seed. Bytes are those of a client's turn, mean over all turns, without the frozen "
        "weights, which are sent once or not at all; memory is what `incofl plan` estimates for the smallest and the "
        "largest level. Visible from: the smallest true difference that these seeds find with 80 % power, for each of "
        "the differences in turn. A star: below 5 % after Holm's correction over the ten rules.\n"
    )


def write(tasks: Sequence[str], data: str, out: Path, wanted: Sequence[int]) -> None:
    """Writes the raw evaluations of all finished runs, and the tables of the seeds for which all arms are finished."""
    raw: list[list[Any]] = []
    cells: dict[str, dict[str, Cell]] = {}
    commits: set[str] = set()
    whole: dict[str, list[int]] = {}
    for task in tasks:
        runs, configs, done = out / task, {}, set[Arm]()
        for seed in wanted:
            for name, keys in ARMS.items():
                config = configs[name, seed] = config_of(task, keys, data, out, seed)
                folder = folder_of(runs, (name, seed))
                if is_finished(folder, config):
                    done.add((name, seed))
                    commit = str(json.loads(RunFolder(folder).environment.read_text())["commit"])[:12]
                    commits.add(commit)
                    for row in evaluations(folder):
                        levels = " ".join(f"{value:.6f}" for value in row["accuracy_by_level"])
                        named = {**row, "task": task, "arm": name, "seed": seed, "commit": commit}
                        named["turns"] = len(row["clients"])
                        raw.append([(named | {"accuracy_by_level": levels})[key] for key in CSV])
        seeds = whole[task] = [seed for seed in wanted if all((name, seed) in done for name in ARMS)]
        if seeds:
            cells[task] = {
                name: cell(runs, name, {(name, seed): configs[name, seed] for seed in seeds}) for name in ARMS
            }
            page = f"### {TASKS[task]}\n\n{table(cells[task])}{note(seeds, commits)}"
            (RESULTS / f"lora-{task}.md").write_text(page, encoding="utf-8")
            print(page)
    with (RESULTS / "lora.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([CSV, *raw])
    if len(cells) == len(TASKS) and len(set(map(tuple, whole.values()))) == 1:
        page = f"### Rules for adapters of unequal rank\n\n{both(cells)}{note(whole['text'], commits)}"
        (RESULTS / "lora.md").write_text(page, encoding="utf-8")
        print(page)


def watch(arm: Arm) -> Progress:
    print(*arm, flush=True)
    return Progress()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--tasks", default="text,image")
    parser.add_argument("--tables-only", action="store_true")
    args = parser.parse_args()
    seeds, tasks = [int(seed) for seed in args.seeds.split(",")], args.tasks.split(",")
    if not args.tables_only:
        for task in tasks:
            pretrain(task, args.root, args.out)
        for seed in seeds:  # so that what is finished can be compared
            for task in tasks:
                arms = {(name, seed): config_of(task, keys, args.root, args.out, seed) for name, keys in ARMS.items()}
                left = {a: c for a, c in arms.items() if not is_finished(folder_of(args.out / task, a), c)}
                if left:
                    run_arms(left, args.out / task, args.jobs, watch)
                write(tasks, args.root, args.out, seeds)
    else:
        write(tasks, args.root, args.out, seeds)


if __name__ == "__main__":
    main()
