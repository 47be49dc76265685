"""What is released: a wheel with everything that the package needs, and versions that agree."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import incofl

ROOT = Path(__file__).parents[1]


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation is not None
    assert newest is not None
    assert {project["version"], citation[1], newest[1]} == {incofl.__version__}


def test_supported_pythons_are_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert sys.version_info >= (3, 11)
    assert f"Programming Language :: Python :: 3.{sys.version_info.minor}" in project["classifiers"]


def test_what_is_pinned_can_be_installed_by_every_supported_python() -> None:
    """Also by 3.11.0: a pin that wants a later 3.11 cannot be installed where an older one is."""
    wanted = {found.name: found.metadata["Requires-Python"] or "" for found in metadata.distributions()}
    assert {name: said for name, said in wanted.items() if not SpecifierSet(said).contains("3.11.0")} == {}


@pytest.mark.slow
def test_the_wheel_holds_everything_and_runs_by_itself(tmp_path: Path) -> None:
    """Built from a copy, unpacked elsewhere, and run without the repository."""
    source, place = tmp_path / "source", tmp_path / "place"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("incofl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(place)
    files = (
        path for path in (ROOT / "src" / "incofl").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    assert packed == {path.relative_to(ROOT / "src").as_posix() for path in files}
    command = [sys.executable, "-m", "incofl", "run", "demo", "--rounds", "1", "--out", "run", "--quiet"]
    small = ["--set", "data.limit=200", "--set", "model.name=tiny-mlp"]
    environment = os.environ | {"PYTHONPATH": str(place)}
    subprocess.run([*command, *small], cwd=tmp_path, env=environment, check=True, capture_output=True)
    where = [sys.executable, "-c", "import incofl; print(incofl.__file__)"]
    done = subprocess.run(where, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()).is_relative_to(place)
