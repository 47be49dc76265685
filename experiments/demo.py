"""Whether what `make demo` says holds for other seeds: its options and everybody the largest, ten seeds.

usage: python experiments/demo.py [--jobs 2] [--out runs/demo-seeds]

Writes experiments/results/demo.csv, every evaluation of every run, demo.md, what follows from them, and demo-first.md,
the first table with what to know about it. Started again it continues. The numbers are those of the last evaluation, as
in the demo.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import incofl
from incofl.analysis.runs import RecordedRun
from incofl.engine.best_path import BEST
from incofl.methods import BASELINES, SLICES
from incofl.statistics import plus_minus
from incofl.studies.compare import folder_of, markdown
from incofl.studies.gains import DEVICES, Evaluation, Setting, evaluations, settings
from incofl.studies.inco import is_accuracy, read_csv, write_csv

RECORDS = Path(__file__).parent / "results" / "demo.csv"
SEEDS = range(10)
ALL_LARGE = "alllarge"
OPTIONS = {**BASELINES, **SLICES, ALL_LARGE: "everybody trains the largest size, which they cannot"}
OURS = "fedfloor"
# FedFloor's larger clients make four epochs in a turn, all others one. The stricter reading: everybody makes four.
EPOCHS = 4
LONGER = {f"{name}, {EPOCHS} epochs": name for name in (*BASELINES, OURS)}
LONGER_SEEDS = range(5)
DEVICES_OF = {"0": "phones", "1": "tablets", "2": "workstations", DEVICES: "all devices"}
NOT_WORSE = 0.5  # points, as everywhere


def table(setting: Setting, options: Mapping[str, str]) -> str:
    """What each class of devices gets from each option."""
    lines = [["option", "what", *DEVICES_OF.values()]]
    for option, words in options.items():
        found = [setting.estimate(option, measure) for measure in DEVICES_OF]
        lines.append([option, words, *(plus_minus(one) if one else "-" for one in found)])
    return markdown(lines)


def gains(setting: Setting, option: str, baselines: Sequence[str]) -> str:
    """An option against the best baseline of each class: that with the best mean, and in each seed the best there."""
    lines = [["devices", "best baseline", "FedFloor minus it", "seeds above it", "seeds above the best in that seed"]]
    for measure, devices in DEVICES_OF.items():
        best, ours = setting.best(baselines, measure), setting.values[option][measure]
        gap = setting.difference(option, best or "", measure)
        if best is None or gap is None:
            continue
        theirs = [setting.values[arm][measure] for arm in baselines if measure in setting.values[arm]]
        above = sum(ours[seed] > setting.values[best][measure][seed] - NOT_WORSE * (measure == "0") for seed in ours)
        each = sum(ours[seed] > max(own[seed] for own in theirs) - NOT_WORSE * (measure == "0") for seed in ours)
        cells = [plus_minus(gap, "+.1f"), f"{above} of {len(ours)}", f"{each} of {len(ours)}"]
        lines.append([devices, best, *cells])
    return markdown(lines)


def pages(rows: Sequence[Evaluation]) -> dict[Path, str]:
    """All tables, and the first alone with the differences that it is about."""
    read = settings([row for row in rows if is_accuracy(row.metric)], lambda evaluated: evaluated[-1:])
    setting = next(one for one in read if one.metric == "accuracy" + BEST)
    sizes = setting.difference(ALL_LARGE, "allsmall", "2")
    assert sizes is not None
    ours = next(name for name, method in LONGER.items() if method == OURS)
    others = [name for name in LONGER if name != ours]
    seeds, commits = sorted({row.seed for row in rows}), sorted({row.commit for row in rows})
    note = (
        "Test accuracy in percent after the last round, each device with the best of the models that it holds, paired, "
        f"± half width of the 95 % interval over {len(seeds)} seeds. "
        f"With the largest size for everybody it is {plus_minus(sizes, '+.1f')} points above the smallest for all."
    )
    first = [
        table(setting, OPTIONS),
        f"{note} FedFloor minus the best of the first three: {in_words(setting, OURS, list(BASELINES))}. "
        f"Its larger clients make {EPOCHS} epochs in a turn, all others one; if everybody makes {EPOCHS}, also the "
        f"phones: {in_words(setting, ours, others)} ({len(LONGER_SEEDS)} seeds).",
    ]
    text = [
        table(setting, {**OPTIONS, **{name: OPTIONS[of] for name, of in LONGER.items()}}),
        note,
        gains(setting, OURS, list(BASELINES)),
        f"For phones, who get what `allsmall` gives them, a seed counts from -{NOT_WORSE} points on. "
        f"FedFloor's larger clients make {EPOCHS} epochs in a turn, all others one. The stricter reading: "
        f"everybody makes {EPOCHS} and nobody more, also the phones ({len(LONGER_SEEDS)} seeds).",
        gains(setting, ours, others),
        f"`python experiments/demo.py`, commit {', '.join(commits)}.",
    ]
    files = {RECORDS.with_name("demo-first.md"): first, RECORDS.with_suffix(".md"): text}
    return {path: "\n".join(f"{part.strip()}\n" for part in parts) for path, parts in files.items()}


def in_words(setting: Setting, option: str, baselines: Sequence[str]) -> str:
    """What each class gains over its best baseline, in points."""
    found = []
    for measure, devices in DEVICES_OF.items():
        gap = setting.difference(option, setting.best(baselines, measure) or "", measure)
        found += [f"{devices} {plus_minus(gap, '+.1f')}"] if gap else []
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    options = parser.parse_args()
    incofl.compare(list(OPTIONS), "fleet", options.out, seeds=list(SEEDS), jobs=options.jobs)
    more, same = options.out / "longer", [f"local.epochs={EPOCHS}", "anchor.beyond=0"]
    methods = list(LONGER.values())
    incofl.compare(methods, "fleet", more, seeds=list(LONGER_SEEDS), jobs=options.jobs, overrides=same)
    runs = [(seed, name, options.out, name) for seed in SEEDS for name in OPTIONS]
    runs += [(seed, name, more, method) for seed in LONGER_SEEDS for name, method in LONGER.items()]
    rows = []
    for seed, name, folder, method in runs:
        run = RecordedRun(folder_of(folder, (method, seed)))
        rows += evaluations("fleet", name, run, run.outline.levels.counts)
    write_csv(RECORDS, rows)
    for path, text in pages(read_csv(RECORDS)).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
