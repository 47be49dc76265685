"""Copies the tables of ``incofl reproduce`` into results/, under the names that docs/reproduction.md uses.

usage: python experiments/collect.py runs/reproduce/mini
"""

import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for path in sorted([*folder.glob("*.md"), *folder.glob("*.json")]):
        (RESULTS / f"reproduce-{folder.name}-{path.name}").write_text(path.read_text())
