"""What ``incofl analyze`` writes about updates: each run by itself, and two settings against each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from incofl.analysis import environments, updates
from incofl.analysis.findings import Findings, own_folder
from incofl.analysis.groups import by_seed
from incofl.analysis.runs import Run
from incofl.analysis.smoothness import LEAST
from incofl.analysis.trials import SignTest
from incofl.analysis.updates import MEASURES, Layer, Smoother
from incofl.analysis.updates_plots import draw_environments, draw_relations, draw_ridges, draw_smoothness
from incofl.engine.checkpoint import write_json
from incofl.errors import IncoflError, RunError

HEADINGS = ("run", "rounds", "deep layers", *MEASURES, "p of roughness (layers)")


def figures(runs: Sequence[Run], out: Path) -> Findings:
    """Distributions and smoothness of the updates of each run."""
    table: list[Sequence[str]] = [HEADINGS]
    files: list[Path] = []
    missing: list[str] = []
    for run in runs:
        try:
            rounds = updates.update_rounds(run)
            found = updates.layers(run, rounds)
            if not found:
                least = f"at least {LEAST} elements that moved in a round"
                raise RunError(f"{run.folder.path}: no deep layer and its shallow counterpart with {least}")
        except IncoflError as problem:
            missing.append(f"updates: {problem}")
            continue
        folder = own_folder(run)
        tests = {what: updates.shallow_smoother(found, what) for what in MEASURES}
        files += [folder / "updates.json", folder / "updates.png", folder / "smoothness.png"]
        write_json(files[-3], updates.summary(found, rounds))
        draw_ridges(files[-2], found, run.name)
        draw_smoothness(files[-1], found, tests, run.name)
        table.append(_cells(run, rounds, found, tests))
    if not files:
        raise RunError(missing[0])
    title = "updates: share of (deep layer, round) pairs in which the shallow layer's update is smoother"
    return Findings(title, table, files, missing)


def _cells(run: Run, rounds: Sequence[int], found: Mapping[str, Layer], tests: Mapping[str, Smoother]) -> list[str]:
    deep = sum(layer.group != name for name, layer in found.items())
    shares = [percent(tests[what].pairs) for what in MEASURES]
    return [run.name, f"{rounds[0]}-{rounds[-1]}", str(deep), *shares, f"{tests['roughness'].layers.p_value:.3f}"]


def percent(test: SignTest) -> str:
    """A share in a table."""
    return "-" if test.share is None else f"{test.share:.0%}"


def cross_environment(runs: Sequence[Run], out: Path) -> Findings:
    """The first setting against each other one: runs of the same seed, whose updates are compared round by round."""
    (reference, firsts), *others = by_seed(runs).items()
    if not others:
        raise RunError("cross-environment similarity: got runs of one setting, expected two, such as IID and non-IID")
    by_its_seed = {run.config.seed: run for run in firsts}
    table: list[Sequence[str]] = [("runs", "seed", "rounds", "CKA shallow higher", "debiased", "lowest above highest")]
    files: list[Path] = []
    missing: list[str] = []
    comparisons = []
    for label, group in others:
        drawn = False
        for run in group:
            if (first := by_its_seed.get(run.config.seed)) is None:
                missing.append(f"cross-environment similarity: {run.name} has no run of {reference} with its seed")
                continue
            try:
                found = environments.compare_runs(first, run)
            except IncoflError as problem:
                missing.append(f"cross-environment similarity: {problem}")
                continue
            comparisons.append(environments.summary(first, run, found))
            table.append(_compared(first, run, found))
            if not drawn:  # one picture for each setting
                files += _draw(first, run, found, out, "" if len(others) == 1 else f"-{label}")
                drawn = True
    if not comparisons:
        raise RunError(missing[0])
    files.insert(0, out / "cross_environment.json")
    write_json(files[0], {"reference": reference, "comparisons": comparisons})
    title = f"updates against those of {reference}: share of (deep layer, round) pairs in which shallow ones are closer"
    return Findings(title, table, files, missing)


def _compared(one: Run, other: Run, found: environments.Layers) -> list[str]:
    group_of = updates.groups_of(one.layout)
    plain, debiased = (environments.shallow_higher(found, group_of, what) for what in ("cka", "debiased"))
    rounds = sorted({round for pairs in found.values() for round in pairs})
    above = plain.lowest_above_highest.values()
    return [
        f"{one.name} / {other.name}",
        str(one.config.seed),
        f"{rounds[0]}-{rounds[-1]}",
        percent(plain.pairs),
        percent(debiased.pairs),
        f"{sum(above)} of {len(above)} groups",
    ]


def _draw(one: Run, other: Run, found: environments.Layers, out: Path, suffix: str) -> list[Path]:
    group_of, title = updates.groups_of(one.layout), f"{one.name} and {other.name}"
    suffix = suffix.replace("/", "-")
    paths = [out / f"cross_environment{suffix}.png", out / f"relations{suffix}.png"]
    draw_environments(paths[0], found, group_of, f"similarity of updates of {title}")
    draw_relations(paths[1], found, group_of, f"similarity of updates of {title} against their statistics")
    return paths
