"""What InCo does, and what each size of device gains: a study whose protocol is written before it is run.

Every part is a TOML file in the folder ``parts``: settings (columns), arms (rows), seeds. An arm is judged by what each
level of devices gets, over the last third of the evaluations, against one reference and against the best that the same
fleet can do without slices of one model: its baselines.
"""

import csv
import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from incofl.engine.build import outline
from incofl.engine.run_folder import Row, RunFolder
from incofl.errors import ConfigError, nearest
from incofl.statistics import Difference, Estimate, holm, paired
from incofl.studies.compare import evaluations, folder_of, markdown, plus_minus
from incofl.studies.reproduce import Cell, Scale, Study, is_finished

PARTS = ("a", "b", "c", "d")
NOT_WORSE = -0.5  # points: where the interval of a difference may end that counts as no loss
DEVICES = "devices"  # the measure that is the mean over devices; the others are levels


@dataclass(frozen=True)
class Part:
    """A part of the study."""

    study: Study
    scale: Scale
    reference: str  # the arm with which all are compared
    baselines: tuple[str, ...]  # arms that need no slices of one model


def load_part(letter: str) -> Part:
    """Reads the part of that letter."""
    if letter not in PARTS:
        raise ConfigError(f"--part: got {letter!r}, expected one of {', '.join(PARTS)}{nearest(letter, PARTS)}")
    file = tomllib.loads((resources.files("incofl.studies") / "parts" / f"{letter}.toml").read_text())
    study = Study(f"inco-{letter}", file["title"], file["columns"], file["sections"])
    seeds = list(range(*file["seeds"]))  # the first, and the one after the last
    scale = Scale(f"part {letter}", file["summary"], seeds, 0, {"fleet": file["base"]})
    return Part(study, scale, file["reference"], tuple(file["baselines"]))


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one run: accuracy in percent, for each level that a device can hold."""

    column: str
    arm: str
    metric: str
    seed: int
    round: int
    levels: tuple[float | None, ...]  # what a device gets; none where the arm has no model that it can hold
    devices: float | None  # the mean over devices; none where some get nothing


def collect(table: Sequence[Cell], runs: Path) -> list[Evaluation]:
    """All evaluations of the finished runs of a table."""
    found = []
    for cell in table:
        counts = outline(next(iter(cell.arms.values()))).levels.counts
        for arm, config in cell.arms.items():
            folder = folder_of(runs, arm)
            if not is_finished(folder, config):
                continue
            levels = json.loads(RunFolder(folder).summary.read_text())["levels"]
            for row in evaluations(folder):
                for metric, values in _metrics(row):
                    known = dict(zip(levels, values, strict=True))
                    held = [_held(level, known) for level in range(len(counts))]
                    place = cell.column, cell.row, metric, config.seed, row["round"]
                    found.append(Evaluation(*place, tuple(held), _mean_over_devices(held, counts)))
    return found


def _metrics(row: Row) -> Iterator[tuple[str, list[float]]]:
    yield "accuracy", row["accuracy_by_level"]
    yield from row.get("metrics", {}).items()


def _held(level: int, known: Mapping[int, float]) -> float | None:
    """What a device gets: the largest trained level that it can hold."""
    fits = [other for other in known if other <= level]
    return round(100 * known[max(fits)], 2) if fits else None


def _mean_over_devices(values: Sequence[float | None], counts: Sequence[int]) -> float | None:
    held = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    if any(value is None for value, _ in held):
        return None
    return round(float(np.average([v for v, _ in held if v is not None], weights=[c for _, c in held])), 3)


def write_csv(path: Path, rows: Sequence[Evaluation]) -> None:
    """Writes every evaluation of every seed as a line."""
    levels = max((len(row.levels) for row in rows), default=0)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [f"level {level}" for level in range(levels)]
        writer.writerow(["column", "arm", "metric", "seed", "round", DEVICES, *names])
        for row in rows:
            values = ["" if value is None else value for value in (row.devices, *row.levels)]
            writer.writerow([row.column, row.arm, row.metric, row.seed, row.round, *values])


def read_csv(path: Path) -> list[Evaluation]:
    """Reads what ``write_csv`` wrote."""
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        _, *lines = csv.reader(file)
    for column, arm, metric, seed, round_, *values in lines:
        devices, *levels = (float(value) if value else None for value in values)
        rows.append(Evaluation(column, arm, metric, int(seed), int(round_), tuple(levels), devices))
    return rows


Measure = str  # DEVICES, or the number of a level
Values = dict[int, float]  # by seed


@dataclass(frozen=True)
class Setting:
    """The runs of one column, by one metric: what each arm came to, by measure and seed."""

    column: str
    metric: str
    values: dict[str, dict[Measure, Values]]  # by arm

    @property
    def measures(self) -> list[Measure]:
        return sorted({measure for arm in self.values.values() for measure in arm}, key=lambda m: (m != DEVICES, m))

    @property
    def largest(self) -> Measure:
        return self.measures[-1]

    def estimate(self, arm: str, measure: Measure) -> Estimate | None:
        """The mean over all seeds of an arm."""
        values = self.values.get(arm, {}).get(measure)
        return Estimate.of(list(values.values())) if values else None

    def difference(self, arm: str, other: str, measure: Measure) -> Difference | None:
        """The difference between two arms over the seeds that both have."""
        ours, theirs = (self.values.get(name, {}).get(measure, {}) for name in (arm, other))
        seeds = sorted(ours.keys() & theirs.keys())
        return paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]) if seeds else None

    def best(self, baselines: Sequence[str], measure: Measure) -> str | None:
        """The baseline with the highest mean."""
        means = {arm: found.mean for arm in baselines if (found := self.estimate(arm, measure)) is not None}
        return max(means, key=means.__getitem__) if means else None


def settings(rows: Sequence[Evaluation]) -> list[Setting]:
    """The settings of a part, each arm judged by the mean over the last third of its evaluations."""
    runs: dict[tuple[str, str], dict[tuple[str, int], list[Evaluation]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row.column, row.metric][row.arm, row.seed].append(row)
    found = []
    for (column, metric), of_arms in runs.items():
        values: dict[str, dict[Measure, Values]] = {}
        for (arm, seed), evaluated in of_arms.items():
            judged = sorted(evaluated, key=lambda row: row.round)[-math.ceil(len(evaluated) / 3) :]
            by_measure = {DEVICES: [row.devices for row in judged]}
            by_measure |= {str(level): [row.levels[level] for row in judged] for level in range(len(judged[0].levels))}
            for measure, numbers in by_measure.items():
                known = [number for number in numbers if number is not None]
                if known:
                    values.setdefault(arm, {}).setdefault(measure, {})[seed] = float(np.mean(known))
        found.append(Setting(column, metric, values))
    return found


def gaps(setting: Setting, others: Mapping[str, str], measure: Measure) -> dict[str, tuple[Difference, float]]:
    """The difference of each arm to another, and its p value after Holm's correction over these arms."""
    found = {arm: setting.difference(arm, other, measure) for arm, other in others.items()}
    known = {arm: gap for arm, gap in found.items() if gap is not None}
    corrected = holm([1.0 if gap.p_value is None else gap.p_value for gap in known.values()])
    return {arm: (gap, p) for (arm, gap), p in zip(known.items(), corrected, strict=True)}


def tables(part: Part, rows: Sequence[Evaluation]) -> str:
    """What the study says so far, in Markdown: for each setting two tables."""
    return "\n".join(_setting_tables(part, setting) for setting in settings(rows))


def _setting_tables(part: Part, setting: Setting) -> str:
    measures = [DEVICES, "0", setting.largest]
    headings = ["mean over devices", "smallest", "largest"]
    best = {measure: setting.best(part.baselines, measure) for measure in setting.measures}
    arms = [arm for arm in setting.values if arm not in part.baselines]
    against_reference = [["arm", "seeds", *headings, *(f"{name} minus {part.reference}" for name in headings)]]
    reference_gaps = [
        gaps(setting, {arm: part.reference for arm in arms if arm != part.reference}, measure) for measure in measures
    ]
    for arm in setting.values:
        means = [setting.estimate(arm, measure) for measure in measures]
        cells = [plus_minus(mean) if mean else "-" for mean in means]
        seeds = max(map(len, setting.values[arm].values()))
        against_reference.append([arm, str(seeds), *cells, *(_cell(found.get(arm)) for found in reference_gaps)])
    levels = [measure for measure in setting.measures if best[measure] is not None]
    named = [f"{'mean over devices' if m == DEVICES else f'level {m}'} minus {best[m]}" for m in levels]
    against_best = [["arm", *named, "no level worse", "largest better"]]
    baseline_gaps = {m: gaps(setting, dict.fromkeys(arms, best[m] or ""), m) for m in levels}
    for arm in arms:
        own = {m: baseline_gaps[m].get(arm) for m in levels}
        of_levels = [found[0] for m, found in own.items() if m != DEVICES and found]
        fine = bool(of_levels) and all(gap.mean - (gap.half_width or math.inf) > NOT_WORSE for gap in of_levels)
        top = own.get(setting.largest)
        better = top is not None and top[0].mean > 0 and top[1] < 0.05
        verdict = ["yes" if fine else "no", "yes" if better else "no"]
        against_best.append([arm, *(_cell(own[m]) for m in levels), *verdict])
    title = f"## {setting.column}" + ("" if setting.metric == "accuracy" else f": {setting.metric}")
    return f"{title}\n\n{markdown(against_reference)}\n{markdown(against_best)}"


def _cell(found: tuple[Difference, float] | None) -> str:
    """A difference with its interval, a star where it differs from 0 after correction, and what could be seen."""
    if found is None:
        return "-"
    gap, p = found
    visible = "" if gap.visible_from is None else f" [{gap.visible_from:.1f}]"
    return f"{plus_minus(gap, '+.1f')}{'*' if p < 0.05 else ''}{visible}"


def save(part: Part, table: Sequence[Cell], out: Path, command: str) -> Path:
    """Writes the evaluations of the finished runs as CSV, and what they say as Markdown, which it returns."""
    rows = collect(table, out / "runs")
    write_csv(out / f"{part.study.name}.csv", rows)
    finished = [folder for cell in table for arm in cell.arms if (folder := folder_of(out / "runs", arm)).exists()]
    places = [RunFolder(folder).environment for folder in finished]
    commits = sorted({str(json.loads(path.read_text())["commit"]) for path in places if path.exists()})
    seeds = f"seeds {part.scale.seeds[0]} to {part.scale.seeds[-1]}"
    page = out / f"{part.study.name}.md"
    text = [
        f"# {part.study.title}",
        f"{part.scale.summary}",
        f"`{command}`, {seeds}, commit {', '.join(commits)}.",
        "Test accuracy in percent, mean of the last third of the evaluations, ± half width of the 95 % interval over "
        "the seeds (Student's t, paired). Star: differs from 0 after Holm's correction over the arms. In brackets: the "
        "smallest true difference that the seeds find with 80 % power. No level worse: the interval of every level "
        f"ends above {NOT_WORSE} points. Largest better: corrected.",
        tables(part, rows),
    ]
    page.write_text("\n\n".join(text), encoding="utf-8")
    return page
