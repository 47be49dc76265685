"""Puts the tables of benchmarks/results into docs/speed.md, between the marks that name them.

usage: python docs/tables.py
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "speed.md"
RESULTS = HERE.parent / "benchmarks" / "results"


def filled(page: str) -> str:
    """The page with every table as it came out."""

    def table(mark: re.Match[str]) -> str:
        return f"<!-- {mark[1]} -->\n{(RESULTS / f'{mark[1]}.md').read_text().strip()}\n<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
