"""What InCo does, and what each size of device gains: a study whose protocol is written before it is run.

Every part is a TOML file in the folder ``parts``: settings (columns), arms (rows), seeds. An arm is judged by what each
level of devices gets, over the last third of the evaluations, against one reference and against the best that the same
fleet can do without slices of one model: its baselines.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from incofl.analysis.runs import RecordedRun
from incofl.config import read_toml
from incofl.engine.build import outline
from incofl.errors import ConfigError
from incofl.statistics import plus_minus
from incofl.studies.compare import folder_of, markdown
from incofl.studies.gains import DEVICES, GAP, NOT_WORSE, Evaluation, evaluations, gain_table, gap_cell, gaps, settings
from incofl.studies.reproduce import Cell, Scale, Study, is_finished, read_table

PARTS = ("a", "b", "c", "d")
KEYS = ("title", "summary", "seeds", "reference", "baselines", "columns", "base", "sections")
NAMES = ("run", "commit", "column", "arm", "metric", "seed", "round")  # the first columns of the records


@dataclass(frozen=True)
class Part:
    """A part of the study."""

    study: Study
    scale: Scale
    reference: str  # the arm with which all are compared
    baselines: tuple[str, ...]  # arms that need no slices of one model


def load_part(name: str) -> Part:
    """Reads the part of that letter, or a TOML file of the same form: a table of your own, named after its folder."""
    own = Path(name) if name.endswith(".toml") else None
    file = read_toml(own) if own else read_table("--part", "parts", name, PARTS)
    if missing := [key for key in KEYS if key not in file]:
        raise ConfigError(f"{name}: expected {', '.join(KEYS)}; {missing[0]!r} is missing")
    title = own.absolute().parent.name if own else f"inco-{name}"
    study = Study(title, file["title"], file["columns"], file["sections"])
    seeds = list(range(*file["seeds"]))  # the first, and the one after the last
    scale = Scale(f"part {name}", file["summary"], seeds, 0, {"fleet": file["base"]})
    return Part(study, scale, file["reference"], tuple(file["baselines"]))


def unrecorded(table: Sequence[Cell], rows: Sequence[Evaluation]) -> list[Cell]:
    """The cells with the runs that are not complete in some records."""
    last = {((row.run, row.seed), row.round) for row in rows}
    left = [{arm: c for arm, c in cell.arms.items() if (arm, c.rounds) not in last} for cell in table]
    return [replace(cell, arms=arms) for cell, arms in zip(table, left, strict=True) if arms]


def collect(table: Sequence[Cell], runs: Path, rows: Sequence[Evaluation] = ()) -> list[Evaluation]:
    """All evaluations of the finished runs of a table: what is recorded in ``rows``, and the rest from run folders."""
    found = []
    left = {cell.place: cell.arms for cell in unrecorded(table, rows)}
    for cell in table:
        for arm, config in cell.arms.items():
            folder = folder_of(runs, arm)
            if arm not in left.get(cell.place, {}):
                same = [row for row in rows if (row.run, row.seed) == arm]
                found += [replace(row, column=cell.column, arm=cell.row) for row in same]
            elif is_finished(folder, config):
                counts = outline(config).levels.counts
                new = evaluations(cell.column, cell.row, RecordedRun(folder), counts)
                found += [replace(row, run=arm[0]) for row in new]
    return found


def write_csv(path: Path, rows: Sequence[Evaluation]) -> None:
    """Writes every evaluation of every seed as a line."""
    levels = max((len(row.levels) for row in rows), default=0)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*NAMES, DEVICES, *(f"level {level}" for level in range(levels))])
        for row in rows:
            values = ["" if value is None else value for value in (row.devices, *row.levels)]
            writer.writerow([*(getattr(row, name) for name in NAMES), *values])


def read_csv(path: Path) -> list[Evaluation]:
    """Reads what ``write_csv`` wrote; nothing if there is no such file."""
    rows = []
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            names = {name: line.pop(name) for name in NAMES}
            seed, round_ = int(names.pop("seed")), int(names.pop("round"))
            devices, *levels = (float(value) if value else None for value in line.values())
            rows.append(Evaluation(**names, seed=seed, round=round_, levels=tuple(levels), devices=devices))
    return rows


def is_accuracy(metric: str) -> bool:
    """Whether a metric is a share of right answers: those are compared, losses are only recorded."""
    return metric.startswith("accuracy")


def tables(part: Part, rows: Sequence[Evaluation]) -> str:
    """What the study says so far, in Markdown: for each setting the gaps to the reference and to the best baseline."""
    pages = []
    for setting in settings([row for row in rows if is_accuracy(row.metric)]):
        measures = {"mean over devices": DEVICES, "smallest": "0", "largest": setting.measures[-1]}
        arms = [arm for arm in setting.values if arm not in (*part.baselines, part.reference)]
        found = [gaps(setting, dict.fromkeys(arms, part.reference), measure) for measure in measures.values()]
        lines = [["arm", "seeds", *measures, *(f"{name} minus {part.reference}" for name in measures)]]
        for arm, values in setting.values.items():
            means = [setting.estimate(arm, measure) for measure in measures.values()]
            seeds = max(map(len, values.values()))
            cells = [plus_minus(mean) if mean else "-" for mean in means]
            lines.append([arm, str(seeds), *cells, *(gap_cell(gap.get(arm)) for gap in found)])
        title = f"## {setting.column}" + ("" if setting.metric == "accuracy" else f": {setting.metric}")
        gains = f"\n{markdown(gain_table(setting, part.baselines))}" if part.baselines else ""
        pages.append(f"{title}\n\n{markdown(lines)}{gains}")
    return "\n".join(pages)


def page(part: Part, rows: Sequence[Evaluation], command: str) -> str:
    """The evaluations of a part as a page in Markdown."""
    commits, seeds = sorted({row.commit for row in rows}), sorted({row.seed for row in rows})
    worse = (
        f" No level worse: the interval of every level ends above {NOT_WORSE} points. Largest better: after correction."
    )
    text = [
        f"# {part.study.title}",
        f"{part.scale.summary} `{command}`, commit {', '.join(commits)}; {len(seeds)} of the seeds "
        f"{part.scale.seeds[0]} to {part.scale.seeds[-1]} have finished runs.",
        "Test accuracy in percent, mean of the last third of the evaluations, ± half width of the 95 % interval over "
        f"the seeds (Student's t, paired). Differences: {GAP}.{worse if part.baselines else ''}",
        tables(part, rows),
    ]
    return "\n\n".join(text)


def records(part: Part, out: Path) -> Path:
    """The file in which a part's evaluations are recorded: a run that is complete there is not made again."""
    return out / f"{part.study.name}.csv"


def save(part: Part, table: Sequence[Cell], out: Path, command: str) -> Path:
    """Writes the evaluations of the finished runs as CSV, and what they say as Markdown, which it returns."""
    path = records(part, out)
    rows = collect(table, out / "runs", read_csv(path))
    write_csv(path, rows)
    path.with_suffix(".md").write_text(page(part, rows, command), encoding="utf-8")
    return path.with_suffix(".md")
