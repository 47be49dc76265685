"""Takes over the evaluations of the study of all methods, and writes its page and the table "which method when".

usage: python experiments/field/pages.py [runs/field]

With a folder, its field.csv becomes that of experiments/results. The table has what is known without a measurement
(costs.csv, made by budget.py), how long a turn takes (turns.csv, made by turns.py), and the accuracies as far as there
are any.
"""

import csv
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from budget import plain

from incofl.costs import human
from incofl.methods import BASELINES
from incofl.statistics import plus_minus
from incofl.studies.compare import markdown
from incofl.studies.gains import DEVICES, Setting, gap_cell, gaps, settings
from incofl.studies.inco import load_part, page, read_csv

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
COMMAND = "incofl reproduce inco --part experiments/field/table.toml"
STATISTICS = {"static": "measured by the server", "per-level": "of each level", "by-width": "of each width"}
MEASURED = ["mean over devices", "smallest level", "largest level", "devices minus best baseline", "InCo, devices"]
LEVEL = 0.05  # of a test
SHOWN = 5  # better methods that are named
# What levels of a method can differ in; all others take any split.
LEVELS = {
    **dict.fromkeys(("heterofl", "fedrolex", "fedrand", "fedecover", "fjord"), "width"),
    **{"fiarse": "entries", "scalefl": "depth and width", "inclusivefl": "depth", "depthfl": "depth"},
    **{"reefl": "depth, ViTs only", "allsmall": "any; the smallest only", "largestonly": "any; the largest only"},
    **{"alllarge": "any; the largest only"},
}


def read_costs() -> dict[tuple[str, str], dict[str, dict[str, str]]]:
    """By column and method, the costs of its smallest and largest level."""
    found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for name in ("costs.csv", "turns.csv"):
        with (HERE / name).open(newline="") as file:
            for row in csv.DictReader(file):
                levels = found.setdefault((row["column"], row["method"]), {})
                levels[row["level"]] = levels.get(row["level"], {}) | row
    return found


def which() -> str:
    """The table: a line for each method in each column, with InCo's effect on it where it was measured."""
    records = RESULTS / "field.csv"
    measured = {setting.column: setting for setting in settings(read_csv(records))} if records.exists() else {}
    sizes, shown = ["bytes a round", "client memory", "client MACs", "client time"], MEASURED if measured else []
    lines = [["method", "levels differ in", *sizes, "statistics", "client keeps", *shown]]
    found, column = read_costs(), ""
    for (place, method), levels in found.items():
        if place != column:
            lines.append([f"**{place}**", *[""] * (len(lines[0]) - 1)])
            column = place
        any_level = next(iter(levels.values()))
        cells = [span(levels, "bytes", "B"), span(levels, "memory", "B"), span(levels, "macs", ""), times(levels)]
        kind = LEVELS.get(method, "any")
        statistics = STATISTICS.get(any_level["statistics"], any_level["statistics"])
        keeps = "yes" if any_level["keeps"] == "True" else ""
        results = accuracies(measured.get(place), method) if measured else []
        lines.append([f"`{method}`", kind, *cells, statistics, keeps, *results])
    return markdown(lines)


def span(levels: dict[str, dict[str, str]], key: str, unit: str) -> str:
    """The costs of the smallest and of the largest level; of one, where the method trains only that."""
    return " to ".join(dict.fromkeys(human(int(row[key]), unit) for row in levels.values()))


def times(levels: dict[str, dict[str, str]]) -> str:
    """How long a turn of the smallest and of the largest level takes."""
    return " to ".join(dict.fromkeys(row["turn"] for row in levels.values() if "turn" in row))


def accuracies(setting: Setting | None, method: str) -> Iterator[str]:
    """What came out, as ``MEASURED`` says; empty as long as nothing has."""
    if setting is None or method not in setting.values:
        yield from [""] * len(MEASURED)
        return
    for measure in (DEVICES, "0", setting.measures[-1]):
        estimate = setting.estimate(method, measure)
        yield plus_minus(estimate) if estimate else "-"
    best = setting.best(tuple(BASELINES), DEVICES)
    others = [arm for arm in setting.values if arm not in BASELINES]
    yield gap_cell(gaps(setting, dict.fromkeys(others, best), DEVICES).get(method)) if best else "-"
    mixed = {arm: plain(arm) for arm in setting.values if plain(arm) != arm}
    named = {without: arm for arm, without in mixed.items()}
    yield gap_cell(gaps(setting, mixed, DEVICES).get(named[method])) if method in named else ""


def answers() -> str:
    """For each column and measure, which methods are better than the best baseline, and how many are worse."""
    lines = []
    for setting in settings(read_csv(RESULTS / "field.csv")):
        names = {DEVICES: "mean over devices", "0": "smallest level", setting.measures[-1]: "largest level"}
        arms = [arm for arm in setting.values if arm not in (*BASELINES, "alllarge")]
        for measure, who in names.items():
            best = setting.best(tuple(BASELINES), measure)
            if best is None:
                continue
            found = gaps(setting, dict.fromkeys(arms, best), measure)
            known = {arm: pair for arm, pair in found.items() if pair[0].half_width is not None}
            sure = {arm: pair for arm, pair in known.items() if abs(pair[0].mean) > (pair[0].half_width or 0)}
            better = sorted((arm for arm in sure if sure[arm][0].mean > 0), key=lambda arm: -sure[arm][0].mean)
            cells = ", ".join(f"`{arm}` {gap_cell(sure[arm])}" for arm in better[:SHOWN])
            more = f" and {len(better) - SHOWN} more" if len(better) > SHOWN else ""
            estimate = setting.estimate(best, measure)
            base = f"the best baseline is `{best}` with {plus_minus(estimate)} %" if estimate else f"`{best}`"
            lines.append(
                f"- {setting.column}, {who}: {base}. Of {len(known)} methods {len(better)} are better"
                f"{': ' if better else ''}{cells}{more}; {len(sure) - len(better)} are worse."
            )
        others = gaps(setting, {arm: "heteroavg" for arm in arms if arm != "heteroavg"}, DEVICES)
        first = sorted(others, key=lambda arm: -others[arm][0].mean)[:3]
        cells = ", ".join(f"`{arm}` {gap_cell(others[arm])}" for arm in first)
        mixed = gaps(setting, {arm: plain(arm) for arm in arms if plain(arm) != arm}, DEVICES)
        means, sure_ones = [gap.mean for gap, _ in mixed.values()], sum(p < LEVEL for _, p in mixed.values())
        lines += [
            f"- {setting.column}, mean over devices, the largest differences to `heteroavg`: {cells}.",
            f"- {setting.column}, mean over devices, with InCo minus without: {min(means):+.1f} to {max(means):+.1f} "
            f"points in {len(means)} methods, of which {sure_ones} differ from 0 after Holm's correction.",
        ]
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """The files that are made from others."""
    found = {RESULTS / "which-method.md": which()}
    if (RESULTS / "field.csv").exists():
        found[RESULTS / "field-answer.md"] = answers()
        part = load_part(str(HERE / "table.toml"))
        found[RESULTS / "field.md"] = page(part, read_csv(RESULTS / "field.csv"), COMMAND)
    return found


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        shutil.copy(Path(folder) / "field.csv", RESULTS / "field.csv")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
