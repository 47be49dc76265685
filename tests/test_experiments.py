"""The tables of experiments/ are made from the committed numbers, by one convention."""

import itertools
import json
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from incofl.statistics import Estimate, visible_effect

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return lambda name: runpy.run_path(str(ROOT / "experiments" / f"{name}.py"))


def test_tables_are_made_from_the_numbers(script: Any) -> None:
    for name, text in script("collect")["tables"]().items():
        assert (RESULTS / f"{name}.md").read_text() == text, "run: python experiments/collect.py"


def test_the_study_of_inco_is_made_from_its_evaluations(script: Any) -> None:
    for path, text in script("inco_pages")["pages"]().items():
        assert path.read_text() == text, "run: python experiments/inco_pages.py"


def test_half_width_is_the_interval_of_the_t_test(script: Any) -> None:
    values = [1.0, 2.0, 4.5]
    interval = ttest_1samp(values, 0).confidence_interval(0.95)
    half = script("collect")["half_width"](float(np.std(values, ddof=1)), 3)
    assert half == pytest.approx((interval.high - interval.low) / 2)
    assert tuple(vars(Estimate.of(values)).values()) == pytest.approx((2.5, half))


def test_comparisons_of_both_forms_are_read(script: Any) -> None:
    """Standard deviations, as files before half widths have them, and what ``incofl compare`` writes now."""
    half = 4.302652729911275 * 0.1 / 3**0.5
    old, new = {"mean": 0.5, "deviation": 0.1}, {"mean": 0.5, "half_width": half}
    plain = {"method": "heteroavg", "difference": None}
    results = [
        plain | {"last": old, "last_ten": old, "by_level": {"0": old}},
        plain | {"last": new, "tail": new, "by_level": {"0": new}, "measure": "round 5"},
    ]
    table = script("collect")["comparison_table"]
    before, now = (table({"results": [result], "seeds": [0, 1, 2]}) for result in results)
    assert "| heteroavg | 50.0 ± 24.8 | 50.0 ± 24.8 | 50.0 ± 24.8 |  |  |" in before
    assert now == before.replace("last ten", "round 5")


@pytest.mark.parametrize(("n", "deviations"), [(3, 3.26), (5, 1.68), (15, 0.78)])
def test_visible_effects_are_found_in_four_of_five_experiments(n: int, deviations: float) -> None:
    effect = visible_effect(n)
    assert effect == pytest.approx(deviations, abs=0.01)
    samples = effect + np.random.default_rng(0).standard_normal((20_000, n))
    assert (ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.01)


def test_pages_have_one_convention() -> None:
    for page in ("README.md", "docs/results.md", "docs/reproduction.md"):
        assert not re.search(r"±\s+standard\s+deviation", (ROOT / page).read_text()), page


def test_what_cannot_be_seen_has_its_visible_effect() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text()
    tables = "".join(path.read_text() for path in RESULTS.glob("reproduce-mini-*.md"))
    cells = {cell.strip() for line in tables.splitlines() for cell in line.split("|")}
    ends = cells | {end for cell in cells for end in cell.split(" to ")}
    claims = page[page.index("## Claim by claim") : page.index("\n## ", page.index("## Claim by claim") + 1)]
    for line in claims.splitlines():
        if "cannot be seen" in line:
            assert "visible from" in line, line
        for low, high in re.findall(r"visible from ([\d.]+)(?: to ([\d.]+))?", line):
            assert {low, high or low} <= ends, line


def test_rules_are_compared_per_layer_and_per_kernel() -> None:
    document = json.loads((RESULTS / "reproduce-mini-rules.json").read_text())
    mixed = [run["inco"] for run in document["runs"].values() if run["method"] == "incoavg"]
    rules = {("released", "kernel"), *itertools.product(("algorithm1", "theorem"), ("tensor", "kernel"))}
    assert Counter((inco["rule"], inco["granularity"]) for inco in mixed) == dict.fromkeys(
        rules, 6
    )  # three seeds on two data sets
