"""The paper's four observations about its case study, each as a number with its interval.

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

from incofl.analysis.analyze import Options
from incofl.analysis.runs import RecordedRun
from incofl.analysis.similarity import similarity
from incofl.analysis.updates import layers, shallow_smoother
from incofl.engine.checkpoint import write_json
from incofl.engine.run_folder import environment
from incofl.statistics import correlation, paired, tail_mean
from incofl.studies.compare import evaluations, folder_of, markdown, plus_minus
from incofl.studies.reproduce import verdict_of
from incofl.studies.study import Cell, run_name

VERSION = 1  # of the kept analysis of a run: change it when the analysis changes
FEWEST_PAIRS = 20  # with fewer pairs, a share of them is not judged
HISTORY = 4  # recorded rounds of each run in which clients are compared


@dataclass(frozen=True)
class Case:
    """What one run of the case study shows.

    Attributes:
        model: section of the study.
        setting: row of the study.
        seed: seed of the run.
        accuracy: mean of the last evaluations.
        cka: mean over the pairs of clients, from shallow to deep, as the paper computes it.
        debiased: the same by the estimate without the bias of few examples and many features.
        correlation: Pearson's, of accuracy and the CKA of the deepest point, over the recorded rounds.
        smoother: share of (deep layer, round) pairs in which the shallow layer's update is less rough.
        pairs: number of pairs.
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
    """Analyses one run, or reads what an earlier call found."""
    run = RecordedRun.open(folder)
    path = folder / "analysis" / "case.json"
    key = {"version": VERSION, "round": run.recorded[-1], "history": HISTORY}
    known = json.loads(path.read_text()) if path.exists() else {}
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
        write_json(path, known)
    numbers = known["correlation"], known["smoother"], known["pairs"]
    accuracy = tail_mean(evaluations(folder), tail)
    return Case(cell.section, cell.row, seed, accuracy, tuple(known["cka"]), tuple(known["debiased"]), *numbers)


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
    models = dict.fromkeys(case.model for case in found)
    return [seen for model in models for seen in _observe(model, [case for case in found if case.model == model])]


def _observe(model: str, found: list[Case]) -> Iterator[Observation]:
    settings: dict[str, list[Case]] = {}
    for case in found:
        settings.setdefault(case.setting, []).append(case)

    def compared(number: int, what: str, ours: Sequence[float], theirs: Sequence[float], sign: int = 1) -> Observation:
        gap = paired(ours, theirs)
        value = plus_minus(gap.mean, gap.half_width, "+.3f")
        return Observation(number, model, what, value, verdict_of(gap, sign) or "")

    for setting, own in settings.items():
        for kind, values in _both(own):
            first, last = ([cka[end] for cka in values] for end in (0, -1))
            ends = f"{sum(first) / len(first):.2f} to {sum(last) / len(last):.2f}"
            what = f"{setting}: {kind}, last minus first of {len(values[0])} points in common ({ends})"
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
        verdict = "holds" if low > 0 else "opposite" if high < 0 else "cannot be seen"
        yield Observation(2, model, what, f"{across:+.2f} [{low:+.2f}, {high:+.2f}]", verdict)
    for setting, own in settings.items():
        shares, pairs = [case.smoother for case in own if case.smoother is not None], min(case.pairs for case in own)
        if len(shares) > 1:
            what = f"{setting}: share of pairs in which the shallow update is less rough, minus a half ({pairs} pairs)"
            seen = compared(3, what, shares, [0.5] * len(shares))
            yield seen if pairs >= FEWEST_PAIRS else Observation(3, model, what, seen.value, "too few pairs")
    ours, theirs = (sorted(settings.get(name, []), key=lambda case: case.seed) for name in ("InCoAvg", "HeteroAvg"))
    if [case.seed for case in ours] == [case.seed for case in theirs] != []:
        for (kind, mixed), (_, plain) in zip(_both(ours), _both(theirs), strict=True):
            what = f"{kind} at {where}, InCoAvg minus HeteroAvg"
            yield compared(4, what, [cka[shared] for cka in mixed], [cka[shared] for cka in plain])


def fisher_interval(r: float, points: int) -> tuple[float, float]:
    """Returns the 95 % interval of a correlation, by Fisher's transformation."""
    centre, half = math.atanh(min(max(r, -0.999999), 0.999999)), 1.96 / math.sqrt(points - 3)
    return math.tanh(centre - half), math.tanh(centre + half)


def _both(found: Sequence[Case]) -> list[tuple[str, list[tuple[float, ...]]]]:
    """Returns the similarity as in the paper, and without bias."""
    return [("CKA", [case.cka for case in found]), ("debiased CKA", [case.debiased for case in found])]


def lines(found: Sequence[Observation]) -> list[list[str]]:
    """Returns the lines of the table, headings first."""
    rows = [[str(entry.number), entry.model, entry.what, entry.value, entry.verdict] for entry in found]
    return [["observation", "model", "number", "value [95 %]", "verdict"], *rows]


def save(found: Sequence[Case], observed: Sequence[Observation], out: Path, command: str) -> Path:
    """Writes the observations as Markdown and everything behind them as JSON."""
    document = {
        "command": command,
        "commit": environment()["commit"],
        "rounds compared in each run": HISTORY,
        "cases": [asdict(case) for case in found],
        "observations": [asdict(entry) for entry in observed],
    }
    write_json(out / "observations.json", document)
    path = out / "observations.md"
    path.write_text(markdown(lines(observed)))
    return path
