"""The command line as a user meets it."""

import sys

import pytest

from incofl.cli import main


class Shell:
    """Runs ``incofl`` with some arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr(sys, "argv", ["incofl", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = self._capsys.readouterr()
        return int(stop.value.code or 0), out, err
