"""A few of the inputs of ``tests/fuzz.py``; run that by itself for many."""

from pathlib import Path

import pytest

from tests.fuzz import TARGETS, fuzz

SLOW = {"report", "analyze", "resumption"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in TARGETS])
def test_no_input_is_a_traceback(name: str, tmp_path: Path) -> None:
    assert "inputs" in fuzz(name, 200 if name in SLOW else 40, seed=0, folder=tmp_path)
