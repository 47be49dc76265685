"""The rooms of the house: imports point one way, and no room knows what belongs to another."""

import ast
import subprocess
import sys
from pathlib import Path

from incofl.methods import SUMMARIES

SOURCE = Path(__file__).parents[1] / "src" / "incofl"

# Each room may import from the rooms above it in this list (and from itself).
ORDER = [
    ["errors", "statistics"],
    ["tensors", "seeds", "options", "imports", "optimizers"],
    ["layout", "schedule", "task"],
    ["split", "transform"],
    ["path"],
    ["inco", "aggregate", "anchor"],
    ["upload"],
    ["client"],
    ["evaluate"],
    ["server"],
    ["mean"],
    ["method"],
    ["methods", "models", "data"],
    ["attacks"],
    ["config"],
    ["costs"],
    ["engine"],
    ["analysis"],
    ["studies"],
    ["report", "export"],
    ["cli"],
    ["flower"],
]
# ``Layout.infer`` is where users look for it, though what it calls is built on layouts: it imports when it is called.
EXCEPTION = ("layout", "models")
# Defaults that the documents name: the method of a config, and those of ``incofl compare``.
DEFAULTS = {("config/schema.py", "fedfloor"), ("cli/compare.py", "heteroavg"), ("cli/compare.py", "incoavg")}
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def imports(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("incofl.")}
    return rooms


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if room(path) not in ("__init__", "__main__")]


def test_imports_point_one_way() -> None:
    for path in files():
        for other in imports(path) - {room(path)}:
            if (room(path), other) != EXCEPTION:
                assert LEVEL[other] < LEVEL[room(path)], f"{path.name} imports {other}"


def test_every_room_is_in_the_order() -> None:
    assert {room(path) for path in files()} == set(LEVEL)


def test_inco_can_be_read_alone() -> None:
    for path in (SOURCE / "inco").glob("*.py"):
        assert imports(path) <= {"inco", "tensors", "layout", "errors", "options", "seeds", "transform"}


def test_only_one_room_knows_flower() -> None:
    for path in files():
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
        assert room(path) == "flower" or not any(name.split(".")[0] == "flwr" for name in names), path


def test_only_models_know_parameter_names() -> None:
    """No condition on names such as conv1 or layer2 anywhere else."""
    for path in files():
        if room(path) != "models":
            strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
            words = [s for s in strings if isinstance(s, str) and s in ("conv1", "conv2", "bn1", "downsample", "fc")]
            assert not words, path


def test_only_methods_know_names_of_methods() -> None:
    """No string of the code is a name of the table, or a list of them."""
    named = set()
    for path in files():
        if room(path) != "methods":
            strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
            words = {word.strip() for s in strings if isinstance(s, str) for word in s.split(",")}
            named |= {(path.relative_to(SOURCE).as_posix(), word) for word in words & SUMMARIES.keys()}
    assert named == DEFAULTS


WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder

EXTRAS = {"matplotlib", "scipy", "sklearn", "PIL", "plotly", "flwr", "ray", "datasets", "tensorboard", "peft"}
EXTRAS |= {"transformers", "onnx", "onnxscript", "onnxruntime", "executorch"}
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *r: None if name.partition(".")[0] in EXTRAS else find(name, *r))

import incofl
from incofl.cli import main

config = {"rounds": 1, "data": {"limit": 60, "clients": 4}, "model": {"name": "tiny-mlp"}, "eval": {"limit": 20}}
assert incofl.run(config, "run", progress=False)["status"] == "done"
commands = ["--help", "list methods", "plan", "plan --method heterofl --json", "analyze run", "report run"]
for command, expected in zip(commands, [0, 0, 0, 0, 2, 2], strict=True):
    sys.argv = ["incofl", *command.split()]
    try:
        main()
    except SystemExit as stop:
        assert (stop.code or 0) == expected, command
assert not EXTRAS & {name.partition(".")[0] for name in sys.modules}
"""


def test_a_base_install_works_without_extras(tmp_path: Path) -> None:
    """Without what the extras install, runs and plans work; what needs an extra says which in one line."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "incofl: analyze: needs matplotlib; try: pip install 'incofl[analysis]'",
        "incofl: report: needs plotly; try: pip install 'incofl[report]'",
    ]
    assert "incoavg" in done.stdout


def test_no_file_is_much_beyond_300_lines() -> None:
    assert {path.name: n for path in files() if (n := len(path.read_text().splitlines())) > 350} == {}
