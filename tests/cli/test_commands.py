"""Every command line of the README and the pages runs: those of a page in their order, in one folder, on small runs."""

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from incofl.data.cache import write_cache
from tests.cli.test_cli import SMALL
from tests.hub import examples, expect, serve_small_svhn
from tests.shell import Shell
from tests.signals import write_har
from tests.texts import write_imdb, write_shakespeare, write_sst2

ROOT = Path(__file__).parents[2]
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}

# What a reader fills in.
FILLED = {"package.module:factory": "classifier:Classifier", "DIR": "data"}
# What stands on a page by the time a reader comes to it.
BEFORE = {
    "docs/report.md": [
        "run demo --out runs/demo",
        "run demo --out runs/a",
        "run demo --method heteroavg --out runs/b",
        "compare demo --methods heteroavg,incoavg --seeds 0,1 --out runs/comparison",
    ],
}
# Run elsewhere: they need what a test of one page cannot have.
ELSEWHERE = {
    "--set engine.address=auto": "tests/engine/test_ray.py::test_a_run_on_an_existing_cluster",
    " --serve": "tests/report/test_live.py::test_the_page_follows_a_run",
    "model.pretrained=timm/": "tests/models/test_pretrained.py::test_from_the_hub",
}
# Lines that are no commands of ours, by how they begin, and where what they start is tested; those of others are not.
FLEET = "tests/flower/test_deployment.py::test_five_sizes_learn_and_give_the_bits_of_the_engine"  # by the same scripts
FIELD = "tests/test_experiments.py::test_which_method_is_made_from_costs_and_evaluations"
OTHERS = {
    **dict.fromkeys(("source ", "pip install", "python3 -m venv", "export ", "ray start", "tensorboard "), ""),
    **dict.fromkeys(("make ", ".venv/bin/pre-commit"), ""),  # CI runs these; the second runs the first
    "python experiments/field/pages.py": FIELD,
    "python docs/tables.py": "tests/test_docs.py::test_tables_are_current",
    "flwr run my-simulation": "tests/flower/test_simulation.py::test_flwr_run_works_at_once_in_a_new_app",
    "flwr run my-fleet": FLEET,
    "examples/flower-deployment/fleet.sh": FLEET,
}
# Smaller than a reader's, and nothing else: added to the commands that train. Studies of the paper only count their
# runs (--dry-run); tests/studies runs one.
FEW = ["--rounds", "2", "--set", "eval.limit=40", "--set", "engine.workers=1"]


def commands(page: str) -> list[str]:
    """The lines of a page's blocks that call incofl, whole and without comments."""
    found = []
    for language, block in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", TEXTS[page], re.DOTALL | re.MULTILINE):
        if language:
            continue
        lines = block.replace("\\\n", " ").splitlines()
        found += [re.split(r"\s+#", line)[0] for line in lines if line.startswith("incofl ")]
    return [line.removeprefix("incofl ") for line in found]


PAGES = [page for page in TEXTS if commands(page)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a reader has: the examples, data sets in their formats, a model of their own; and a Hub to fetch from."""
    data = tmp_path / "data"
    data.mkdir()
    write_shakespeare(data, roles=150, speeches=6)
    write_sst2(data, sentences=600)
    write_imdb(data, reviews=200)
    write_har(data, windows=4, people={"train": range(1, 22), "test": (22, 23)})
    serve_small_svhn(monkeypatch)
    expect(monkeypatch, "cifar10", 12, 4)
    write_cache(data / "cifar10.safetensors", examples(120, 3, 32, 32), examples(40, 3, 32, 32), "a test")
    for name in ("examples", "experiments/field"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for page, word, name in (("models", "class Classifier", "classifier"), ("data-and-tasks", "scaledavg", "project")):
        text = TEXTS[f"docs/own-{page}.md"]
        blocks = re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        (code,) = (block for block in blocks if word in block)
        (tmp_path / f"{name}.py").write_text(code)
    (config,) = re.findall(r"```toml\n(.*?)```", TEXTS["docs/own-data-and-tasks.md"], re.DOTALL)
    (tmp_path / "project.toml").write_text(config)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def smaller(words: list[str]) -> list[str]:
    """What is added to a command so that it ends soon."""
    if words[0] == "reproduce":
        return ["--dry-run"] if len(words) > 1 else []
    if (words[0] not in ("run", "compare") and "--try" not in words) or "--resume" in words:
        return []
    line = " ".join(words)
    if "--try" in words:
        return ["--rounds", "1", "--set", "data.limit=1000", "--set", "model.name=tiny-resnet"]
    if re.search("sst2|imdb", line):
        return [*FEW, "--set", "data.alpha=100"]
    own = re.search(r"shakespeare|har|--model|project|privacy|fleet|grow", line)
    return FEW if own else [*SMALL, *FEW]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page(page: str, folder: Path, incofl: Shell) -> None:
    for command in (*BEFORE.get(page, ()), *commands(page)):
        if any(part in command for part in ELSEWHERE) or ("executorch" in command and not find_spec("executorch")):
            continue
        for placeholder, value in FILLED.items():
            command = command.replace(placeholder, value)
        words = shlex.split(command)
        code, out, err = incofl(*words, *smaller(words))
        assert (code, err) == (0, ""), f"{command}: {err}"
        assert out, command


def test_no_other_command_of_a_page_is_forgotten() -> None:
    for page, text in TEXTS.items():
        for language, block in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines() if not language else ():
                if re.match(r"(make|source|pip|python3?|export|ray|flwr|tensorboard|\S+\.sh|\.venv\S+) ?", line):
                    assert any(line.startswith(known) for known in OTHERS), (page, line)


def test_what_runs_elsewhere_does() -> None:
    for name in (*ELSEWHERE.values(), *filter(None, OTHERS.values())):
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name
