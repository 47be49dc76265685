"""Flower's own simulation: the bits of the engine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import incofl
from incofl.cli import app as cli
from tests.federations import tiny_config
from tests.flower.fleets import comparable, final_state, rows

SCRIPT = """
import sys
from flwr.simulation import run_simulation
from incofl.flower import make_client_app, make_server_app
from tests.federations import tiny_config
method, out = sys.argv[1:]
config = tiny_config(f"method={method}", "rounds=2", "engine.workers=1")
one = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
server = make_server_app(config, out=out, poll=0.05, wait=400)
run_simulation(server, make_client_app(), num_supernodes=config.data.clients, backend_config=one)
"""
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.flower


def environment(folder: Path) -> dict[str, str]:
    """Flower as in a new home, without its calls home."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    known = {"FLWR_HOME": str(folder / "flwr"), "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | quiet | known | {"PYTHONPATH": paths, "PATH": scripts}


def call(folder: Path, *command: str) -> None:
    """A command that must succeed."""
    done = subprocess.run(
        command, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("method", ["incoavg", "incoscaffold", "fedrolex+inco", "scalefl"])
def test_two_rounds_of_the_simulation_are_those_of_the_engine(method: str, tmp_path: Path) -> None:
    config = tiny_config(f"method={method}", "rounds=2", "engine.workers=1")
    incofl.run(config, tmp_path / "here", progress=False)
    call(tmp_path, sys.executable, "-c", SCRIPT, method, str(tmp_path / "there"))
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")
    assert comparable(tmp_path / "here") == comparable(tmp_path / "there")


@pytest.fixture
def no_superlink_left(tmp_path: Path) -> Iterator[None]:
    """``flwr run APP local`` starts a SuperLink that stays."""
    yield
    home = f"FLWR_HOME={tmp_path / 'flwr'}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if home in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def test_flwr_run_works_at_once_in_a_new_app(tmp_path: Path, no_superlink_left: None) -> None:
    cli(["flower", "new", str(tmp_path / "app"), "--model", "tiny-mlp", "--clients", "3"], standalone_mode=False)
    federation = ("--federation-config", "num-supernodes=3 client-resources-num-cpus=1")
    call(tmp_path, "flwr", "run", str(tmp_path / "app"), "local", "--stream", *federation, "--run-config", "rounds=2")
    lines = rows(tmp_path / "app" / "runs" / "first")
    assert [len(row["nodes"]) for row in lines] == [3, 3]
