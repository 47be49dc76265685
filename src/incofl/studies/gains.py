"""What each size of device gains over the best that the same fleet can do without slices of one model.

Its baselines: everybody trains the smallest level, only the large devices take part, each level is averaged with itself
only. A device gets from a method the largest trained level that it can hold.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from incofl.analysis.runs import RecordedRun
from incofl.engine.best_path import BEST
from incofl.statistics import Difference, Estimate, estimate, holm, paired, plus_minus

NOT_WORSE = -0.5  # points: where the interval of a difference may end that counts as no loss
DEVICES = "devices"  # the measure that is the mean over devices; the others are numbers of levels
GAP = (
    "difference ± half width of its 95 % interval; star: differs from 0 after Holm's correction over the methods; in "
    "brackets: the smallest true difference that the seeds find with 80 % power"
)
Measure = str
Values = dict[int, float]  # by seed


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one run: accuracy in percent, for each level that a device can hold."""

    column: str
    arm: str
    metric: str
    seed: int
    round: int
    levels: tuple[float | None, ...]  # what a device gets; none where the arm has no model for it, or nobody holds it
    devices: float | None  # the mean over devices; none where some get nothing
    commit: str = ""  # of the code that made the run
    run: str = ""  # names everything that determines it except the seed


def evaluations(column: str, arm: str, run: RecordedRun, counts: Sequence[int]) -> list[Evaluation]:
    """Every evaluation of a run by every metric, with the number of devices that can hold each level."""
    commit, found = str(run.json("environment.json").get("commit", ""))[:12], list[Evaluation]()
    for row in run.evaluated:
        for metric, values in {"accuracy": row["accuracy_by_level"], **row.get("metrics", {})}.items():
            known = dict(zip(run.levels, values, strict=True))
            held = [_held(level, known) if count else None for level, count in enumerate(counts)]
            mean = _mean_over_devices(held, counts)
            found.append(Evaluation(column, arm, metric, run.seed, row["round"], tuple(held), mean, commit))
    return found


def _held(level: int, known: Mapping[int, float]) -> float | None:
    """What a device gets: the largest trained level that it can hold."""
    fits = [other for other in known if other <= level]
    return round(100 * known[max(fits)], 4) if fits else None


def _mean_over_devices(values: Sequence[float | None], counts: Sequence[int]) -> float | None:
    by_level = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    known = [(value, count) for value, count in by_level if value is not None]
    if len(known) < len(by_level):
        return None
    return round(sum(value * count for value, count in known) / sum(counts), 3)


@dataclass(frozen=True)
class Setting:
    """The runs of one column, by one metric: what each arm came to, by measure and seed."""

    column: str
    metric: str
    values: dict[str, dict[Measure, Values]]  # by arm
    names: Mapping[Measure, str] = field(default_factory=dict)  # of levels of devices
    work: Mapping[str, int] = field(default_factory=dict)  # what the largest turn of an arm computes

    @property
    def measures(self) -> list[Measure]:
        return sorted({measure for arm in self.values.values() for measure in arm}, key=lambda m: (m != DEVICES, m))

    def called(self, measure: Measure) -> str:
        """What those are called for whom a measure stands."""
        return measure if measure == DEVICES else self.names.get(measure, f"level {measure}")

    def estimate(self, arm: str, measure: Measure) -> Estimate | None:
        """The mean over all seeds of an arm."""
        return estimate(self.values.get(arm, {}).get(measure, {}).values())

    def difference(self, arm: str, other: str, measure: Measure) -> Difference | None:
        """The difference between two arms over the seeds that both have."""
        ours, theirs = (self.values.get(name, {}).get(measure, {}) for name in (arm, other))
        seeds = sorted(ours.keys() & theirs.keys())
        return paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]) if seeds else None

    def best(self, baselines: Sequence[str], measure: Measure) -> str | None:
        """The baseline with the highest mean."""
        means = {arm: found.mean for arm in baselines if (found := self.estimate(arm, measure)) is not None}
        return max(means, key=means.__getitem__) if means else None


def last_third(evaluated: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """The evaluations by which a study judges a run."""
    return evaluated[-math.ceil(len(evaluated) / 3) :]


def settings(
    rows: Sequence[Evaluation], judged_by: Callable[[Sequence[Evaluation]], Sequence[Evaluation]] = last_third
) -> list[Setting]:
    """Groups evaluations by column and metric; a run counts with the mean over those by which it is judged."""
    runs: dict[tuple[str, str], dict[tuple[str, int], list[Evaluation]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row.column, row.metric][row.arm, row.seed].append(row)
    for (column, metric), of_arms in runs.items():
        if metric.endswith(BEST):  # whoever has one model has nothing to choose
            others = runs.get((column, metric.removesuffix(BEST)), {})
            of_arms |= {arm: own for arm, own in others.items() if arm not in of_arms and all(map(_one_model, own))}
    found = []
    for (column, metric), of_arms in runs.items():
        values: dict[str, dict[Measure, Values]] = {}
        for (arm, seed), evaluated in of_arms.items():
            judged = judged_by(sorted(evaluated, key=lambda row: row.round))
            by_measure = {DEVICES: [row.devices for row in judged]}
            by_measure |= {str(level): [row.levels[level] for row in judged] for level in range(len(judged[0].levels))}
            for measure, numbers in by_measure.items():
                if (of_run := estimate(numbers)) is not None:
                    values.setdefault(arm, {}).setdefault(measure, {})[seed] = of_run.mean
        found.append(Setting(column, metric, values))
    return found


def _one_model(row: Evaluation) -> bool:
    return len({value for value in row.levels if value is not None}) == 1


def gaps(setting: Setting, others: Mapping[str, str], measure: Measure) -> dict[str, tuple[Difference, float]]:
    """The difference of each arm to another, and its p value after Holm's correction over these arms."""
    found = {arm: setting.difference(arm, other, measure) for arm, other in others.items()}
    known = {arm: gap for arm, gap in found.items() if gap is not None}
    corrected = holm([1.0 if gap.p_value is None else gap.p_value for gap in known.values()])
    return {arm: (gap, p) for (arm, gap), p in zip(known.items(), corrected, strict=True)}


def gain_table(setting: Setting, baselines: Sequence[str]) -> list[list[str]]:
    """What each method gains over the best baseline, for each level of devices; headings first."""
    arms = [arm for arm in setting.values if arm not in baselines]
    best = {m: arm for m in setting.measures if (arm := setting.best(baselines, m)) is not None}
    named = [f"{setting.called(m)} minus {arm}" for m, arm in best.items()]
    lines = [["method", *named, "no level worse", "largest better"]]
    found = {m: gaps(setting, dict.fromkeys(arms, arm), m) for m, arm in best.items()}
    for arm in arms:
        own = {m: found[m].get(arm) for m in best}
        levels = [gap[0] for m, gap in own.items() if m != DEVICES and gap is not None]
        largest = own.get(setting.measures[-1])
        better = largest is not None and largest[0].mean > 0 and largest[1] < 0.05
        verdicts = ["no" if losses(setting, baselines, arm) else "yes", "yes" if better else "no"]
        unsure = any(gap.half_width is None for gap in levels)  # of one seed
        lines.append([arm, *map(gap_cell, own.values()), *(["not known"] * 2 if unsure else verdicts)])
    return lines


def contenders(setting: Setting, baselines: Sequence[str]) -> tuple[str, str, Measure] | None:
    """The best method, if possible of those with which no level is worse off, the best baseline, and the measure."""
    measure = DEVICES if setting.best(baselines, DEVICES) else setting.measures[-1]
    best = setting.best(baselines, measure)
    methods = {arm: found.mean for arm in setting.values if (found := setting.estimate(arm, measure)) is not None}
    methods = {arm: mean for arm, mean in methods.items() if arm not in baselines}
    if best is None or not methods:
        return None
    without_losers = [arm for arm in methods if not losses(setting, baselines, arm)]
    return max(without_losers or methods, key=methods.__getitem__), best, measure


def answer(setting: Setting, baselines: Sequence[str]) -> str:
    """Which method to use, by how much it is better than the best baseline, and how sure that is: a few sentences."""
    if (found := contenders(setting, baselines)) is None:
        return ""
    chosen, best, measure = found
    who = "the mean over devices" if measure == DEVICES else "the largest level"
    who += ", each with the best of the models that it holds" if setting.metric.endswith(BEST) else ""
    gap, mean = setting.difference(chosen, best, measure), setting.estimate(chosen, measure)
    if gap is None or mean is None:
        return ""
    value = f"{mean.mean:.1f} % in {who}, {plus_minus(gap, '+.1f')} points against the best baseline, {best}"
    lost = losses(setting, baselines, chosen)
    fine = f"No level is worse off than with a baseline (to {-NOT_WORSE:g} points)."
    worse = f"Worse off than with a baseline, or not seen not to be: {'; '.join(lost)}." if lost else fine
    if chosen in setting.work and best in setting.work:
        times = setting.work[chosen] / setting.work[best]
        worse += f" The largest turn of {chosen} computes {times:.1f} times as much as that of {best}."
    if gap.half_width is None:
        first = f"{chosen}: {value}" if gap.mean > 0 else f"{best} is the best here: {chosen} has {value}"
        return f"{first}. One seed cannot say how sure that is. {worse}"
    if gap.mean > gap.half_width:
        return f"Use {chosen}: {value}. {worse}"
    if gap.mean < -gap.half_width:
        return f"Use {best}: the best of the other methods, {chosen}, has {value}. {worse}"
    seen = f"inconclusive (could have seen {gap.visible_from:.1f} points)"
    return f"No method is seen to be better than {best}: {chosen} has {value}, {seen}. {worse}"


def losses(setting: Setting, baselines: Sequence[str], arm: str) -> list[str]:
    """The levels for which an arm may be worse than the best baseline, in words."""
    found = []
    for measure in setting.measures:
        if measure == DEVICES or (best := setting.best(baselines, measure)) is None:
            continue
        gap = setting.difference(arm, best, measure)
        if gap is None or gap.mean - (gap.half_width or 0) <= NOT_WORSE:
            cell = "nothing" if gap is None else f"{plus_minus(gap, '+.1f')} against {best}"
            found.append(f"{setting.called(measure)} ({cell})")
    return found


def gap_cell(found: tuple[Difference, float] | None) -> str:
    """Writes a difference as ``GAP`` explains."""
    if found is None:
        return "-"
    gap, p = found
    visible = "" if gap.visible_from is None else f" [{gap.visible_from:.1f}]"
    return f"{plus_minus(gap, '+.1f')}{'*' if p < 0.05 else ''}{visible}"
