"""Takes over the evaluations of the study ``inco``, and writes what they say.

usage: python experiments/inco_pages.py [runs/reproduce/inco]

With a folder, its CSV files become those of experiments/results; the pages beside them are made from these.
"""

import shutil
import sys
from pathlib import Path

from incofl.studies.inco import PARTS, load_part, page, read_csv

RESULTS = Path(__file__).parent / "results"


def pages() -> dict[Path, str]:
    """The page of every part that has results."""
    found = {}
    for letter in PARTS:
        path = RESULTS / f"inco-{letter}.csv"
        if path.exists():
            command = f"incofl reproduce inco --part {letter}"
            found[path.with_suffix(".md")] = page(load_part(letter), read_csv(path), command)
    return found


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for file in Path(folder).glob("inco-?.csv"):
            shutil.copy(file, RESULTS / file.name)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
