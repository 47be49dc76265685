"""Flower's own simulation: the bits of the engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import incofl
from tests.federations import tiny_config
from tests.flower.fleets import comparable, final_state

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


@pytest.mark.flower
@pytest.mark.parametrize("method", ["incoavg", "incoscaffold", "fedrolex+inco", "scalefl"])
def test_two_rounds_of_the_simulation_are_those_of_the_engine(method: str, tmp_path: Path) -> None:
    config = tiny_config(f"method={method}", "rounds=2", "engine.workers=1")
    incofl.run(config, tmp_path / "here")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = os.environ | quiet | {"FLWR_HOME": str(tmp_path / "flwr"), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, method, str(tmp_path / "there")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert final_state(tmp_path / "here") == final_state(tmp_path / "there")
    assert comparable(tmp_path / "here") == comparable(tmp_path / "there")
