"""Runs a study, as far as its runs are not finished, and compares it with the paper."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from incofl.config import Config
from incofl.engine.checkpoint import write_json
from incofl.engine.run_folder import RunFolder
from incofl.statistics import Difference, paired, tail_mean
from incofl.studies import compare
from incofl.studies.compare import Arm, Estimate, Watch, evaluations, folder_of
from incofl.studies.study import Cell, Scale, Study, run_name

Verdict = Literal["holds", "opposite", "cannot be seen"]
Key = tuple[str, str, str]  # section, row, column


@dataclass(frozen=True)
class Outcome:
    """What a cell came to, in percent.

    Attributes:
        seeds: mean of the last evaluations, for each seed.
        difference: paired difference to the row ``against`` which it is compared.
        theirs: the paper's number.
        verdict: whether the direction of the paper's difference is shown.
    """

    section: str
    row: str
    column: str
    seeds: tuple[float, ...]
    ours: Estimate
    against: str | None
    difference: Difference | None
    theirs: float | None
    their_difference: float | None
    verdict: Verdict | None


def arms_of(table: Sequence[Cell]) -> dict[Arm, Config]:
    """Returns the runs behind a table, each once."""
    return {(run_name(config), seed): config for cell in table for seed, config in cell.configs.items()}


def reproduce(
    table: Sequence[Cell], out: Path, tail: int, *, jobs: int = 1, watch: Watch | None = None
) -> list[Outcome]:
    """Makes the runs of a table that are not finished yet, and judges each by the evaluations in its last rounds.

    Args:
        table: the cells of a study.
        out: folder for the tables and, in ``runs``, the run folders of all studies.
        tail: number of last rounds over which accuracy is averaged.
        jobs: number of runs at a time, each in its own process.
        watch: returns the receiver of a run's progress.
    """
    arms, folder = arms_of(table), out / "runs"
    compare.check_arms(arms)
    compare.run_arms(
        {arm: config for arm, config in arms.items() if not _finished(folder, arm, config)}, folder, jobs, watch
    )
    values = {
        _key(cell): [
            100 * tail_mean(evaluations(folder_of(folder, (run_name(config), seed))), tail)
            for seed, config in cell.configs.items()
        ]
        for cell in table
    }
    paper = {_key(cell): cell.paper for cell in table}
    return [_outcome(cell, values, paper) for cell in table]


def _key(cell: Cell) -> Key:
    return cell.section, cell.row, cell.column


def _finished(folder: Path, arm: Arm, config: Config) -> bool:
    path = RunFolder(folder_of(folder, arm)).summary
    summary = json.loads(path.read_text()) if path.exists() else {}
    return (summary.get("status"), summary.get("rounds")) == ("done", config.rounds)


def _outcome(cell: Cell, values: Mapping[Key, Sequence[float]], paper: Mapping[Key, float | None]) -> Outcome:
    ours = values[_key(cell)]
    difference = theirs = None
    if cell.against is not None:
        other = cell.section, cell.against, cell.column
        difference = paired(ours, values[other])
        base = paper[other]
        theirs = None if cell.paper is None or base is None else round(cell.paper - base, 1)
    claimed = theirs if theirs is not None else {"up": 1.0, "down": -1.0, None: None}[cell.claim]
    verdict, mean = verdict_of(difference, claimed), Estimate.of(ours)
    return Outcome(*_key(cell), tuple(ours), mean, cell.against, difference, cell.paper, theirs, verdict)


def verdict_of(difference: Difference | None, claimed: float | None) -> Verdict | None:
    """Tells whether the 95 % interval of our difference lies on the claimed side of 0, on the other, or on both."""
    if difference is None or not claimed:
        return None
    if difference.half_width is None or abs(difference.mean) <= difference.half_width:
        return "cannot be seen"
    return "holds" if (difference.mean > 0) == (claimed > 0) else "opposite"


def lines(results: Sequence[Outcome]) -> list[list[str]]:
    """Returns the lines of the table, headings first: ours and the paper's side by side, with the paper's arrows."""
    rows = [["section", "method", "setting", "ours", "difference", "visible from", "paper", "verdict"]]
    for result in results:
        gap, difference, visible, theirs = result.difference, "", "", "-"
        if gap is not None:
            half = "" if gap.half_width is None else f" ± {gap.half_width:.1f}"
            difference = f"{arrow(gap.mean)}{half}, {gap.wins} of {len(result.seeds)}"
            visible = "" if gap.visible_from is None else f"{gap.visible_from:.1f}"
        if result.theirs is not None:
            paper_gap = "" if result.their_difference is None else f" ({arrow(result.their_difference)})"
            theirs = f"{result.theirs:g}{paper_gap}"
        ours = compare.plus_minus(result.ours.mean, result.ours.half_width)
        cells = [ours, difference, visible, theirs, result.verdict or ""]
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
    folders = [RunFolder(folder_of(out / "runs", arm)) for arm in arms]
    document = {
        "study": study.name,
        "title": study.title,
        "scale": scale.name,
        "summary": scale.summary,
        "command": command,
        "commits": sorted({str(json.loads(folder.environment.read_text())["commit"]) for folder in folders}),
        "seeds": sorted({seed for _, seed in arms}),
        "seconds": round(sum(float(json.loads(folder.summary.read_text())["seconds"]) for folder in folders), 1),
        "results": [dataclasses.asdict(result) for result in results],
        "runs": {f"{name}-s{seed}": _anywhere(config) for (name, seed), config in arms.items()},
    }
    write_json(out / f"{study.name}.json", document)
    path = out / f"{study.name}.md"
    path.write_text(compare.markdown(lines(results)))
    return path


def _anywhere(config: Config) -> dict[str, Any]:
    """Returns the values of a config without the place of its data, which differs from reader to reader."""
    values = config.to_dict()
    return values | {"data": values["data"] | {"root": Config().data.root}}
