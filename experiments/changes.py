"""How much each rule of InCo changes the update of the deep layers, from the runs of the study ``rules``.

usage: python experiments/changes.py runs/reproduce/mini     writes experiments/results/reproduce-mini-changes.md
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

from collect import RESULTS

from incofl.statistics import Estimate, plus_minus
from incofl.studies.compare import markdown

PER = {"kernel": "kernel", "tensor": "layer"}


def relative_change(folder: Path, stage: str) -> float:
    """Norm of what InCo adds to a layer over the norm of its update; mean over rounds and mixed layers of a stage."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [record for row in rows for name, record in row["inco"].items() if name.startswith(stage)]
    return float(mean(record["norm_change"] / record["norm_deep"] for record in records if record["norm_deep"]))


def table(folder: Path) -> str:
    """A line for each rule and data set, mean ± half width of the 95 % interval over the seeds."""
    changes: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for name, config in json.loads((folder / "rules.json").read_text())["runs"].items():
        if config["method"] == "incoavg":
            rule = f"{config['inco']['rule']}, per {PER[config['inco']['granularity']]}"
            run = folder / "runs" / name
            found = relative_change(run, "layer"), relative_change(run, "layer4")
            changes[rule, config["data"]["name"]].append(found)
    rows = [
        [*key, *(plus_minus(Estimate.of(part), ".2f") for part in zip(*values, strict=True))]
        for key, values in changes.items()
    ]
    return markdown([["rule", "data", "change / update, all mixed layers", "change / update, last stage"], *rows])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (RESULTS / f"reproduce-{folder.name}-changes.md").write_text(table(folder))
