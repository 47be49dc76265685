"""Every command of the README does what it says, on runs made small."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.test_cli import SMALL
from tests.shell import Shell

ROOT = Path(__file__).parents[2]
BLOCK = re.search(r"```\nsource .*?```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line.partition("#")[0].strip() for line in (BLOCK[0].splitlines() if BLOCK else ())]
COMMANDS = [command.removeprefix("incofl ") for command in COMMANDS if command.startswith("incofl ")]
PLACEHOLDERS = {"DIR": "nowhere", "package.module:factory": "classifier:Classifier"}  # what a reader fills in


@pytest.mark.slow
def test_the_commands_of_the_readme(incofl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order and in one folder; only data that are not there are asked for, in one line."""
    assert len(COMMANDS) > 10
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    page = (ROOT / "docs" / "own-models.md").read_text()
    (model,) = (
        block for block in re.findall(r"```python.*?\n(.*?)```", page, re.DOTALL) if "class Classifier" in block
    )
    (tmp_path / "classifier.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        for placeholder, value in PLACEHOLDERS.items():
            command = command.replace(placeholder, value)
        words = shlex.split(command)
        own = "classifier" in command
        small = [*("--set", "rounds=2", "--set", "data.limit=300"), *([] if own else SMALL)]
        if words[0] in ("run", "compare") and "--resume" not in words and "nowhere" not in command:
            words += small
        code, out, err = incofl(*words)
        if "nowhere" in command:
            assert (code, err.count("\n")) == (2, 1), command
            assert "set data.root to the folder that holds it" in err
        else:
            assert (code, err) == (0, ""), command
            assert out
    assert all(Path(name).stat().st_size for name in ("report.html", "digits.png", "runs/three/comparison.md"))
    assert list(Path("runs/mine/analysis").glob("*.png"))
