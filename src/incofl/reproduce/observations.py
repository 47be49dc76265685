"""The paper's four observations about its case study, each as a number with its spread.

1. Deep layers of clients' models are less similar than shallow ones.
2. Accuracy and similarity go together.
3. Updates of shallow layers are smoother than those of deep ones.
4. InCo raises the similarity of deep layers.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from incofl.analysis.analyze import Options
from incofl.analysis.runs import RecordedRun
from incofl.analysis.similarity import similarity
from incofl.analysis.updates import layers, shallow_smoother
from incofl.engine.checkpoint import write_json
from incofl.engine.compare import Difference, Spread, folder_of, last_ten_of
from incofl.engine.records import environment
from incofl.reproduce.study import Cell, run_name
from incofl.statistics import correlation

VERSION = 1  # of what is kept of a run's analysis: change it with the analysis
FEWEST_PAIRS = 20  # of which a share says something
HISTORY = 4  # recorded rounds of each run in which clients are compared


@dataclass(frozen=True)
class Case:
    """What a run of the case study shows.

    Attributes:
        model: the section of the study.
        setting: the row.
        seed: of the run.
        accuracy: mean of the last evaluations.
        cka: mean over the pairs of clients, from shallow to deep, as the paper computes it.
        debiased: the same by the estimate without the bias of few examples and many features.
        correlation: Pearson's, of accuracy and the CKA of the deepest point, over the recorded rounds.
        smoother: the share of (deep layer, round) pairs in which the shallow layer's update is less rough.
        pairs: how many pairs there are.
    """

    model: str
    setting: str
    seed: int
    accuracy: float
    cka: tuple[float, ...]
    debiased: tuple[float, ...]
    correlation: float | None
    smoother: float | None
    pairs: int


def look(cell: Cell, seed: int, folder: Path, tail: int, watch: Callable[[str], None]) -> Case:
    """Analyses one run; what was found before is read again."""
    run = RecordedRun.open(folder)
    path = folder / "analysis" / "case.json"
    key = {"version": VERSION, "round": run.recorded[-1], "history": HISTORY}
    known = json.loads(path.read_text()) if path.exists() else {}
    if key.items() <= known.items():
        numbers = known
    else:
        found = similarity(run, Options(history=HISTORY, watch=watch))
        smoother = shallow_smoother(layers(run)[0], "roughness")
        numbers = key | {
            "cka": [float(value) for value in found.mean_by_depth if value is not None],
            "debiased": [float(value) for value in found.debiased_by_depth if value is not None],
            "correlation": found.correlation[found.points[-1]].pearson,
            "smoother": smoother.pairs.share,
            "pairs": smoother.pairs.wins + smoother.pairs.losses,
        }
        write_json(path, numbers)
    return Case(
        cell.section,
        cell.row,
        seed,
        last_ten_of(run.rows, tail),
        tuple(numbers["cka"]),
        tuple(numbers["debiased"]),
        numbers["correlation"],
        numbers["smoother"],
        numbers["pairs"],
    )


def cases(table: Sequence[Cell], out: Path, tail: int, watch: Callable[[str], None]) -> list[Case]:
    """Analyses all runs of the case study."""
    return [
        look(cell, seed, folder_of(out / "runs", (run_name(config), seed)), tail, watch)
        for cell in table
        for seed, config in cell.configs.items()
    ]


@dataclass(frozen=True)
class Observation:
    """One observation on one group of runs: what the number is, the number, and whether it shows the observation."""

    number: int
    model: str
    what: str
    value: str
    verdict: str


def observe(found: Sequence[Case]) -> list[Observation]:
    """Tests the observations on each model."""
    return [
        observation
        for model in dict.fromkeys(case.model for case in found)
        for observation in _observe(model, [case for case in found if case.model == model])
    ]


def _observe(model: str, found: list[Case]) -> Iterator[Observation]:
    for setting in dict.fromkeys(case.setting for case in found):
        own = [case for case in found if case.setting == setting]
        for kind, values in _both(own):
            gap = Difference.of([cka[-1] for cka in values], [cka[0] for cka in values])
            ends = " to ".join(f"{Spread.of([cka[end] for cka in values]).mean:.2f}" for end in (0, -1))
            what = f"{setting}: {kind}, last minus first of {len(values[0])} points in common ({ends})"
            yield Observation(1, model, what, *_down(gap))
    inside = [case.correlation for case in found if case.correlation is not None]
    if len(inside) > 1:
        positive = sum(value > 0 for value in inside)
        gap = Difference.of(inside, [0.0] * len(inside))
        what = f"correlation of accuracy and the last point's CKA over {HISTORY} rounds of a run"
        yield Observation(2, model, f"{what} (positive in {positive} of {len(inside)})", *_up(gap))
    # Unequal models have only their first blocks in common: settings are compared where all have a value.
    shared = min(len(case.cka) for case in found) - 1
    where = f"point {shared + 1} of {max(len(case.cka) for case in found)}"
    across = correlation([case.cka[shared] for case in found], [case.accuracy for case in found]).pearson
    if across is not None and len(found) > 3:
        what = f"correlation of accuracy and CKA at {where} over the {len(found)} runs of all settings, at their end"
        low, high = fisher_interval(across, len(found))
        verdict = "holds" if low > 0 else "opposite" if high < 0 else "cannot be seen"
        yield Observation(2, model, what, f"{across:+.2f} [{low:+.2f}, {high:+.2f}]", verdict)
    for setting in dict.fromkeys(case.setting for case in found):
        own = [case for case in found if case.setting == setting]
        shares, pairs = [case.smoother for case in own if case.smoother is not None], min(case.pairs for case in own)
        if len(shares) > 1:
            what = f"{setting}: share of pairs in which the shallow update is less rough, minus a half ({pairs} pairs)"
            text, verdict = _up(Difference.of(shares, [0.5] * len(shares)))
            yield Observation(3, model, what, text, verdict if pairs >= FEWEST_PAIRS else "too few pairs")
    with_inco, without = (
        sorted((case for case in found if case.setting == name), key=lambda case: case.seed)
        for name in ("InCoAvg", "HeteroAvg")
    )
    if [case.seed for case in with_inco] == [case.seed for case in without] != []:
        for (kind, ours), (_, theirs) in zip(_both(with_inco), _both(without), strict=True):
            gap = Difference.of([cka[shared] for cka in ours], [cka[shared] for cka in theirs])
            yield Observation(4, model, f"{kind} at {where}, InCoAvg minus HeteroAvg", *_up(gap))


def fisher_interval(r: float, points: int) -> tuple[float, float]:
    """The 95 % interval of a correlation, by Fisher's transformation."""
    centre, half = math.atanh(min(max(r, -0.999999), 0.999999)), 1.96 / math.sqrt(points - 3)
    return math.tanh(centre - half), math.tanh(centre + half)


def _both(found: Sequence[Case]) -> list[tuple[str, list[tuple[float, ...]]]]:
    """Similarity as in the paper, and without bias."""
    return [("CKA", [case.cka for case in found]), ("debiased CKA", [case.debiased for case in found])]


def _up(gap: Difference) -> tuple[str, str]:
    """A difference in words, and whether it is above 0."""
    if gap.half_width is None:
        return f"{gap.mean:+.3f}", "cannot be seen"
    shown = abs(gap.mean) > gap.half_width
    return (
        f"{gap.mean:+.3f} ± {gap.half_width:.3f}",
        ("holds" if gap.mean > 0 else "opposite") if shown else "cannot be seen",
    )


def _down(gap: Difference) -> tuple[str, str]:
    text, verdict = _up(gap)
    return text, {"holds": "opposite", "opposite": "holds"}.get(verdict, verdict)


def lines(found: Sequence[Observation]) -> list[list[str]]:
    """The table, headings first."""
    rows = [[str(entry.number), entry.model, entry.what, entry.value, entry.verdict] for entry in found]
    return [["observation", "model", "number", "value [95 %]", "verdict"], *rows]


def save(found: Sequence[Case], observed: Sequence[Observation], out: Path, command: str) -> Path:
    """Writes the observations as Markdown and everything behind them as JSON."""
    document: dict[str, Any] = {
        "command": command,
        "commit": environment()["commit"],
        "rounds compared in each run": HISTORY,
        "cases": [asdict(case) for case in found],
        "observations": [asdict(entry) for entry in observed],
    }
    write_json(out / "observations.json", document)
    head, *rest = lines(observed)
    path = out / "observations.md"
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rest)))
    return path
