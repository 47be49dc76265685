"""Puts the tables of benchmarks and experiments into the pages, between the marks that name them.

usage: python docs/tables.py
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
# Which page shows the results of which folder.
PAGES = {
    "../README.md": HERE.parent / "experiments" / "results",
    "speed.md": HERE.parent / "benchmarks" / "results",
    "devices.md": HERE.parent / "benchmarks" / "results",
    "lora.md": HERE.parent / "experiments" / "results",
    "robustness.md": HERE.parent / "experiments" / "results",
    "methods.md": HERE.parent / "experiments" / "results",
    "results.md": HERE.parent / "experiments" / "results",
    "reproduction.md": HERE.parent / "experiments" / "results",
}


def filled(page: str, results: Path) -> str:
    """A page with every table as it came out."""

    def table(mark: re.Match[str]) -> str:
        return f"<!-- {mark[1]} -->\n{(results / f'{mark[1]}.md').read_text().strip()}\n<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    for name, results in PAGES.items():
        path = HERE / name
        path.write_text(filled(path.read_text(), results))
