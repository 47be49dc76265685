"""What InCo adds to each family of methods, seed by seed, from the result of a comparison.

usage: python experiments/pairs.py methods-fashion-mnist     writes experiments/results/methods-fashion-mnist-inco.md
"""

import json
import sys
from pathlib import Path
from statistics import fmean

from incofl.methods import METHODS
from incofl.statistics import paired

RESULTS = Path(__file__).parent / "results"


def pairs(name: str) -> str:
    """A line for each method that is there with and without InCo, by the mean of the last rounds, in points."""
    found = {result["method"]: result for result in json.loads((RESULTS / f"{name}.json").read_text())["results"]}
    lines = ["| method | without InCo | with InCo | difference [95 %] | wins |", "|---|---|---|---|---|"]
    for base, result in found.items():
        extended = METHODS.get(f"{base}+inco")
        if extended is not None and extended.name in found:
            seeds = found[extended.name]["seeds"], result["seeds"]
            gap = paired(*seeds)
            assert gap.half_width is not None
            means = " | ".join(f"{100 * fmean(values):.1f}" for values in reversed(seeds))
            interval = f"{100 * gap.mean:+.1f} ± {100 * gap.half_width:.1f}"
            lines.append(f"| {base} | {means} | {interval} | {gap.wins} of {len(result['seeds'])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / f"{sys.argv[1]}-inco.md").write_text(pairs(sys.argv[1]))
