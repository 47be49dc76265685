"""Names such as package.module:attribute."""

import math
import sys
from pathlib import Path

import pytest

from incofl.errors import ConfigError
from incofl.imports import load_attribute


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, which is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"named_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("import math\nnumber = 3\ndef double(x): return 2 * x\n")
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_an_attribute_can_be_anything(module: str) -> None:
    assert load_attribute("math:pi", "task.name") == math.pi
    assert load_attribute(f"{module}:number", "task.name") == 3
    assert load_attribute(f"{module}:double", "method")(4) == 8


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("{}:", "data.name: got '{}:', expected package.module:attribute"),
        (":double", "data.name: got ':double', expected package.module:attribute"),
        ("./a/mine.py:x", "data.name: got './a/mine.py:x', expected a module, not a file; did you mean 'a.mine:x'?"),
        ("{}:doubel", "data.name: {} has no 'doubel'; did you mean 'double'?"),
        ("{}:x", "data.name: {} has no 'x'; expected one of: double, number"),
        (
            "nowhere.at_all:make",
            "data.name: got 'nowhere.at_all:make', but there is no module 'nowhere' in the current ",
        ),
        ("broken:make", "data.name: broken cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("failing:make", "data.name: failing cannot be imported: ValueError: two lines"),
    ],
)
def test_what_is_wrong_with_a_name(module: str, name: str, line: str) -> None:
    Path("broken.py").write_text("import nowhere")
    Path("failing.py").write_text(r"raise ValueError('two\nlines')")
    with pytest.raises(ConfigError) as caught:
        load_attribute(name.format(module), "data.name")
    assert str(caught.value).startswith(line.format(module))
