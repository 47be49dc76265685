"""The paper's tables: rows under columns, each cell a config, run as far as it is not finished, beside their numbers.

Studies say what is compared, scales how large the runs are; both are TOML files in this folder. A run belongs to a
scale, not to a study: what several tables need is run once.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from incofl.analysis.runs import RecordedRun
from incofl.config import Config, make_config
from incofl.engine.files import read_json
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError, nearest
from incofl.statistics import Difference, Estimate, paired, plus_minus, tail_mean
from incofl.studies.compare import Arm, Watch, folder_of, run_arms, write_tables

STUDIES = ("table1", "table2", "case-study", "ablation", "robustness", "noise", "rules", "buffers")
SCALES = ("mini", "small", "paper")
Verdict = Literal["holds", "opposite", "inconclusive"]
INCONCLUSIVE: Verdict = "inconclusive"  # our interval holds 0: neither the claim nor its opposite
Place = tuple[str, str, str]  # section, row, column


@dataclass(frozen=True)
class Study:
    """A table of the paper, as its TOML file has it."""

    name: str
    title: str
    columns: dict[str, list[str]]  # config keys of each column
    sections: list[dict[str, Any]]  # each with the name of its base config and its rows
    scales: dict[str, list[str]] = field(default_factory=dict)  # columns of the scales that do not have all
    note: str = ""  # what a reader must know


@dataclass(frozen=True)
class Scale:
    """The size of runs, as its TOML file has it."""

    name: str
    summary: str
    seeds: list[int]
    tail: int  # number of last rounds over which accuracy is averaged
    base: dict[str, dict[str, Any]]  # base configs by name


def load_study(name: str) -> Study:
    """Reads the study of that name."""
    return Study(name, **read_table("NAME", "tables", name, STUDIES))


def load_scale(name: str) -> Scale:
    """Reads the scale of that name."""
    return Scale(name, **read_table("--scale", "scales", name, SCALES))


def read_table(option: str, folder: str, name: str, known: Sequence[str]) -> dict[str, Any]:
    """Reads a TOML file of a folder beside this one, of a name that an option gave."""
    if name not in known:
        raise ConfigError(f"{option}: got {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    return tomllib.loads((resources.files("incofl.studies") / folder / f"{name}.toml").read_text())


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    section: str
    row: str
    column: str
    against: str | None  # the row of the section with which it is compared
    paper: float | None  # the paper's number
    claim: Literal["up", "down"] | None  # how the paper says that it differs, where it gives no numbers
    arms: dict[Arm, Config]  # a run for each seed

    @property
    def place(self) -> Place:
        return self.section, self.row, self.column


def cells(study: Study, scale: Scale, overrides: Sequence[str] = (), seeds: Sequence[int] | None = None) -> list[Cell]:
    """Returns all cells of a study at a scale; cells of one seed differ only in the keys of their row and column."""
    found = []
    for section, row in [(part, row) for part in study.sections for row in part["rows"]]:
        paper = dict(zip(study.columns, row.get("paper", ["none"] * len(study.columns)), strict=True))
        for column in section.get("columns", study.scales.get(scale.name, study.columns)):
            keys, base = [*study.columns[column], *row["set"]], scale.base[section["base"]]
            configs = [make_config(base, [*keys, f"seed={seed}", *overrides]) for seed in seeds or scale.seeds]
            arms = {(run_name(config), config.seed): config for config in configs}
            number = None if paper[column] == "none" else paper[column]
            place = section["name"], row["name"], column
            found.append(Cell(*place, row.get("against"), number, row.get("claim"), arms))
    return found


def run_name(config: Config) -> str:
    """Names a run by everything that determines it except the seed, so that studies share it."""
    # Places and processes do not make a run, precision does; keys at their defaults are left out, so that new ones
    # rename no run.
    try:
        defaults = make_config({"method": config.method}).flat()
    except ConfigError:  # what is added to the method cannot be without some option
        defaults = make_config({"method": config.method.partition("+")[0]}).flat()
    defaults["eval.best_path"] = False  # whatever the method says
    values = {
        key: value
        for key, value in config.flat().items()
        if value != defaults.get(key)
        and (key == "engine.precision" or not key.startswith(("seed", "engine.", "data.root")))
    }
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{config.method}-{digest}"


def arms_of(table: Sequence[Cell]) -> dict[Arm, Config]:
    """Returns the runs behind a table, each once: seed by seed, so that what is finished can be compared."""
    runs = [(cell.column, arm, config) for cell in table for arm, config in cell.arms.items()]
    columns = list(dict.fromkeys(column for column, _, _ in runs))
    runs.sort(key=lambda run: (columns.index(run[0]), run[2].seed))
    return {arm: config for _, arm, config in runs}


@dataclass(frozen=True)
class Outcome:
    """What a cell came to, in percent."""

    section: str
    row: str
    column: str
    seeds: list[float]  # mean of the last evaluations, for each seed
    ours: Estimate
    against: str | None
    difference: Difference | None  # to the row ``against`` which it is compared, paired by seed
    theirs: float | None  # the paper's number
    their_difference: float | None
    verdict: Verdict | None  # whether the direction of the paper's difference is shown


def run_table(table: Sequence[Cell], out: Path, jobs: int, watch: Watch) -> None:
    """Makes the runs of a table that are not finished."""
    folder = out / "runs"
    left = {arm: config for arm, config in arms_of(table).items() if not is_finished(folder_of(folder, arm), config)}
    run_arms(left, folder, jobs, watch)


def judge(table: Sequence[Cell], out: Path, tail: int) -> list[Outcome]:
    """Judges each finished run of a table by its last rounds."""
    runs = {arm: RecordedRun(folder_of(out / "runs", arm)) for arm in arms_of(table)}
    accuracy = {arm: 100 * tail_mean(run.evaluated, tail) for arm, run in runs.items()}
    values = {cell.place: [accuracy[arm] for arm in cell.arms] for cell in table}
    paper = {cell.place: cell.paper for cell in table}
    return [_outcome(cell, values, paper) for cell in table]


def is_finished(folder: Path, config: Config) -> bool:
    """Whether the run of a config is complete."""
    path = RunFolder(folder).summary
    summary = read_json(path, "delete it, and the run is resumed") if path.exists() else {}
    return (summary.get("status"), summary.get("rounds")) == ("done", config.rounds)


def _outcome(cell: Cell, values: Mapping[Place, list[float]], paper: Mapping[Place, float | None]) -> Outcome:
    ours, difference, theirs = values[cell.place], None, None
    if cell.against is not None:
        other = cell.section, cell.against, cell.column
        difference, base = paired(ours, values[other]), paper[other]
        theirs = None if cell.paper is None or base is None else round(cell.paper - base, 1)
    claimed = theirs if theirs is not None else {"up": 1.0, "down": -1.0, None: None}[cell.claim]
    verdict, mean = verdict_of(difference, claimed), Estimate.of(ours)
    return Outcome(*cell.place, ours, mean, cell.against, difference, cell.paper, theirs, verdict)


def verdict_of(difference: Difference | None, claimed: float | None) -> Verdict | None:
    """Tells whether the 95 % interval of our difference lies on the claimed side of 0, on the other, or on both."""
    if difference is None or not claimed:
        return None
    if difference.half_width is None or abs(difference.mean) <= difference.half_width:
        return INCONCLUSIVE
    return "holds" if (difference.mean > 0) == (claimed > 0) else "opposite"


def lines(results: Sequence[Outcome]) -> list[list[str]]:
    """Returns the lines of the table, headings first: ours and the paper's side by side, with the paper's arrows."""
    rows = [["section", "method", "setting", "ours", "difference", "visible from", "paper", "verdict"]]
    for result in results:
        gap, difference, visible, theirs, verdict = result.difference, "", "", "-", str(result.verdict or "")
        if gap is not None:
            half = "" if gap.half_width is None else f" ± {gap.half_width:.1f}"
            difference = f"{arrow(gap.mean)}{half}, {gap.wins} of {len(result.seeds)}"
            visible = "" if gap.visible_from is None else f"{gap.visible_from:.1f}"
            verdict += f" (could have seen {visible} points)" if verdict == INCONCLUSIVE and visible else ""
        if result.theirs is not None:
            paper_gap = "" if result.their_difference is None else f" ({arrow(result.their_difference)})"
            theirs = f"{result.theirs:g}{paper_gap}"
        cells = [plus_minus(result.ours), difference, visible, theirs, verdict]
        rows.append([result.section, result.row, result.column, *cells])
    several = len({result.section for result in results}) > 1
    return rows if several else [row[1:] for row in rows]


def arrow(value: float) -> str:
    """Writes a difference as the paper prints it."""
    return f"{'↑' if value > 0 else '↓' if value < 0 else '='}{abs(value):.1f}"


def save(
    study: Study, scale: Scale, table: Sequence[Cell], results: Sequence[Outcome], out: Path, command: str
) -> Path:
    """Writes the table as Markdown and everything behind it as JSON."""
    arms = arms_of(table)
    made = [RecordedRun(folder_of(out / "runs", arm)) for arm in arms]
    runs = {f"{name}-s{seed}": config.to_dict() for (name, seed), config in arms.items()}
    for values in runs.values():
        values["data"] |= {"root": Config().data.root}  # the place of the data differs from reader to reader
    document = {
        "study": study.name,
        "title": study.title,
        "scale": scale.name,
        "summary": scale.summary,
        "command": command,
        "commits": sorted({str(run.json("environment.json")["commit"]) for run in made}),
        "seeds": sorted({seed for _, seed in arms}),
        "seconds": round(sum(float(run.json("summary.json")["seconds"]) for run in made), 1),
        "results": list(map(asdict, results)),
        "runs": runs,
    }
    return write_tables(out / study.name, lines(results), document)
