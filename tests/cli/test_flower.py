"""``incofl flower new``: an app that Flower packs and that means what was asked for."""

import io
import runpy
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import flatten_dict

from incofl.cli.flower import app_name
from incofl.config import load_config
from incofl.flower import Settings
from incofl.flower.settings import NAMES, read_run_config
from tests.shell import Shell


def test_the_app_means_what_was_asked_for(incofl: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "My_fleet 2"
    options = ("--method", "heterofl", "--data", "fashion-mnist", "--model", "resnet26", "--clients", "7")
    code, out, err = incofl("flower", "new", folder, "--preset", "paper-cifar10", *options)
    assert (code, err) == (0, "")
    assert str(folder / "README.md") in out
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-fleet-2"
    assert project["project"]["dependencies"] == []
    given = flatten_dict(project["tool"]["flwr"]["app"]["config"])
    settings, preset, overrides = read_run_config(given, Settings())
    assert settings == Settings(out=str(folder / "runs" / "first"), resume=True, min_nodes=4, min_replies=4)
    assert NAMES.keys() <= given.keys()  # or flwr run --run-config could not override them
    config = load_config(preset, overrides)
    assert (config.method, config.data.name, config.model.name) == ("heterofl", "fashion-mnist", "resnet26")
    assert (config.data.clients, config.cohort_size) == (7, 7)
    assert Path(config.data.root).is_absolute()
    assert config.rounds == load_config("paper-cifar10").rounds
    for name in ("server_app", "client_app"):
        source = (folder / f"{name}.py").read_text()
        assert 3 <= source.count("\n") <= 10
        assert callable(runpy.run_path(str(folder / f"{name}.py"))["app"])


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's use of pathspec
def test_flower_packs_it_without_its_runs(incofl: Shell, tmp_path: Path) -> None:
    incofl("flower", "new", tmp_path / "app")
    (tmp_path / "app" / "runs" / "first").mkdir(parents=True)
    (tmp_path / "app" / "runs" / "first" / "summary.json").write_text("{}")
    names = set(zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path / "app"))).namelist())
    assert names == {"pyproject.toml", "server_app.py", "client_app.py", "README.md", ".info/CONTENT"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--method", "fedavgg"], "fedavgg"),
        (["--data", "digit"], "digit"),
        (["--preset", "dem"], "dem: no such file, nor a preset"),
        (["--clients", "0"], "--clients"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    options: list[str], problem: str, incofl: Shell, tmp_path: Path
) -> None:
    code, out, err = incofl("flower", "new", tmp_path / "app", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert problem in err
    assert not (tmp_path / "app").exists()


def test_a_folder_that_is_not_empty_is_refused(incofl: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    for folder in (tmp_path, tmp_path / "mine.py"):
        code, _, err = incofl("flower", "new", folder)
        assert code == 2
        assert err == f"incofl: {folder}: got a file or a folder that is not empty, expected a new or an empty one\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("fleet", "fleet"),
        ("7 Dwarfs!", "app-7-dwarfs"),
        ("___", "app"),
        ("x" * 40, "x" * 32),
        ("1" * 40, "app-" + "1" * 28),
    ],
)
def test_names_that_flower_allows(folder: str, name: str) -> None:
    assert app_name(Path(folder)) == name
