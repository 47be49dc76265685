"""Robust means under attack, paired by seed (PROTOCOL.md).

usage: python experiments/trust/trust_study.py [--root DIR] [--out runs/trust] [--jobs 2] [--seeds 0,1,2,3,4]
           [--sets digits,fashion-mnist] [--attacks sign-flip,...] [--count] [--tables-only]

Makes the runs, and writes experiments/results/trust.csv (a line for every finished run, with its commit), trust.md
(all tables) and trust-answer.md (what the protocol asks). What is recorded there is not made again, so it continues
where it was interrupted; run folders are removed.
"""

import argparse
import csv
import json
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from incofl.config import Config, make_config
from incofl.engine.progress import Progress
from incofl.engine.run_folder import RunFolder
from incofl.statistics import Estimate, holm, paired, plus_minus
from incofl.studies.compare import folder_of, markdown, run_arms

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
BATCH = 40  # runs between two records
SETS = ("digits", "fashion-mnist")
SHARES = (0.1, 0.2, 0.3)
AMONG_ALL = "krum among all"  # krum.among = "all"
A_FIFTH = "krum among all, a fifth"  # with krum.share = 0.2, the true one
LONG = ("mean", AMONG_ALL, A_FIFTH)  # with 30 rounds
RULES = ("mean", "clipping", "trimmed", "median", "krum", "centred", AMONG_ALL)
# Where a scale is given, it is one that is not refused at once, or that does harm.
ATTACKS = {
    **{kind: [] for kind in ("sign-flip", "scaling", "noise", "inner-product", "label-flip", "backdoor")},
    **{kind: [] for kind in ("free-ride", "replay", "not-a-number", "shape")},
    "little-is-enough": ["attack.scale=1.5"],
    "magnitude": ["attack.scale=1e6"],
}
# Who attacks: a share of equal groups, or the only client of the largest level.
FLEETS = {
    "equal": ["split.counts=[7,7,6]"],
    "sole": ["split.counts=[10,9,1]", "attack.only=deepest"],
    "long": ["split.counts=[7,7,6]", "rounds=30", "eval.every=10"],
}
UNCHECKED = "mean, norms unchecked"  # the plain mean without the validation of norms; nobody attacks
DECIDES = ("sign-flip", "scaling", "not-a-number")  # what a recommended rule withstands, by a fifth of the clients
KEEPS = 90  # percent of the accuracy of the plain mean without attackers
COLUMNS = ("data", "fleet", "attack", "share", "rule", "inco", "seed")


class Cell(NamedTuple):
    """A run of the study."""

    data: str
    fleet: str
    attack: str  # empty: nobody attacks
    share: str
    rule: str
    inco: str
    seed: str

    @property
    def method(self) -> str:
        mean = "" if self.rule in ("mean", UNCHECKED) else f"+{self.rule.partition(' ')[0]}"
        return f"{'incoavg' if self.inco == 'yes' else 'heteroavg'}{mean}"

    def config(self, root: str) -> Config:
        limit = [] if self.data == "fashion-mnist" else ["data.limit=none", "eval.limit=none"]
        attack = [f"attack.kind={self.attack}", *ATTACKS[self.attack]] if self.attack else []
        share = [f"attack.share={self.share}"] if self.attack and self.fleet != "sole" else []
        limit += ["validation.norm=off"] if self.rule == UNCHECKED else []
        limit += ["krum.among=all"] if self.rule in (AMONG_ALL, A_FIFTH) else []
        limit += ["krum.share=0.2"] if self.rule == A_FIFTH else []
        keys = [f"data.name={self.data}", f"data.root={root!r}", f"method={self.method}", f"seed={self.seed}"]
        return make_config(HERE / "base.toml", [*keys, *limit, *FLEETS[self.fleet], *attack, *share])


def cells(sets: Sequence[str], attacks: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All runs, those of the first seed first."""
    found = []
    for seed, data, inco in product(seeds, sets, ("no", "yes")):
        for rule in RULES:
            cases = [("equal", "", "0"), *product(["equal"], attacks, map(str, SHARES))]
            found += [Cell(data, *case, rule, inco, str(seed)) for case in cases]
        for rule in (*RULES, "trimmed+holders"):
            cases = [("sole", "", "0"), *product(["sole"], attacks, ["1 client"])]
            found += [Cell(data, *case, rule, inco, str(seed)) for case in cases]
        found += [Cell(data, fleet, "", "0", UNCHECKED, inco, str(seed)) for fleet in ("equal", "sole")]
        if inco == "no":
            cases = [("long", "", "0"), *(("long", attack, "0.2") for attack in DECIDES if attack in attacks)]
            found += [Cell(data, *case, rule, inco, str(seed)) for rule in LONG for case in cases]
    return found


def read(path: Path) -> dict[Cell, dict[str, str]]:
    """The recorded runs."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {Cell(*(line[name] for name in COLUMNS)): line for line in csv.DictReader(file)}


def record(folder: Path, cell: Cell) -> dict[str, str]:
    """What came of a run: means over the last third of the evaluations, in percent."""
    lines = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    rows = [row for row in lines if row["accuracy_by_level"]]
    last = rows[-max(1, len(rows) // 3) :]
    levels = 100 * np.mean([[value or 0 for value in row["accuracy_by_level"]] for row in last], axis=0)
    success = [row["attack"]["success_by_level"] for row in last if "success_by_level" in row.get("attack", {})]
    commit = str(json.loads(RunFolder(folder).environment.read_text())["commit"])[:12]
    return {
        **cell._asdict(),
        "accuracy": f"{levels.mean():.3f}",
        "by_level": " ".join(f"{level:.2f}" for level in levels),
        "success": f"{100 * np.mean(success):.2f}" if success else "",
        "rejected": str(sum(len(row["rejected"]) for row in lines)),
        "commit": commit,
    }


def write(path: Path, found: dict[Cell, dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        names = [*COLUMNS, "accuracy", "by_level", "success", "rejected", "commit"]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found[cell] for cell in sorted(found))


def tables(found: dict[Cell, dict[str, str]]) -> str:
    """For each data set and fleet, what each rule keeps under each attack; with and without InCo."""
    pages = ["# Robust means under attack", NOTE]
    groups = sorted({(cell.data, cell.fleet, cell.inco) for cell in found})
    for data, fleet, inco in groups:
        of = [cell for cell in found if (cell.data, cell.fleet, cell.inco) == (data, fleet, inco)]
        rules = [rule for rule in (UNCHECKED, *RULES, "trimmed+holders") if any(cell.rule == rule for cell in of)]
        for value, name in (("accuracy", "accuracy"), ("success", "success of the backdoor")):
            lines = [["attack", "attackers", *rules]]
            for attack, share in sorted({(cell.attack, cell.share) for cell in of}):
                row = []
                for rule in rules:
                    same = [c for c in of if (c.attack, c.share, c.rule) == (attack, share, rule) and found[c][value]]
                    row.append(plus_minus(Estimate.of([float(found[c][value]) for c in same])) if same else "")
                if any(row):
                    lines.append([attack or "none", share, *row])
            if len(lines) > 1:
                title = f"## {data}, {FLEET_NAMES[fleet]}, {'with' if inco == 'yes' else 'without'} InCo: {name}"
                pages.append(f"{title}\n\n{markdown(lines)}")
    return "\n\n".join(pages)


class Answers:
    """What the protocol asks, from the recorded runs; the plain mean is without InCo, where nothing else is said."""

    def __init__(self, found: dict[Cell, dict[str, str]]) -> None:
        self._found = found
        self._seeds = sorted({cell.seed for cell in found})
        self._sets = [data for data in SETS if any(cell.data == data for cell in found)]

    def _values(self, *cell: str, level: int | None = None) -> list[float]:
        """Accuracies seed by seed: the mean over levels, or one level."""
        lines = [self._found[Cell._make((*cell, seed))] for seed in self._seeds]
        return [float(line["accuracy"] if level is None else line["by_level"].split()[level]) for line in lines]

    def _kept(self, data: str, rule: str, attack: str, fleet: str = "equal", level: int | None = None) -> list[float]:
        """In percent of the plain mean without attackers, seed by seed."""
        share = "0" if not attack else "0.2" if fleet != "sole" else "1 client"
        ours = self._values(data, fleet, attack, share, rule, "no", level=level)
        theirs = self._values(data, fleet, "", "0", "mean", "no", level=level)
        return [100 * one / other for one, other in zip(ours, theirs, strict=True)]

    def default(self) -> str:
        """What the validation of norms costs where nobody attacks."""
        kept = []
        for data, fleet, inco in product(self._sets, ("equal", "sole"), ("no", "yes")):
            ours, theirs = (self._values(data, fleet, "", "0", rule, inco) for rule in ("mean", UNCHECKED))
            kept += [100 * one / other for one, other in zip(ours, theirs, strict=True)]
        return (
            f"**The default** (the plain mean, norms checked) keeps {np.mean(kept):.2f} % of the accuracy that the "
            f'same runs have with `validation.norm = "off"` where nobody attacks ({min(kept):.2f} to {max(kept):.2f} '
            f"in {len(kept)} pairs of runs)."
        )

    def rules(self) -> str:
        """What each rule costs and keeps, and which are recommended."""
        lines = [["data", "rule", "nobody", *(f"20 % {attack}" for attack in DECIDES), "the worst of all 12, 20 %"]]
        held: dict[str, list[float]] = {rule: [] for rule in RULES}
        for data, rule in product(self._sets, RULES):
            kept = {attack: self._kept(data, rule, attack) for attack in ("", *ATTACKS)}
            held[rule] += [float(np.mean(kept[attack])) for attack in DECIDES]
            worst = min(ATTACKS, key=lambda attack: float(np.mean(kept[attack])))
            cells = [plus_minus(Estimate.of(kept[attack]), ".0f") for attack in ("", *DECIDES, worst)]
            lines.append([data, rule, *cells[:-1], f"{cells[-1]} ({worst})"])
        good = [rule for rule in RULES if min(held[rule]) >= KEEPS]
        cost = {rule: float(np.mean([self._kept(data, rule, "") for data in self._sets])) for rule in good}
        best = max(cost, key=lambda rule: cost[rule]) if cost else ""
        verdict = (
            f"Of these {', '.join(f'`{rule}`' for rule in good)} keep at least {KEEPS} % under each of the first three "
            f"attacks on every data set, and `{best}` costs least where nobody attacks: it is recommended."
            if good
            else f"None of them keeps {KEEPS} % under each of the first three attacks on every data set."
        )
        return (
            "**What a rule keeps**, in percent of the accuracy of the plain mean without attackers, ± half width of "
            f"the 95 % interval over {len(self._seeds)} seeds. {verdict}\n\n{markdown(lines).strip()}"
        )

    def inco(self) -> str:
        """Whether InCo helps or hurts under attack: the mean over all attacks, paired by seed."""
        gaps = {}
        for data, rule in product(self._sets, RULES):
            ours, theirs = (
                np.mean([self._values(data, "equal", attack, "0.2", rule, inco) for attack in ATTACKS], axis=0)
                for inco in ("yes", "no")
            )
            gaps[data, rule] = paired(list(ours), list(theirs))
        corrected = holm([gap.p_value if gap.p_value is not None else 1 for gap in gaps.values()])
        lines = [["data", "rule", "with InCo minus without", "could have seen", "p, corrected"]]
        for ((data, rule), gap), p in zip(gaps.items(), corrected, strict=True):
            lines.append([data, rule, plus_minus(gap, "+.1f"), f"{gap.visible_from or 0:.1f}", f"{p:.2f}"])
        return (
            "**InCo under attack**: accuracy with InCo minus without, in points, mean over all attacks by 20 % of the "
            f"clients, paired by seed, Holm's correction over the rows.\n\n{markdown(lines).strip()}"
        )

    def sole(self) -> str:
        """What is left of the largest level if its only client attacks."""
        lines = [["data", "rule", "nobody", *DECIDES, "the worst of all 12"]]
        for data, rule in product(self._sets, (*RULES, "trimmed+holders")):
            kept = {attack: self._kept(data, rule, attack, "sole", level=-1) for attack in ("", *ATTACKS)}
            worst = min(ATTACKS, key=lambda attack: float(np.mean(kept[attack])))
            cells = [plus_minus(Estimate.of(kept[attack]), ".0f") for attack in ("", *DECIDES, worst)]
            lines.append([data, rule, *cells[:-1], f"{cells[-1]} ({worst})"])
        return (
            "**The only holder of the deepest blocks attacks**: accuracy of the largest level in percent of what it "
            f"has by the plain mean without attackers.\n\n{markdown(lines).strip()}"
        )

    def long(self) -> str:
        """What the rules that were added keep with three times the rounds."""
        lines = [["data", "rule", "nobody", *(f"20 % {attack}" for attack in DECIDES)]]
        least = dict.fromkeys(LONG[1:], float("inf"))
        for data, rule in product(self._sets, LONG):
            kept = {attack: self._kept(data, rule, attack, "long") for attack in ("", *DECIDES)}
            lines.append([data, rule, *(plus_minus(Estimate.of(kept[attack]), ".0f") for attack in ("", *DECIDES))])
            if rule in least:
                least[rule] = min([least[rule], *(float(np.mean(kept[attack])) for attack in DECIDES)])
        held = [
            f"`{rule}` {'keeps' if low >= KEEPS else 'does not keep'} {KEEPS} % under each of the three attacks on both"
            f" data sets (the least is {low:.1f} %)"
            for rule, low in least.items()
        ]
        return (
            f"**With 30 rounds** {', '.join(held)}, in percent of the plain mean of 30 rounds without attackers.\n\n"
            f"{markdown(lines).strip()}"
        )

    def page(self) -> str:
        commits = sorted({line["commit"] for line in self._found.values()})
        made = f"`python experiments/trust/trust_study.py`, {len(self._found):,} runs, commit {', '.join(commits)}."
        return "\n\n".join([self.default(), self.rules(), self.long(), self.inco(), self.sole(), made])


FLEET_NAMES = {
    "equal": "a share of all clients attacks",
    "long": "the same, 30 rounds",
    "sole": "the only holder of the deepest blocks attacks",
}
NOTE = (
    "`python experiments/trust/trust_study.py`. In percent, mean over levels and the last third of the evaluations, "
    "± half width of the 95 % interval over the seeds (Student's t)."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", type=Path, default=Path("runs/trust"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--limit", type=int, help="stop after this number of runs")
    parser.add_argument("--count", action="store_true", help="say how many runs are left, and make none")
    parser.add_argument("--tables-only", action="store_true")
    given: Any = parser.parse_args()
    path = given.results / "trust.csv"
    found = read(path)
    wanted = cells(given.sets.split(","), given.attacks.split(","), [int(seed) for seed in given.seeds.split(",")])
    left = [cell for cell in wanted if cell not in found]
    if given.count:
        print(f"{len(wanted)} runs, {len(left)} left")
        return
    left = [] if given.tables_only else left[: given.limit]
    for start in range(0, len(left), BATCH):
        batch = {(" ".join(filter(None, cell[:-1])), int(cell.seed)): cell for cell in left[start : start + BATCH]}
        run_arms(
            {arm: cell.config(given.root) for arm, cell in batch.items()}, given.out, given.jobs, lambda _: Progress()
        )
        found |= {cell: record(folder_of(given.out, arm), cell) for arm, cell in batch.items()}
        write(path, found)
        for arm in batch:
            shutil.rmtree(folder_of(given.out, arm))
        print(f"{min(start + BATCH, len(left))} of {len(left)} runs", flush=True)
    path.with_suffix(".md").write_text(tables(found) + "\n", encoding="utf-8")
    if all(cell in found for cell in wanted):
        path.with_name("trust-answer.md").write_text(Answers(found).page() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
