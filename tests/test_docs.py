"""What the documents say is what the code does."""

import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from incofl.config import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def fenced(text: str) -> Iterator[tuple[int, str, str]]:
    """The Python blocks of a page: line, what is said after ``python``, and the code."""
    for block in re.finditer(r"^( *)```python *([^\n]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, block.start()) + 1, block[2].strip(), textwrap.dedent(block[3])


def python_blocks(text: str) -> list[str]:
    return [code for _, _, code in fenced(text)]


def runnable() -> Iterator[object]:
    """Every ```python block of the pages; not ```python no-run, and ```python slow among the slow tests."""
    for page in PAGES:
        for line, word, code in fenced(page.read_text()):
            marks = {"": (), "no-run": None, "slow": (pytest.mark.slow,)}[word]  # no other word has a meaning
            if marks is not None:
                yield pytest.param(code, id=f"{page.relative_to(ROOT)}:{line}", marks=marks)


@pytest.mark.parametrize("code", list(runnable()))
def test_python_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, in a folder of its own, as a script that somebody has copied it into."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(code)
    runpy.run_path("block.py", run_name="__main__")


def test_readme_prints_the_round_function_unabridged() -> None:
    source = (ROOT / "src" / "incofl" / "engine" / "round.py").read_text()
    start = source.index("def run_round")
    function = source[start : source.index("\n\n\n", start)]
    assert function in python_blocks(README)[1]


def test_readme_prints_the_quickstart() -> None:
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert python_blocks(README)[0].strip() == quickstart.partition('"""\n\n')[2].strip()


@pytest.mark.parametrize("name", ["inco_by_hand", "own_method", "own_model", "quickstart"])
def test_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand, but with fewer rounds where rounds cost time."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"{name}.py"
    source = (ROOT / "examples" / f"{name}.py").read_text()
    path.write_text(source.replace('"rounds": 10', '"rounds": 1').replace("range(5)", "range(1)"))
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 1


def test_the_method_of_contributing_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an infinite bound it is heteroavg, bit for bit; with a small one it is not."""
    import dataclasses
    import importlib

    import torch

    from tests.federations import run_rounds, tiny_federation

    (block,) = python_blocks((ROOT / "CONTRIBUTING.md").read_text())
    assert block.count("\n") <= 40
    (tmp_path / "clippedavg.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("clippedavg")
    federation = tiny_federation("method=heteroavg")
    expected = run_rounds(federation, 2)[-1].shared

    def result(bound: float) -> dict[str, torch.Tensor]:
        method = dataclasses.replace(module.clippedavg, client=module.Clipped(bound))
        return run_rounds(dataclasses.replace(federation, method=method), 2)[-1].shared

    unbounded, bounded = result(float("inf")), result(1e-3)
    assert all(torch.equal(unbounded[n], expected[n]) for n in expected)
    assert any(not torch.equal(bounded[n], expected[n]) for n in expected)


def test_the_plans_of_own_models_come_out_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that we did not write, split by depth and by width."""
    import sys

    from incofl.cli import app

    page = (ROOT / "docs" / "own-models.md").read_text()
    (block,) = python_blocks(page)
    (tmp_path / "classifier.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "120")
    for options in ([], ["--method", "heterofl"]):
        app(["plan", "--model", "classifier:Classifier", *options], standalone_mode=False)
        printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
        assert "\n".join(printed) in page


def test_config_reference_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["reference"]()
    assert (ROOT / "docs" / "config.md").read_text() == page, "run: python docs/reference.py"


def test_tables_are_current() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    for name, results in tables["PAGES"].items():
        page = (ROOT / "docs" / name).read_text()
        assert tables["filled"](page, results) == page, "run: python docs/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_configs_are_valid() -> None:
    for path in sorted((ROOT / "experiments").glob("*.toml")):
        load_config(path)


def test_tables_are_the_results_as_they_came_out() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in ("results.md", "reproduction.md"))
    for path in (ROOT / "experiments" / "results").glob("*.md"):
        assert path.read_text().strip() in page, path.name
    cells = {cell for path in (ROOT / "experiments" / "results").glob("*.md") for cell in path.read_text().split(" | ")}
    for number in re.findall(r"[\d.]+ ± [\d.]+", README):
        assert number in cells, number
