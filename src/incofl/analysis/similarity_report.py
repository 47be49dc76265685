"""The analysis ``similarity``: of each run its numbers and figures, of several runs how they compare."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from incofl.analysis.findings import Findings, Options, of_each, own_folder
from incofl.analysis.groups import by_seed
from incofl.analysis.runs import Run
from incofl.analysis.similarity import FEWEST_ROUNDS, Similarity, correlate, plain, similarity
from incofl.analysis.similarity_plots import (
    by_depth,
    draw_against_accuracy,
    draw_by_depth,
    draw_groups_by_depth,
    draw_heat_maps,
)
from incofl.engine.checkpoint import write_json

HEADINGS = (
    *("run", "round", "accuracy", "from", "to", "CKA shallow", "deep", "deep, same level", "different levels"),
    *("deep, debiased", "r with accuracy", "rho", "rounds"),
)


def figures(runs: Sequence[Run], out: Path, options: Options | None = None) -> Findings:
    """Compares the clients' models of each run, and several runs with each other."""
    files: list[Path] = []
    found, missing = of_each("similarity", runs, lambda run: similarity(run, options))
    analysed = [run for run in runs if run.folder.path in found]
    for run in analysed:
        files += write_own(run, found[run.folder.path])
        missing += gaps(run, found[run.folder.path])
    if len(analysed) > 1:
        files += write_comparison(analysed, found, out)
    return Findings(
        title="CKA between clients' models, mean over pairs; r and rho over the recorded rounds, at the deepest point",
        table=[HEADINGS, *(cells(run, found[run.folder.path]) for run in analysed)],
        files=files,
        missing=missing,
    )


def write_own(run: Run, result: Similarity) -> list[Path]:
    """What one run shows."""
    folder = own_folder(run)
    paths = [folder / "similarity.json", folder / "similarity.png", folder / "similarity-heatmaps.png"]
    write_json(paths[0], result.to_json())
    draw_by_depth(paths[1], result, run.name)
    draw_heat_maps(paths[2], {run.name: result})
    if len(result.evaluated) > 1:
        paths.append(folder / "similarity-accuracy.png")
        draw_against_accuracy(paths[-1], {run.name: [result]})
    return paths


def write_comparison(runs: Sequence[Run], found: Mapping[Path, Similarity], out: Path) -> list[Path]:
    """What several runs show beside each other: those of one setting and different seeds together."""
    groups = by_seed(runs)
    results = {label: [found[run.folder.path] for run in group] for label, group in groups.items()}
    paths = [out / "similarity.json", out / "similarity.png", out / "similarity-heatmaps.png"]
    write_json(paths[0], compared(groups, results))
    draw_groups_by_depth(paths[1], results)
    draw_heat_maps(paths[2], {label: members[0] for label, members in results.items()})
    courses = {label: members for label, members in results.items() if len(members[0].evaluated) > 1}
    if courses:
        paths.append(out / "similarity-accuracy.png")
        draw_against_accuracy(paths[-1], courses)
    return paths


def compared(groups: Mapping[str, Sequence[Run]], results: Mapping[str, Sequence[Similarity]]) -> dict[str, Any]:
    """The numbers of a comparison.

    Settings; their differences to the first one, paired by seed; and over all runs the correlation of the similarity at
    the deepest point with accuracy.
    """
    first = next(iter(groups))
    reference = {run.config.seed: one for run, one in zip(groups[first], results[first], strict=True)}
    settings, differences = {}, {}
    for label, members in results.items():
        values = by_depth(members)
        settings[label] = {
            "runs": [run.name for run in groups[label]],
            "points": list(members[0].points[: values.shape[1]]),
            "mean_by_depth": [plain(value) for value in values.mean(0)],
            "std_by_depth": [plain(value) for value in values.std(0, ddof=1)] if len(values) > 1 else None,
            "accuracy": [accuracy_of(run, one) for run, one in zip(groups[label], members, strict=True)],
        }
        pairs = [
            (one, reference[run.config.seed])
            for run, one in zip(groups[label], members, strict=True)
            if run.config.seed in reference and one.points == reference[run.config.seed].points
        ]
        if label != first and pairs:
            gap = by_depth([one for one, _ in pairs]) - by_depth([other for _, other in pairs])
            differences[label] = {
                "to": first,
                "seeds": len(pairs),
                "mean_by_depth": [plain(value) for value in gap.mean(0)],
                "higher_in": [int(count) for count in (gap > 0).sum(0)],
            }
    everyone = [(run, one) for label in groups for run, one in zip(groups[label], results[label], strict=True)]
    deep = correlate([one.mean_by_depth[-1] for _, one in everyone], [accuracy_of(*pair) for pair in everyone])
    deep["runs"] = deep.pop("rounds")
    return {"settings": settings, "differences": differences, "deep_similarity_and_accuracy": deep}


def accuracy_of(run: Run, result: Similarity) -> float | None:
    """Of the server, in the round that was analysed."""
    return next((row["accuracy"] for row in run.rows if row["round"] == result.round), None)


def gaps(run: Run, result: Similarity) -> list[str]:
    """What the run does not tell."""
    if len(result.evaluated) >= FEWEST_ROUNDS:
        return []
    why = (
        f"clients of {run.config.method} remember what only the last checkpoint has"
        if result.remembers
        else "run it with record.every"
    )
    return [f"similarity: {run.folder.path}: {len(result.evaluated)} recorded round(s), too few for its course; {why}"]


def cells(run: Run, result: Similarity) -> list[str]:
    """Its line in the table."""
    deep = result.correlation[result.points[-1]]
    numbers = (
        *(result.mean_by_depth[0], result.mean_by_depth[-1], result.within_level[-1]),
        *(result.between_levels[-1], result.debiased_by_depth[-1], deep["pearson"], deep["spearman"]),
    )
    return [
        *(run.name, str(result.round), _cell(accuracy_of(run, result)), result.points[0], result.points[-1]),
        *map(_cell, numbers),
        str(deep["rounds"]),
    ]


def _cell(value: float | None) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.3f}"
