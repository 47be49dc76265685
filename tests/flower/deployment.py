"""A SuperLink and SuperNodes as real processes, with TLS and authentication, by the example's own scripts.

On loopback, or each on the host that it is told to be on.

Every wait has an end, and at the end everything that was started is killed, with all that it has started itself.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from incofl.cli import app as cli

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "flower-deployment"
LONG = 300.0  # seconds for anything to start, on a busy machine
DEADLINE = int(os.environ.get("INCOFL_TEST_DEADLINE", "75"))  # for a turn, which includes the start of its process

KEYS = """
model.width = 1.0
local.epochs = 3
local.batch_size = 16
local.lr = 0.05
engine.workers = 1
"""

# One process for all keys: each start of flwr takes seconds.
REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[1:]:
    app(["supernode", "register", key, "fleet"], standalone_mode=False)
"""


def wait_for(what: Callable[[], T], message: Callable[[], str] | str, seconds: float = LONG) -> T:
    """Whatever comes out of a question, as soon as it is true."""
    until = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > until:
            raise AssertionError(f"after {seconds:g} s: {message if isinstance(message, str) else message()}")
        time.sleep(0.3)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def family(pid: int) -> list[int]:
    """A process that began a session, and all that descend from it or have stayed in its session, as far as alive."""
    parents: dict[int, list[int]] = {}
    found = [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent, _, session = (int(word) for word in path.read_text().rpartition(")")[2].split()[1:4])
            member = int(path.parent.name)
            parents.setdefault(parent, []).append(member)
            if session == pid != member:
                found.append(member)
    for member in found:
        found.extend(child for child in parents.get(member, []) if child not in found)
    return found


def write_app(folder: Path, clients: int, more: str = "") -> None:
    """An app as ``incofl flower new`` writes it, but for its clients' bad manners; it learns in three rounds."""
    cli(["flower", "new", str(folder), "--model", "tiny-mlp", "--clients", str(clients)], standalone_mode=False)
    project, known = folder / "pyproject.toml", f"cohort = {clients}\n"
    assert known in project.read_text()
    project.write_text(project.read_text().replace(known, known + KEYS + more))
    shutil.copy(Path(__file__).with_name("hostile_app.py"), folder / "client_app.py")


class Deployment:
    """A fleet in a folder; ``with`` starts the SuperLink and ends everything."""

    def __init__(
        self, folder: Path, nodes: int, address: str = "127.0.0.1", on: Callable[[str], Sequence[str]] = lambda name: ()
    ) -> None:
        """Args: folder, number of nodes; the SuperLink's address; what starts a command on the host of a process."""
        self.folder, self.nodes, self.address, self._on = folder, nodes, address, on
        self.port = free_port()
        self.app = folder / "app"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        known = {"KEYS": "keys", "STATE": "state", "FLWR_HOME": "flwr", "INCOFL_TEST_ORDERS": "orders"}
        self.environment = os.environ | {name: str(folder / path) for name, path in known.items()}
        self.environment |= {
            **{
                "HOST": address,
                "PORT": str(self.port),
                "PYTHONPATH": paths,
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
            },
            **{"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }

    def __enter__(self) -> "Deployment":
        (self.folder / "orders").mkdir()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a killed test cleans up, too
        keys = [str(SCRIPTS / "make_keys.py"), str(self.folder / "keys"), "--host", self.address]
        self._call(sys.executable, *keys, "--nodes", str(self.nodes + 1))  # one that nobody registers
        try:
            self.start_superlink()
            self._call(str(SCRIPTS / "register.sh"))  # no key: writes the connection alone
            self.register()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self._processes):
            self.kill(name)

    def start_superlink(self) -> None:
        """Returns when it is ready."""
        (self.folder / "superlink.log").unlink(missing_ok=True)
        self._start("superlink", str(SCRIPTS / "superlink.sh"))
        wait_for(lambda: "Uvicorn running" in self.log("superlink"), lambda: self.log("superlink"))

    def register(self) -> None:
        """Tells the SuperLink whom to trust."""
        keys = [str(self.folder / "keys" / f"node-{node}.pub") for node in range(self.nodes)]
        self._call(sys.executable, "-c", REGISTER, *keys)

    def start_node(self, node: int, level: int) -> None:
        """Returns at once."""
        self.environment["NODE_PORT"] = str(free_port())
        script = str(SCRIPTS / "supernode.sh")
        self._start(f"node-{node}", script, f"node-{node}", f"partition-id={node} level={level}")

    def restart_node(self, node: int, level: int) -> None:
        """Returns when it is connected: for a minute after it was killed, the SuperLink refuses it."""
        until, name = time.monotonic() + LONG, f"node-{node}"
        while True:
            (self.folder / f"{name}.log").unlink(missing_ok=True)
            self.start_node(node, level)
            wait_for(lambda: not self.alive(name) or "SuperNode ID" in self.log(name), lambda: self.log(name))
            if self.alive(name):
                return
            assert time.monotonic() < until, self.log(name)

    def start_run(self, name: str, **run_config: Any) -> Path:
        """``flwr run``, patient with whoever does not come; its run folder."""
        out = self.folder / "runs" / name
        patient = {"deadline": DEADLINE, "wait": int(LONG), "min_nodes": 1, "min_replies": 1, "patience": 9}
        values = {"out": str(out), **patient, **run_config}
        given = " ".join(f"{key.replace('__', '.').replace('_', '-')}={json.dumps(v)}" for key, v in values.items())
        self._start(f"run-{name}", "flwr", "run", str(self.app), "fleet", "--stream", "--run-config", given)
        return out

    def finished(self, out: Path, rounds: int, seconds: float = LONG) -> list[dict[str, Any]]:
        """The lines of a run, as soon as there are so many."""
        log = f"run-{out.name}"
        return wait_for(
            lambda: lines if len(lines := rows(out)) >= rounds else [], lambda: self.log(log)[-3000:], seconds
        )

    def ended(self, out: Path) -> None:
        """Until ``flwr run`` has returned."""
        wait_for(lambda: not self.alive(f"run-{out.name}"), "flwr run does not end")

    def alive(self, name: str) -> bool:
        """Whether a process runs."""
        return self._processes[name].poll() is None

    def log(self, name: str) -> str:
        """What it has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, sign: signal.Signals = signal.SIGKILL) -> None:
        """Signals a process and all of its descendants."""
        process = self._processes[name]
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        if sign == signal.SIGKILL:
            process.wait(30)
            del self._processes[name]

    def server_app(self) -> int:
        """The process of the server app."""
        for pid in family(self._processes["superlink"].pid):
            with contextlib.suppress(OSError):
                if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError("there is no server app")

    def order(self, node: int, round: int, deed: str) -> None:
        """What a hostile node does in a round, counted from 1."""
        (self.folder / "orders" / f"{node}-{round}").write_text(deed)

    def obeyed(self, node: int, round: int) -> bool:
        """Whether a node is about to do what it was told."""
        return not (self.folder / "orders" / f"{node}-{round}").exists()

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*self._on(name), *command],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _call(self, *command: str) -> None:
        done = subprocess.run(
            [*self._on("superlink"), *command],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def rows(out: Path) -> list[dict[str, Any]]:
    """The finished rounds of a run, which may be under way."""
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reasons(row: dict[str, Any]) -> dict[int, str]:
    """Why whose reply was not accepted."""
    return {refusal["client"]: refusal["reason"] for refusal in row["rejected"]}
