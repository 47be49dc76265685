"""Draws the pictures of README and docs from run folders and committed results.

usage: python docs/pictures.py demo RUN_FOLDER       docs/images/demo.png: accuracy by level over the rounds of one run
       python docs/pictures.py buffers               docs/images/buffers-*.png: from experiments/results/buffers-*.json
       python docs/pictures.py timeline RUN_FOLDER   docs/images/timeline.png: the last round of a run with engine.trace
       python docs/pictures.py analysis RUN_FOLDER   docs/images/analysis-*.png: what incofl analyze drew for one run
       python docs/pictures.py curves NAME           docs/images/NAME.png: from experiments/results/NAME.json (compare)
       python docs/pictures.py updates RUN_FOLDER    docs/images/analysis-*.png: likewise, of updates and coefficients
       python docs/pictures.py observations          docs/images/observations.png: from experiments/results/
       python docs/pictures.py pays                  docs/images/pays.png: from experiments/results/inco-*.csv
       python docs/pictures.py horizon               docs/images/horizon.png: from experiments/results/inco-b.csv
       python docs/pictures.py lora                  docs/images/lora-rules.png: from experiments/results/lora.csv
       python docs/pictures.py privacy               docs/images/privacy.png: from experiments/results/privacy.csv
       python docs/pictures.py attackers             docs/images/attackers.png: from experiments/results/trust.csv
       python docs/pictures.py small                 docs/images/small-clients.png: from benchmarks/results/
       python docs/pictures.py report PAGE.html      docs/images/report.png: the top of a report, as Chromium shows it
"""

import csv
import itertools
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from incofl.statistics import Estimate
from incofl.studies.gains import settings
from incofl.studies.inco import read_csv

HERE = Path(__file__).parent
IMAGES = HERE / "images"
RESULTS = HERE.parent / "experiments" / "results"
# Okabe and Ito's colours: distinguishable with any colour vision.
COLOURS = ["#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"]
mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3})


def save(figure: Figure, name: str) -> None:
    """Writes docs/images/NAME."""
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / name, dpi=110, bbox_inches="tight")


def intervals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over the seeds (rows), and half widths of their 95 % confidence intervals; 0 for one seed."""
    found = [Estimate.of(column) for column in values.T]
    return np.array([one.mean for one in found]), np.array([one.half_width or 0.0 for one in found])


def demo(folder: Path) -> None:
    """Accuracy of each level, and their mean, over the rounds."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [row["round"] for row in rows]
    levels = np.array([row["accuracy_by_level"] for row in rows])
    names = ["ResNet10", "ResNet14", "ResNet18", "ResNet22", "ResNet26"]
    figure = Figure(figsize=(7.5, 3.6))
    axes = figure.subplots()
    for level, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        axes.plot(rounds, levels[:, level], color=colour, lw=1.4, label=name)
    axes.plot(rounds, levels.mean(1), color="black", lw=2.4, label="mean")
    axes.set(xlabel="round", ylabel="test accuracy", ylim=(0, 1))
    axes.set_title("incofl run demo: five sizes of a network, digits, Dirichlet 0.5, fedfloor", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    save(figure, "demo.png")


def small() -> None:
    """Processor time per client against its number of steps, for each way to compute it, and for the peers."""
    results = HERE.parent / "benchmarks" / "results"
    measured = json.loads((results / "small-clients.json").read_text())["measured"]
    models = list(dict.fromkeys(m["model"] for m in measured))
    ways = {"turn": ("o", COLOURS[4]), "bare": ("s", "black"), "side by side": ("D", COLOURS[0])}
    names = {"turn": "turn", "bare": "bare steps", "side by side": "side by side"}
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True)
    for axes, model in zip(panels, models, strict=True):
        own = [m for m in measured if m["model"] == model]
        steps = sorted({m["examples"] * m["epochs"] // 20 for m in own})
        for way, (marker, colour) in ways.items():
            times = [[1000 * m["seconds"][way] for m in own if m["examples"] * m["epochs"] // 20 == n] for n in steps]
            axes.plot(steps, [np.median(t) for t in times], marker=marker, color=colour, label=names[way])
        if model == "tiny-mlp" and (results / "peers-small.json").exists():
            peers = json.loads((results / "peers-small.json").read_text())
            count = peers["settings"]["cohort"] * peers["settings"]["rounds"] / peers["settings"]["workers"]
            for name, mark in (("flower", "^"), ("pfl", "v")):
                spent = {
                    int(examples) * int(epochs) // 20: np.median(
                        [1000 * sum(turn) / count for turn in found["seconds"]]
                    )
                    for work, engines in peers["work"].items()
                    if (found := engines.get(name)) is not None
                    for examples, epochs in [work.split("x")]
                }
                axes.plot(list(spent), list(spent.values()), marker=mark, color=COLOURS[3], ls="--", label=name)
        axes.set(xscale="log", yscale="log", xlabel="steps of a client", title=model)
    panels[0].set_ylabel("ms of a processor per client")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=5)
    save(figure, "small-clients.png")


def observations() -> None:
    """The case study: similarity by depth in each setting with 95 % intervals, and against accuracy over the runs."""
    cases = json.loads((RESULTS / "reproduce-mini-observations.json").read_text())["cases"]
    settings = list(dict.fromkeys(case["setting"] for case in cases))
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, model in zip(panels[:2], ("ResNet", "ViT"), strict=True):
        for setting, colour, marker in zip(settings, COLOURS, "osD^v", strict=True):
            own = [case["cka"] for case in cases if (case["model"], case["setting"]) == (model, setting)]
            mean, half = intervals(np.array(own))
            depth = np.arange(1, len(mean) + 1)
            axes.errorbar(depth, mean, half, color=colour, marker=marker, capsize=3, lw=1.5, ms=5, label=setting)
        where = "stage" if model == "ResNet" else "block that all clients have"
        axes.set(
            xlabel=where,
            ylabel="mean CKA over pairs of clients",
            ylim=(0.4, 1.05),
            xticks=range(1, 5 if model == "ResNet" else 7),
        )
        axes.set_title(f"{model}: similarity by depth", loc="left", fontsize=10)
    for setting, colour, marker in zip(settings, COLOURS, "osD^v", strict=True):
        own = [case for case in cases if (case["model"], case["setting"]) == ("ResNet", setting)]
        x, y = [100 * case["accuracy"] for case in own], [case["cka"][-1] for case in own]
        panels[2].scatter(x, y, color=colour, marker=marker, s=36)
    panels[2].set(xlabel="test accuracy, percent", ylabel="CKA of the last stage")
    panels[2].set_title("ResNet: each run at its end", loc="left", fontsize=10)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )
    save(figure, "observations.png")


def pays() -> None:
    """When slices pay: what the devices of each setting gain, ordered by how much a larger model alone is better."""
    known = [(part, s) for part in "abcd" for s in settings(read_csv(RESULTS / f"inco-{part}.csv"))]
    known = [(part, s) for part, s in known if "FedFloor" in s.values and "largestonly" in s.values]
    by_place = {(f"{part}: {setting.column}", setting.metric): setting for part, setting in known}
    sizes = {
        column: size.mean
        for (column, metric), setting in by_place.items()
        if metric == "accuracy" and (size := setting.difference("largestonly", "allsmall", setting.measures[-1]))
    }
    columns = sorted(sizes, key=sizes.__getitem__)
    figure = Figure(figsize=(10, 1.4 + 0.4 * len(columns)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    own, best_path = "accuracy", "accuracy_best_path"
    drawn = [
        (0, own, "HeteroAvg", "mean over devices", "s", COLOURS[3]),
        (1, best_path, "FedFloor", "largest devices", "^", COLOURS[4]),
        (1, best_path, "FedFloor", "smallest devices", "o", COLOURS[0]),
    ]
    for panel, metric, arm, who, marker, colour in drawn:
        gaps: list[Any] = []
        for column in columns:
            if (setting := by_place.get((column, metric))) is None:
                gaps.append(None)
                continue
            measure = {"mean over devices": "devices", "smallest devices": "0"}.get(who, setting.measures[-1])
            best = setting.best(["allsmall", "largestonly", "fedavg"], measure)
            gaps.append(setting.difference(arm, best, measure) if best else None)
        rows = [(row, gap) for row, gap in enumerate(gaps) if gap is not None]
        means, halves = [gap.mean for _, gap in rows], [gap.half_width or 0 for _, gap in rows]
        where, style = [row for row, _ in rows], {"fmt": marker, "color": colour, "ms": 6, "capsize": 2}
        panels[panel].errorbar(means, where, xerr=halves, label=who, **style)
    panels[0].set_yticks(range(len(columns)), [f"{column} ({sizes[column]:+.0f})" for column in columns])
    panels[0].set_ylabel("setting (largest size alone minus smallest)")
    titles = ("HeteroAvg: slices of one model", "FedFloor, devices use the best model that they hold")
    for axes, title in zip(panels, titles, strict=True):
        axes.axvline(0, color="black", lw=1)
        axes.set(xlabel="points above the best of the three baselines")
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=9)
    save(figure, "pays.png")


def horizon() -> None:
    """Over many rounds: each arm minus HeteroAvg, and minus everybody the smallest, mean and range of the seeds."""
    rows = [row for row in read_csv(RESULTS / "inco-b.csv") if row.metric == "accuracy"]
    values = {(row.arm, row.seed, row.round): row.devices for row in rows if row.devices is not None}
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    shown = {"HeteroAvg": ["released", "FedFloor", "allsmall"], "allsmall": ["HeteroAvg", "FedFloor", "fedavg"]}
    for axes, (other, arms) in zip(figure.subplots(1, 2, sharey=True), shown.items(), strict=True):
        for arm, colour in zip(arms, [COLOURS[0], COLOURS[4], COLOURS[2]], strict=True):
            rounds = sorted({round for name, _, round in values if name == arm})
            seeds = sorted({seed for name, seed, _ in values if name == arm})
            gaps = np.array([[values[arm, s, r] - values[other, s, r] for r in rounds] for s in seeds])
            axes.plot(rounds, gaps.mean(0), color=colour, label=arm)
            axes.fill_between(rounds, gaps.min(0), gaps.max(0), color=colour, alpha=0.2, lw=0)
        axes.axhline(0, color="black", lw=1)
        axes.set(xlabel="round", ylabel=f"points above {other}, mean over devices")
        axes.legend(frameon=False, fontsize=9)
    save(figure, "horizon.png")


def lora() -> None:
    """Rules for adapters: accuracy of each arm, with 95 % intervals, against the bytes of a client's turn."""
    with (RESULTS / "lora.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tasks = {"text": "SST-2 after IMDb", "image": "Fashion-MNIST after CIFAR-10"}
    last = sorted({int(row["round"]) for row in rows})[-2:]  # the evaluations that judge
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (task, title) in zip(figure.subplots(1, 2), tasks.items(), strict=True):
        found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            if row["task"] == task and int(row["round"]) in last:
                sent = (int(row["bytes_up"]) + int(row["bytes_down"])) / int(row["turns"]) / 1e3
                found[row["arm"]][row["seed"]].append((100 * float(row["accuracy"]), sent))
        for arm, seeds in found.items():
            means = np.array([np.mean(own, axis=0) for own in seeds.values()])
            mean, half = intervals(means)
            plain = arm.startswith(("equal", "full"))
            axes.errorbar(mean[1], mean[0], half[0], fmt="s" if plain else "o", color=COLOURS[4 if plain else 0], ms=5)
            axes.annotate(arm, (mean[1], mean[0]), xytext=(4, 3), textcoords="offset points", fontsize=7)
        axes.set(xscale="log", xlabel="kB of a client's turn, down and up", ylabel="test accuracy, percent")
        axes.set_title(title, loc="left", fontsize=10)
    save(figure, "lora-rules.png")


def privacy() -> None:
    """Accuracy against epsilon: slices of one model by level, and everybody the smallest."""
    lines = {
        "smallest level": ("heteroavg", "0", COLOURS[0], "-"),
        "largest level": ("heteroavg", "2", COLOURS[4], "-"),
        "everybody the smallest": ("allsmall", "0", "black", "--"),
    }
    columns = settings(read_csv(RESULTS / "privacy.csv"))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True)
    for axes, setting in zip(panels, columns, strict=True):
        for label, (method, level, colour, dashes) in lines.items():
            arms = [arm for arm in setting.values if arm.startswith(method)]
            mean, half = intervals(np.array([list(setting.values[arm][level].values()) for arm in arms]).T)
            axes.errorbar(range(len(arms)), mean, half, ls=dashes, marker="o", ms=4, color=colour, label=label)
            axes.set_xticks(range(len(arms)), [arm.partition(", ")[2].removeprefix("epsilon ") for arm in arms])
        axes.set(xlabel="epsilon", title=setting.column)
    panels[0].set_ylabel("test accuracy, percent")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=3)
    save(figure, "privacy.png")


def attackers() -> None:
    """Accuracy against the share of attackers, by robust mean: three attacks of clients, two data sets."""
    shown = {"sign-flip": "sign flippers", "scaling": "scalers", "label-flip": "label flippers"}
    runs = [row for row in csv.DictReader((RESULTS / "trust.csv").read_text().splitlines()) if row["inco"] == "no"]
    runs = [row for row in runs if row["fleet"] == "equal" and (row["attack"] in shown or not row["attack"])]
    rules = ("mean", "clipping", "trimmed", "median", "krum", "centred", "krum among all")
    figure = Figure(figsize=(9, 5), layout="constrained")
    sets = sorted({row["data"] for row in runs})
    panels = figure.subplots(len(sets), len(shown), sharex=True, sharey="row", squeeze=False)
    for (data, attack), axes in zip(itertools.product(sets, shown), panels.flat, strict=True):
        for rule, marker in zip(rules, "osv^Dx*", strict=True):
            values = defaultdict[float, list[float]](list)
            for row in runs:
                if (row["data"], row["rule"]) == (data, rule) and row["attack"] in ("", attack):
                    values[100 * float(row["share"])].append(float(row["accuracy"]))
            shares = sorted(values)
            mean, half = intervals(np.array([values[share] for share in shares]).T)
            axes.errorbar(shares, mean, half, marker=marker, ms=4, label=rule)
        axes.set_title(f"{data}: {shown[attack]}", loc="left", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("attackers, percent of the clients")
    for axes in panels[:, 0]:
        axes.set_ylabel("test accuracy, percent")
    figure.legend(*panels[0][0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=7)
    save(figure, "attackers.png")


def curves(name: str) -> None:
    """Accuracy over the rounds of a comparison: the mean over the levels by method, and the levels of the last one."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for run in document["curves"]:
        found[run["method"]].append(np.array([row["accuracy_by_level"] for row in run["rows"]]))
    rounds = [row["round"] for row in document["curves"][0]["rows"]]
    figure = Figure(figsize=(9, 3.4))
    left, right = figure.subplots(1, 2, sharey=True)
    for (method, runs), colour, dashes in zip(found.items(), (COLOURS[4], COLOURS[0]), ("--", "-"), strict=True):
        means = np.stack(runs).mean(2)  # (seed, round)
        mean, half = intervals(means)
        left.plot(rounds, mean, color=colour, ls=dashes, lw=2, marker="o", ms=4, label=method)
        left.fill_between(rounds, mean - half, mean + half, color=colour, alpha=0.15, lw=0)
    left.set(xlabel="round", ylabel="test accuracy", xticks=rounds)
    left.set_title("mean of the levels; bands: 95 % intervals", loc="left", fontsize=10)
    left.legend(frameon=False, fontsize=9, loc="lower right")
    levels = np.stack(runs).mean(0)  # (round, level)
    for level, colour in zip(range(levels.shape[1]), COLOURS, strict=False):
        right.plot(rounds, levels[:, level], color=colour, lw=1.6, marker="o", ms=4, label=f"level {level}")
    right.set(xlabel="round", xticks=rounds)
    right.set_title(f"{method}, each level, mean of the seeds", loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=9, loc="lower right")
    save(figure, f"{name}.png")


def buffers(data: str) -> None:
    """Mean over the levels, and the smallest level, under both policies; bands: 95 % confidence interval."""
    runs: list[dict[str, Any]] = json.loads((RESULTS / f"buffers-{data}.json").read_text())
    curves: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    for run in runs:
        curves[run["buffers"], run["method"]].append(np.array([row["accuracy_by_level"] for row in run["rows"]]))
    rounds = [row["round"] for row in runs[0]["rows"]]
    figure = Figure(figsize=(9, 3.4))
    panels = figure.subplots(1, 2, sharey=True)
    styles = {"average": ("#D55E00", "average"), "per-level": ("#0072B2", "per-level")}
    for axes, title, smallest in ((panels[0], "mean of the five levels", False), (panels[1], "smallest level", True)):
        for (policy, method), stack in sorted(curves.items()):
            by_level = np.stack(stack)  # (seeds, evaluations, levels)
            values = by_level[:, :, 0] if smallest else by_level.mean(2)
            colour, label = styles[policy]
            line = "-" if method == "incoavg" else "--"
            mean, half = intervals(values)
            axes.plot(rounds, mean, line, color=colour, lw=1.8, label=f"{method}, {label}")
            axes.fill_between(rounds, mean - half, mean + half, color=colour, alpha=0.08, lw=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("round")
    panels[0].set(ylabel="test accuracy", ylim=(0, None))
    panels[1].legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, f"buffers-{data}.png")


def timeline(folder: Path) -> None:
    """Who did what when in the last round, with its end enlarged: what a round does in addition to training."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    who = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(e["ts"] / 1e6, e["dur"] / 1e6, e["name"], who[e["tid"]]) for e in events if e["ph"] == "X"]
    start = max(ts for ts, _, name, _ in spans if name == "schedule")
    spans = [(ts - start, duration, name, track) for ts, duration, name, track in spans if ts >= start]
    trained = max(ts + duration for ts, duration, name, _ in spans if name.startswith("client"))
    end = max(ts + duration for ts, duration, *_ in spans)
    tracks = sorted({track for *_, track in spans}, reverse=True)
    server = {"add up": "#CC79A7", "mean, transforms": "#000000", "records, checkpoint": "#999999"}
    figure = Figure(figsize=(9, 3.4))
    whole, close = figure.subplots(1, 2, width_ratios=[2.6, 1])
    for axes in (whole, close):
        for ts, duration, name, track in spans:
            at = tracks.index(track)
            colour = server.get(name, "#999999") if track == "server" else COLOURS[int(name.rpartition(" ")[2])]
            hatch = "//" if name.startswith("evaluation") else None
            axes.barh(at, duration, 0.7, ts, color=colour, hatch=hatch, edgecolor="white", lw=0.6 * (track != "server"))
            if axes is whole and name.startswith("client") and duration > end / 18:
                number = name.split()[1].strip(",")
                axes.text(ts + duration / 2, at, number, ha="center", va="center", color="white", fontsize=7)
        axes.set_yticks(range(len(tracks)), tracks if axes is whole else [""] * len(tracks))
        axes.set_xlabel("seconds")
        axes.grid(axis="y", visible=False)
    whole.set_xlim(0, end)
    whole.set_title("one round: clients by number, coloured by level; hatched: evaluation", loc="left", fontsize=9)
    close.set_xlim(trained - 0.12, trained + 0.12)
    close.set_title("the end of training, enlarged", loc="left", fontsize=9)
    handles = [Patch(color=colour, label=f"level {level}") for level, colour in enumerate(COLOURS)]
    handles += [Patch(color=colour, label=name) for name, colour in server.items()]
    figure.legend(handles=handles, loc="lower center", ncols=8, fontsize=7, frameon=False, bbox_to_anchor=(0.5, -0.08))
    save(figure, "timeline.png")


def report(page: Path) -> None:
    """The top of a page that incofl report wrote."""
    options = [
        "--headless=new",
        "--no-sandbox",
        "--hide-scrollbars",
        "--window-size=1280,1290",
        "--virtual-time-budget=9000",
    ]
    picture = f"--screenshot={IMAGES / 'report.png'}"
    subprocess.run(["chromium", *options, picture, page.resolve().as_uri()], check=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["demo", folder]:
            demo(Path(folder))
        case ["buffers"]:
            for path in sorted(RESULTS.glob("buffers-*.json")):
                buffers(path.stem.removeprefix("buffers-"))
        case ["timeline", folder]:
            timeline(Path(folder))
        case ["analysis", folder]:
            for name in ("similarity", "similarity-heatmaps", "similarity-accuracy", "features"):
                shutil.copy(Path(folder) / "analysis" / f"{name}.png", IMAGES / f"analysis-{name}.png")
        case ["pays"]:
            pays()
        case ["horizon"]:
            horizon()
        case ["lora"]:
            lora()
        case ["small"]:
            small()
        case ["privacy"]:
            privacy()
        case ["attackers"]:
            attackers()
        case ["observations"]:
            observations()
        case ["updates", folder]:
            for name in ("updates", "coefficients"):
                shutil.copy(Path(folder) / "analysis" / f"{name}.png", IMAGES / f"analysis-{name}.png")
        case ["curves", name]:
            curves(name)
        case ["report", page]:
            report(Path(page))
        case _:
            sys.exit(__doc__)
