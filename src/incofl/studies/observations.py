"""The paper's four observations about its case study, each as a number with its interval.

1. Deep layers of clients' models are less similar than shallow ones.
2. Accuracy and similarity go together.
3. Updates of shallow layers are smoother than those of deep ones.
4. InCo raises the similarity of deep layers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from incofl.analysis.analyze import Options
from incofl.analysis.runs import RecordedRun
from incofl.analysis.similarity import similarity
from incofl.analysis.updates import layers, shallow_smoother
from incofl.engine.files import write_json
from incofl.engine.run_folder import environment
from incofl.statistics import correlation, paired, plus_minus, tail_mean
from incofl.studies.compare import folder_of, write_tables
from incofl.studies.reproduce import Cell, verdict_of

VERSION = 1  # of the kept analysis of a run: change it when the analysis changes
FEWEST_PAIRS = 20  # with fewer pairs, a share of them is not judged
HISTORY = 4  # recorded rounds of each run in which clients are compared


@dataclass(frozen=True)
class Case:
    """What one run of the case study shows."""

    model: str  # section of the study
    setting: str  # row of the study
    seed: int
    accuracy: float  # mean of the last evaluations
    cka: Sequence[float]  # mean over the pairs of clients, from shallow to deep, as the paper computes it
    debiased: Sequence[float]  # the same by the estimate without the bias of few examples and many features
    correlation: float | None  # of accuracy and the CKA of the deepest point, over the recorded rounds
    smoother: float | None  # share of pairs (deep layer, round) in which the shallow layer's update is less rough
    pairs: int  # number of such pairs


KINDS: dict[str, Callable[[Case], Sequence[float]]] = {"CKA": attrgetter("cka"), "debiased CKA": attrgetter("debiased")}


def look(cell: Cell, seed: int, folder: Path, tail: int, watch: Callable[[str], None]) -> Case:
    """Analyses one run, or reads what an earlier call found."""
    run = RecordedRun(folder)
    key, known = {"version": VERSION, "round": run.recorded[-1], "history": HISTORY}, run.json("analysis/case.json")
    if not key.items() <= known.items():
        found = similarity(run, Options(history=HISTORY, watch=watch))
        pairs = shallow_smoother(layers(run)[0], "roughness").pairs
        known = key | {
            "cka": [float(value) for value in found.mean_by_depth if value is not None],
            "debiased": [float(value) for value in found.debiased_by_depth if value is not None],
            "correlation": found.correlation[found.points[-1]].pearson,
            "smoother": pairs.share,
            "pairs": pairs.wins + pairs.losses,
        }
        write_json(folder / "analysis" / "case.json", known)
    numbers = {name: value for name, value in known.items() if name not in key}
    return Case(cell.section, cell.row, seed, tail_mean(run.evaluated, tail), **numbers)


class Observation(NamedTuple):
    """One observation on one group of runs: what the number is, the number, and whether it shows the observation."""

    number: int
    model: str
    what: str
    value: str
    verdict: str


def observe(found: Sequence[Case]) -> Iterator[Observation]:
    """Tests the observations on each model."""
    for model in dict.fromkeys(case.model for case in found):
        yield from _observe(model, [case for case in found if case.model == model])


def _observe(model: str, found: list[Case]) -> Iterator[Observation]:
    names = dict.fromkeys(case.setting for case in found)
    settings = {name: [case for case in found if case.setting == name] for name in names}

    def compared(number: int, what: str, ours: Sequence[float], theirs: Sequence[float], sign: int = 1) -> Observation:
        gap = paired(ours, theirs)
        return Observation(number, model, what, plus_minus(gap, "+.3f"), verdict_of(gap, sign) or "")

    for setting, own in settings.items():
        for kind, cka in KINDS.items():
            first, last = ([cka(case)[end] for case in own] for end in (0, -1))
            ends = f"{sum(first) / len(first):.2f} to {sum(last) / len(last):.2f}"
            what = f"{setting}: {kind}, last minus first of {len(cka(own[0]))} points in common ({ends})"
            yield compared(1, what, last, first, sign=-1)
    inside = [case.correlation for case in found if case.correlation is not None]
    if len(inside) > 1:
        positive = f"positive in {sum(value > 0 for value in inside)} of {len(inside)}"
        what = f"correlation of accuracy and the last point's CKA over {HISTORY} rounds of a run ({positive})"
        yield compared(2, what, inside, [0.0] * len(inside))
    # Unequal models have only their first blocks in common: settings are compared where all have a value.
    shared = min(len(case.cka) for case in found) - 1
    where = f"point {shared + 1} of {max(len(case.cka) for case in found)}"
    across = correlation([case.cka[shared] for case in found], [case.accuracy for case in found]).pearson
    if across is not None and len(found) > 3:
        what = f"correlation of accuracy and CKA at {where} over the {len(found)} runs of all settings, at their end"
        low, high = fisher_interval(across, len(found))
        verdict = "holds" if low > 0 else "opposite" if high < 0 else "inconclusive"
        yield Observation(2, model, what, f"{across:+.2f} [{low:+.2f}, {high:+.2f}]", verdict)
    for setting, own in settings.items():
        shares, pairs = [case.smoother for case in own if case.smoother is not None], min(case.pairs for case in own)
        if len(shares) > 1:
            what = f"{setting}: share of pairs in which the shallow update is less rough, minus a half ({pairs} pairs)"
            seen = compared(3, what, shares, [0.5] * len(shares))
            yield seen if pairs >= FEWEST_PAIRS else seen._replace(verdict="too few pairs")
    ours, theirs = (sorted(settings.get(name, []), key=lambda case: case.seed) for name in ("InCoAvg", "HeteroAvg"))
    if [case.seed for case in ours] == [case.seed for case in theirs] != []:
        for kind, cka in KINDS.items():
            mixed, plain = ([cka(case)[shared] for case in cases] for cases in (ours, theirs))
            yield compared(4, f"{kind} at {where}, InCoAvg minus HeteroAvg", mixed, plain)


def fisher_interval(r: float, points: int) -> tuple[float, float]:
    """Returns the 95 % interval of a correlation, by Fisher's transformation."""
    centre, half = math.atanh(min(max(r, -0.999999), 0.999999)), 1.96 / math.sqrt(points - 3)
    return math.tanh(centre - half), math.tanh(centre + half)


def save(
    table: Sequence[Cell], out: Path, tail: int, command: str, watch: Callable[[str], None]
) -> tuple[list[list[str]], Path]:
    """Analyses all runs of the case study, and writes the observations as Markdown and what is behind them as JSON.

    Returns the lines of the table, headings first, and the Markdown file.
    """
    found = [look(cell, arm[1], folder_of(out / "runs", arm), tail, watch) for cell in table for arm in cell.arms]
    observed = list(observe(found))
    document = {
        "command": command,
        "commit": environment()["commit"],
        "rounds compared in each run": HISTORY,
        "cases": list(map(asdict, found)),
        "observations": [entry._asdict() for entry in observed],
    }
    headings = ["observation", "model", "number", "value [95 %]", "verdict"]
    lines = [headings, *(list(map(str, entry)) for entry in observed)]
    return lines, write_tables(out / "observations", lines, document)
