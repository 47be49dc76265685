"""What the documents say is what the code does."""

import ast
import dataclasses
import functools
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

import incofl
from incofl.cli import app
from incofl.config import load_config, make_config
from incofl.config.schema import SECTIONS
from incofl.costs import load_devices
from incofl.methods import all_options
from tests.shell import Shell

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ABOVE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in ABOVE), *sorted((ROOT / "docs").glob("*.md"))]


def fenced(text: str) -> Iterator[tuple[int, str, str]]:
    """The Python blocks of a page: line, what is said after ``python``, and the code."""
    for block in re.finditer(r"^( *)```python *([^\n]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, block.start()) + 1, block[2].strip(), textwrap.dedent(block[3])


def python_blocks(text: str) -> list[str]:
    return [code for _, _, code in fenced(text)]


def runnable() -> Iterator[object]:
    """Every ```python block but those of files (``no-run``); ``hub``, ``lora``: need this extra; ``slow``: slower."""
    hub = pytest.mark.skipif(find_spec("datasets") is None, reason="needs the extra hub")
    lora = pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra lora")
    for page in PAGES:
        for line, word, code in fenced(page.read_text()):
            marks = {"": (), "no-run": None, "hub": hub, "lora": lora, "slow": pytest.mark.slow}[word]
            if marks is not None:
                yield pytest.param(code, id=f"{page.relative_to(ROOT)}:{line}", marks=marks)


@pytest.mark.parametrize("code", list(runnable()))
def test_python_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, in a folder of its own, as a script that somebody has copied it into."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs" / "theory")
    (tmp_path / "block.py").write_text(code)
    runpy.run_path("block.py", run_name="__main__")


def test_readme_prints_the_round_function_unabridged() -> None:
    source = (ROOT / "src" / "incofl" / "engine" / "round.py").read_text()
    start = source.index("def run_round")
    function = source[start : source.index("\n\n\n", start)]
    assert function + "\n" in python_blocks(README)


@pytest.mark.parametrize("page", ["config", "devices", "own-models"])
def test_toml_blocks_are_valid(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "block.toml").write_text(block)
        if "[[device]]" in block:
            (device,) = load_devices(tmp_path / "block.toml")
            assert device.count == 60
        else:
            make_config(tmp_path / "block.toml")


def test_the_snippet_for_flower_is_its_example() -> None:
    text = (ROOT / "docs" / "flower.md").read_text()
    (block,) = re.findall(r"```\n(server_data = .*?)```", text, re.DOTALL)
    example = (ROOT / "examples" / "flower_own_app.py").read_text()
    for line in re.findall(r"^\w+_app = .*?\)(?=\s)", block, re.MULTILINE):
        assert line in example


def test_readme_prints_the_quickstart() -> None:
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert python_blocks(README)[0].strip() == quickstart.partition('"""\n\n')[2].strip()


@pytest.mark.slow
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
    """In one file and one line; with a rate of zero it is heteroavg, bit for bit, with another it is not."""
    import torch

    from incofl import methods
    from tests.federations import run_rounds, tiny_federation

    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = [code for code in python_blocks(text) if "shrinkavg" in code]
    assert block.count("\n") <= 40
    (tmp_path / "shrinkavg.py").write_text(block)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    (line,) = re.findall(r"^    (\"shrinkavg\": .*),$", text, re.MULTILINE)
    for name, entry in ast.literal_eval(f"{{{line}}}").items():
        monkeypatch.setitem(methods._BASES, name, entry)
        monkeypatch.setitem(methods._SHARED, name, entry)
    methods.all_options.cache_clear()
    try:

        def result(method: str, *options: str) -> dict[str, torch.Tensor]:
            return run_rounds(tiny_federation(f"method={method}", *options), 2)[-1].shared

        for added in ("", "+inco"):
            expected = result(f"heteroavg{added}")
            same = result(f"shrinkavg{added}", "shrink.rate=0.0")
            other = result(f"shrinkavg{added}", "shrink.rate=0.01")
            assert all(torch.equal(same[name], expected[name]) for name in expected)
            assert any(not torch.equal(other[name], expected[name]) for name in expected)
    finally:
        methods.all_options.cache_clear()


def test_the_plans_of_own_models_come_out_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that we did not write, split by depth and by width."""
    import sys

    page = (ROOT / "docs" / "own-models.md").read_text()
    (block,) = [code for code in python_blocks(page) if "class Classifier" in code]
    (tmp_path / "classifier.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "120")
    for method in ("incoavg", "heterofl"):
        app(["plan", "--model", "classifier:Classifier", "--method", method], standalone_mode=False)
        printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
        assert "\n".join(printed) in page


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of docs/own-data-and-tasks.md, in a folder that holds its project."""
    page = (ROOT / "docs" / "own-data-and-tasks.md").read_text()
    (code,) = [block for block in python_blocks(page) if "scaledavg" in block]
    (config,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (commands,) = re.findall(r"```\n(incofl .*?)```", page, re.DOTALL)
    (tmp_path / "project.py").write_text(code)
    (tmp_path / "project.toml").write_text(config)
    monkeypatch.chdir(tmp_path)
    return [line.split()[1:] for line in commands.splitlines()]


def test_an_own_project_is_resumed_on_the_command_line(project: list[list[str]], incofl: Shell) -> None:
    for words in project:
        if words[0] == "run":
            code, _, error = incofl(*words, "--quiet")
            assert code == 0, error
    assert len(Path("runs/project/metrics.jsonl").read_text().splitlines()) == 3


def test_config_reference_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["reference"]()
    assert (ROOT / "docs" / "config.md").read_text() == page, "run: python docs/reference.py"


def test_pictures_of_the_first_page_are_current() -> None:
    for name, draw in runpy.run_path(str(ROOT / "docs" / "drawings.py"))["PICTURES"].items():
        assert (ROOT / "docs" / "images" / name).read_text() == draw(), "run: python docs/drawings.py"


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:|//)", text)
        loaded += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)[^>]* href=\"?(https?:|//)", text)
        assert not loaded, page
    assert "<code>--rounds</code>" in (tmp_path / "command-line.html").read_text()
    assert "export_model" in (tmp_path / "python.html").read_text()
    first = (tmp_path / "index.html").read_text()
    assert re.search(r'<img alt="One server model;[^"]*" src="images/slicing.svg"', first)
    assert "no-run" not in "".join(page.read_text() for page in pages)


def test_tables_are_current() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    for name, results in tables["PAGES"].items():
        page = (ROOT / "docs" / name).read_text()
        assert tables["filled"](page, results) == page, "run: python docs/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file that exists, and to a heading that it has."""
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists(), target
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if anchor else ()
            anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert not anchor or anchor in anchors, f"{target}#{anchor}"


TEXTS = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (*PAGES, ROOT / "experiments" / "README.md", *(ROOT / "examples").glob("*/README.md"))
    if page.name != "CHANGELOG.md"
}
FOREIGN = {"Strategy", "strategy", "MultiheadAttention"}  # names of other libraries
YOURS = {"project.py", "project.toml", "classifier.py", "shrinkavg.py"}  # files that a reader writes


@functools.cache
def repository() -> tuple[set[str], set[str]]:
    """The names of all files, and all words of code."""
    folders = ("src", "docs", "tests", "examples", "experiments", "benchmarks")
    files = [
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(path for each in folders for path in (ROOT / each).rglob("*")),
    ]
    code = [path for path in files if path.suffix in (".py", ".toml", ".sh", ".js", "") and path.is_file()]
    texts = [path.read_text() for path in code if path != Path(__file__) and "results" not in path.parts]
    return {path.name.removesuffix(".template") for path in files}, {
        word for text in texts for word in re.findall(r"\w+", text)
    }


@pytest.mark.parametrize("page", TEXTS)
def test_names_of_code_exist(page: str) -> None:
    """Files, functions, attributes and keys in backticks occur in the code; functions after a linked file are in it."""
    files, words = repository()
    prose = re.sub(r"^( *)```.*?^ *```$", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`([A-Za-z_][\w/.-]*\.(?:py|sh|service|ipynb))`", prose):
        assert Path(name).name in files | YOURS, name
    for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`", prose):
        if name not in files | YOURS | set(incofl.METHODS):
            assert all(word in words | FOREIGN or word.startswith("inco_") for word in name.split(".")), name
    for path, listed in re.findall(r"\]\(([^)]+\.py)\): ((?:`\w+`(?:, )?)+)", prose):
        source = ((ROOT / page).parent / path).read_text()
        for name in re.findall(r"\w+", listed):
            assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE), f"{path}: {name}"


@pytest.mark.parametrize("page", TEXTS)
def test_config_keys_and_public_names_exist(page: str) -> None:
    tables = SECTIONS | {key: type(value) for key, value in all_options().items()}
    keys = {f"{table}.{field.name}" for table, cls in tables.items() for field in dataclasses.fields(cls)}
    for key in re.findall(r"(?:`|--set )([a-z-]+\.[a-z_]+)(?:`| = |=)", TEXTS[page]):
        if key.split(".")[0] in tables and key.split(".")[1] not in ("py", "options", "safetensors", "crt", "key"):
            assert key in keys, key
    for name in re.findall(r"\bincofl\.(\w+)", TEXTS[page]):
        assert hasattr(incofl, name) or find_spec(f"incofl.{name}"), name
    for name, member in re.findall(r"`([A-Z]\w+)\.([a-z_]+)", TEXTS[page]):
        if owner := getattr(incofl, name, None):
            assert hasattr(owner, member) or member in owner.__dataclass_fields__, f"{name}.{member}"


@pytest.mark.parametrize("page", TEXTS)
def test_options_of_commands_exist(page: str) -> None:
    """Those of a command line are options of its command; an option alone is one of some command."""
    known: dict[str, set[str]] = {}

    def collect(command: Any, name: str) -> None:
        known[name] = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for key, inner in getattr(command, "commands", {}).items():
            collect(inner, f"{name} {key}".strip())

    collect(typer.main.get_command(app), "")
    for words in re.findall(r"\bincofl ([a-z][^`#\n|]*)", TEXTS[page].replace("\\\n", " ")):
        command = next((name for name in (" ".join(words.split()[:n]) for n in (2, 1)) if name in known), None)
        if command is not None:
            wrong = {word for word in words.split() if re.fullmatch("--?[a-z-]+", word)} - known[command]
            assert not wrong, (words, wrong)
    elsewhere = {"--run-config", "--host", "--build-arg"}  # of flwr, of make_keys.py, and of docker
    for option in re.findall(r"`(--?[a-z][a-z-]*)[^`]*`", TEXTS[page]):
        assert option in set().union(elsewhere, *known.values()), option


def test_configs_are_valid() -> None:
    for path in sorted((ROOT / "experiments").glob("*.toml")):
        load_config(path)


PAGES_OF_RESULTS = (
    "../README.md",
    "results.md",
    "reproduction.md",
    "methods.md",
    "lora.md",
    "speed.md",
    "privacy.md",
    "robustness.md",
)


def test_tables_are_the_results_as_they_came_out() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in PAGES_OF_RESULTS)
    for path in (ROOT / "experiments" / "results").glob("*.md"):
        linked = re.fullmatch(r"inco-[a-d]\.md|(field|fedecover|precision|privacy|trust)\.md", path.name)
        text = path.name if linked else path.read_text().strip()
        assert text in page, path.name
    results = "".join(path.read_text() for path in (ROOT / "experiments" / "results").glob("*.md"))
    found = set(re.findall(r"[\d.]+ ± [\d.]+", results))
    demo = (ROOT / "experiments" / "results" / "demo-first.md").read_text().strip()
    assert demo in README
    for number in re.findall(r"[\d.]+ ± [\d.]+", README.replace(demo, "")):
        assert number in found, number


def test_numbers_of_privacy_are_those_of_its_study() -> None:
    numbers = re.findall(r"[\d.]+ ± [\d.]+", (ROOT / "docs" / "privacy.md").read_text())
    results = (ROOT / "experiments" / "results" / "privacy.md").read_text()
    assert len(numbers) >= 5
    assert all(number in results for number in numbers)
