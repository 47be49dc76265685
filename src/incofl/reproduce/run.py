"""Runs a study, as far as its runs are not finished, and compares it with the paper."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from incofl.config import Config
from incofl.config.schema import DataConfig
from incofl.engine.checkpoint import write_json
from incofl.engine.compare import Arm, Difference, Spread, check_arms, folder_of, last_ten_of, run_side_by_side
from incofl.engine.records import RunFolder
from incofl.engine.run import Progress, run
from incofl.reproduce.study import Cell, Scale, Study, cells, run_name

Verdict = Literal["holds", "opposite", "cannot be seen"]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell, in percent.

    Attributes:
        ours: mean of the last evaluations, over the seeds.
        difference: paired, to the row that it is compared to.
        theirs: the paper's number.
        their_difference: the paper's difference.
        verdict: whether the direction of the paper's difference is shown.
    """

    section: str
    row: str
    column: str
    seeds: tuple[float, ...]
    ours: Spread
    against: str | None
    difference: Difference | None
    theirs: float | None
    their_difference: float | None
    verdict: Verdict | None


def arms_of(table: Sequence[Cell]) -> dict[Arm, Config]:
    """The runs behind a table, each once."""
    return {(run_name(config), seed): config for cell in table for seed, config in cell.configs.items()}


def reproduce(
    study: Study,
    scale: Scale,
    out: Path,
    *,
    jobs: int = 1,
    overrides: tuple[str, ...] = (),
    seeds: tuple[int, ...] | None = None,
    watch: Callable[[Arm], Progress] | None = None,
) -> list[Outcome]:
    """Makes the runs of a study that are not finished yet, and its table. Started again, it continues.

    Args:
        study: what to run.
        scale: how large.
        out: holds the run folders of all studies, in ``runs``, and the tables.
        jobs: runs at a time, each in a process of its own.
        overrides: further config keys, for all runs.
        seeds: other seeds than the scale's.
        watch: gives whoever watches a run.
    """
    table = cells(study, scale, overrides, seeds)
    arms = arms_of(table)
    check_arms(arms)
    unfinished = {
        arm: config for arm, config in arms.items() if not finished(folder_of(out / "runs", arm), config.rounds)
    }
    if jobs == 1:
        for arm, config in unfinished.items():
            run(config, folder_of(out / "runs", arm), resume=True, progress=watch(arm) if watch else None)
    else:
        for arm in run_side_by_side(unfinished, out / "runs", jobs):
            if watch:
                watch(arm)
    return outcomes(table, out, scale.tail)


def finished(folder: Path, rounds: int) -> bool:
    """Whether a run is done already."""
    summary = RunFolder(folder).summary
    if not summary.exists():
        return False
    found = json.loads(summary.read_text())
    return bool(found["status"] == "done" and found["rounds"] == rounds)


def outcomes(table: Sequence[Cell], out: Path, tail: int) -> list[Outcome]:
    """Reads the runs' records: mean accuracy over the evaluations in the last ``tail`` rounds."""
    values = {
        (cell.section, cell.row, cell.column): [
            100 * last_ten_of(RunFolder(folder_of(out / "runs", (run_name(config), seed))).rows(), tail)
            for seed, config in cell.configs.items()
        ]
        for cell in table
    }
    paper = {(cell.section, cell.row, cell.column): cell.paper for cell in table}
    return [_outcome(cell, values, paper) for cell in table]


def _outcome(
    cell: Cell,
    values: dict[tuple[str, str, str], list[float]],
    paper: dict[tuple[str, str, str], float | None],
) -> Outcome:
    ours = values[cell.section, cell.row, cell.column]
    difference, theirs = None, None
    if cell.against is not None:
        other = cell.section, cell.against, cell.column
        difference = Difference.of(ours, values[other])
        base = paper[other]
        theirs = None if cell.paper is None or base is None else round(cell.paper - base, 1)
    return Outcome(
        cell.section,
        cell.row,
        cell.column,
        tuple(ours),
        Spread.of(ours),
        cell.against,
        difference,
        cell.paper,
        theirs,
        verdict_of(difference, theirs if theirs is not None else {"up": 1.0, "down": -1.0, None: None}[cell.claim]),
    )


def verdict_of(difference: Difference | None, theirs: float | None) -> Verdict | None:
    """Whether the 95 % interval of our difference lies on the paper's side of 0, on the other, or on both."""
    if difference is None or theirs is None or theirs == 0:
        return None
    if difference.half_width is None or abs(difference.mean) <= difference.half_width:
        return "cannot be seen"
    return "holds" if (difference.mean > 0) == (theirs > 0) else "opposite"


def lines(results: Sequence[Outcome]) -> list[list[str]]:
    """The table, headings first: ours and the paper's side by side, with the paper's arrows."""
    several = len({result.section for result in results}) > 1
    rows = [[*(["section"] if several else []), "method", "setting", "ours", "difference [95 %]", "paper", "verdict"]]
    for result in results:
        cells = [*([result.section] if several else []), result.row, result.column]
        spread = "" if result.ours.deviation is None else f" ± {result.ours.deviation:.1f}"
        cells += [f"{result.ours.mean:.1f}{spread}", _gap(result), _theirs(result), result.verdict or ""]
        rows.append(cells)
    return rows


def as_markdown(results: Sequence[Outcome]) -> str:
    """The table in Markdown."""
    head, *rest = lines(results)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rest))


def arrow(value: float) -> str:
    """As the paper prints a difference."""
    return f"{'↑' if value > 0 else '↓' if value < 0 else '='}{abs(value):.1f}"


def _gap(result: Outcome) -> str:
    gap = result.difference
    if gap is None:
        return ""
    interval = "" if gap.half_width is None else f" ± {gap.half_width:.1f}"
    return f"{arrow(gap.mean)}{interval}, {gap.wins} of {len(result.seeds)}"


def _theirs(result: Outcome) -> str:
    if result.theirs is None:
        return "-"
    gap = "" if result.their_difference is None else f" ({arrow(result.their_difference)})"
    return f"{result.theirs:g}{gap}"


def save(
    study: Study, scale: Scale, table: Sequence[Cell], results: Sequence[Outcome], out: Path, command: str
) -> tuple[Path, Path]:
    """Writes the table as Markdown and everything behind it as JSON."""
    arms = arms_of(table)
    commits = sorted({str(_environment(out, arm).get("commit")) for arm in arms})
    document = {
        "study": study.name,
        "title": study.title,
        "scale": scale.name,
        "summary": scale.summary,
        "command": command,
        "commits": commits,
        "seeds": sorted({seed for _, seed in arms}),
        "seconds": round(sum(_seconds(out, arm) for arm in arms), 1),
        "results": [dataclasses.asdict(result) for result in results],
        "runs": {f"{name}-s{seed}": _anywhere(config).to_dict() for (name, seed), config in arms.items()},
    }
    write_json(out / f"{study.name}.json", document)
    markdown = out / f"{study.name}.md"
    markdown.write_text(as_markdown(results))
    return markdown, out / f"{study.name}.json"


def _anywhere(config: Config) -> Config:
    """The config without the place of its data, which is the reader's own."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, root=DataConfig.root))


def _environment(out: Path, arm: Arm) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RunFolder(folder_of(out / "runs", arm)).environment.read_text())
    return found


def _seconds(out: Path, arm: Arm) -> float:
    return float(json.loads(RunFolder(folder_of(out / "runs", arm)).summary.read_text())["seconds"])
