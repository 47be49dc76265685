"""Takes over the evaluations of the study ``inco``, and writes what they say.

usage: python experiments/inco_pages.py [runs/reproduce/inco]

With a folder, its CSV files become those of experiments/results; the pages beside them are made from these: a page for
each part, the table that answers what InCo does, the one that answers whether any level of devices is worse off, and
what both come to in sentences.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from incofl.statistics import plus_minus
from incofl.studies.compare import markdown
from incofl.studies.gains import DEVICES, Setting, gap_cell, gaps, losses, settings
from incofl.studies.inco import PARTS, Part, is_accuracy, load_part, page, read_csv

RESULTS = Path(__file__).parent / "results"
FLOOR = "FedFloor"
ENOUGH = 10  # seeds of a setting that counts in a sentence
# The rules of InCo and its controls, each without and with an identity start.
RULES = {
    "released": "identity + released",
    "theorem, per layer": "identity + theorem",
    "norm-only": "identity + norm-only",
    "shuffled": "identity + shuffled",
}


def found() -> Iterator[tuple[str, Part, Setting]]:
    """The settings that have results, with their part."""
    for letter in PARTS:
        path = RESULTS / f"inco-{letter}.csv"
        if path.exists():
            part = load_part(letter)
            for setting in settings([row for row in read_csv(path) if is_accuracy(row.metric)]):
                yield letter, part, setting


def name_of(letter: str, setting: Setting) -> str:
    metric = "" if setting.metric == "accuracy" else f", {setting.metric.removeprefix('accuracy_').replace('_', ' ')}"
    return f"{letter}: {setting.column}{metric}"


def seeds_of(setting: Setting, arm: str) -> int:
    return max(map(len, setting.values.get(arm, {"": {}}).values()))


def question() -> str:
    """What each rule of InCo changes in the mean over devices, without and with an identity start."""
    lines = [["setting", "rule", "seeds", "minus HeteroAvg", "seeds", "with identity start, minus identity"]]
    for letter, part, setting in found():
        arms = [arm for arm in RULES if arm in setting.values]
        plain = gaps(setting, dict.fromkeys(arms, part.reference), DEVICES)
        after = gaps(setting, dict.fromkeys((RULES[arm] for arm in arms), "identity"), DEVICES)
        for arm in arms:
            counts = [str(seeds_of(setting, each)) for each in (arm, RULES[arm])]
            cells = [gap_cell(plain.get(arm)), gap_cell(after.get(RULES[arm]))]
            lines.append([name_of(letter, setting), arm, counts[0], cells[0], counts[1], cells[1]])
    return markdown(lines)


def goal() -> str:
    """What FedFloor gives each level of devices, against the best baseline of that level."""
    head = ["setting", "seeds", "mean over devices", "smallest level", "largest level", "no level worse"]
    lines = [[*head, "largest better", "largest size alone minus smallest"]]
    for letter, part, setting in found():
        if FLOOR not in setting.values:
            continue
        cells, largest = [], setting.measures[-1]
        for measure in (DEVICES, "0", largest):
            best = setting.best(part.baselines, measure)
            gap = gaps(setting, {FLOOR: best}, measure).get(FLOOR) if best else None
            cells.append(f"{gap_cell(gap)} against {best}" if gap else "-")
            better = gap is not None and gap[0].half_width is not None and gap[0].mean > gap[0].half_width
        alone = setting.difference("largestonly", "allsmall", largest)
        seeds = seeds_of(setting, FLOOR)
        verdicts = ["-", "-"] if seeds < 2 else ["no" if losses(setting, part.baselines, FLOOR) else "yes"]
        verdicts = verdicts if seeds < 2 else [*verdicts, "yes" if better else "no"]
        size = plus_minus(alone, "+.1f") if alone else "-"
        lines.append([name_of(letter, setting), str(seeds), *cells, *verdicts, size])
    return markdown(lines)


# What is compared with what, in the mean over devices.
CONTRASTS = {
    "InCo as released, minus HeteroAvg": ("released", "HeteroAvg"),
    "InCo by the theorem, per layer, minus HeteroAvg": ("theorem, per layer", "HeteroAvg"),
    "InCo's change of the norm alone, minus HeteroAvg": ("norm-only", "HeteroAvg"),
    "InCo as released, minus the same with shallow kernels in a random order": ("released", "shuffled"),
    "With an identity start: InCo as released, minus no InCo": ("identity + released", "identity"),
    "Identity start, minus HeteroAvg": ("identity", "HeteroAvg"),
    "Everybody the smallest, minus HeteroAvg": ("allsmall", "HeteroAvg"),
    "FedFloor, minus HeteroAvg": (FLOOR, "HeteroAvg"),
    "FedFloor, minus everybody the smallest": (FLOOR, "allsmall"),
    "FedFloor + InCo, minus FedFloor": ("FedFloor + released", FLOOR),
}


def answer() -> str:
    """What the settings with enough seeds say, a sentence for each contrast; by accuracy of each level's own model."""
    enough = [setting for _, _, setting in found() if setting.metric == "accuracy"]
    lines = []
    for what, (arm, other) in CONTRASTS.items():
        having = [setting for setting in enough if min(seeds_of(setting, arm), seeds_of(setting, other)) >= ENOUGH]
        known = [gap for setting in having if (gap := setting.difference(arm, other, DEVICES)) is not None]
        if not known:
            continue
        means, visible = [gap.mean for gap in known], [gap.visible_from or 0.0 for gap in known]
        above = sum(gap.mean > (gap.half_width or 0) for gap in known)
        below = sum(gap.mean < -(gap.half_width or 0) for gap in known)
        found_from = f"{min(visible):.1f} to {max(visible):.1f} points would have been found with 80 % power"
        lines.append(
            f"- {what}: {min(means):+.1f} to {max(means):+.1f} points in {len(known)} setting(s); the interval lies "
            f"above 0 in {above} and below it in {below}. Differences of {found_from}."
        )
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """The page of every part that has results, and the two tables over all parts."""
    texts = {}
    for letter in PARTS:
        path = RESULTS / f"inco-{letter}.csv"
        if path.exists():
            command = f"incofl reproduce inco --part {letter}"
            texts[path.with_suffix(".md")] = page(load_part(letter), read_csv(path), command)
    if texts:
        texts |= {RESULTS / "inco-question.md": question(), RESULTS / "inco-goal.md": goal()}
        texts[RESULTS / "inco-answer.md"] = answer()
    return texts


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for file in Path(folder).glob("inco-?.csv"):
            shutil.copy(file, RESULTS / file.name)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
