"""Hosts on this machine: network namespaces, each with an address of its own, at one switch."""

import os
import secrets
import shutil
import subprocess
from types import TracebackType

import pytest


def run(*command: str) -> None:
    """A command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def possible() -> bool:
    """Whether this machine lets us make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"try{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0


class Hosts:
    """Named hosts at a switch, as long as the ``with`` lasts; the n-th one has the address 10.77.0.n."""

    def __init__(self, *names: str) -> None:
        if not possible():
            pytest.skip("this machine does not let us make network namespaces")
        self._mark = secrets.token_hex(2)
        self._names = names

    def __enter__(self) -> "Hosts":
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _build(self) -> None:
        for name in ("switch", *self._names):
            run("ip", "netns", "add", self._space(name))
        switch = ("ip", "-n", self._space("switch"))
        run(*switch, "link", "add", "bridge", "type", "bridge")
        run(*switch, "link", "set", "bridge", "up")
        for name in self._names:
            # One end of the cable in the host, the other in the switch.
            host = ("ip", "-n", self._space(name))
            run(
                *host,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"to-{name}",
                "netns",
                self._space("switch"),
            )
            run(*switch, "link", "set", "dev", f"to-{name}", "master", "bridge", "up")
            run(*host, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            run(*host, "link", "set", "eth0", "up")
            run(*host, "link", "set", "lo", "up")

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in ("switch", *self._names):
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)

    def address(self, name: str) -> str:
        """A host's."""
        return f"10.77.0.{1 + self._names.index(name)}"

    def on(self, name: str) -> tuple[str, ...]:
        """What starts a command on a host."""
        return ("ip", "netns", "exec", self._space(name))

    def pull_cable(self, name: str) -> None:
        """Nothing reaches a host any more, and nobody is told."""
        run("ip", "-n", self._space("switch"), "link", "set", "dev", f"to-{name}", "down")

    def plug_in(self, name: str) -> None:
        """It is reached again."""
        run("ip", "-n", self._space("switch"), "link", "set", "dev", f"to-{name}", "up")

    def _space(self, name: str) -> str:
        return f"incofl-{self._mark}-{name}"
