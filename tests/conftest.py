from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.shell import Shell

# Examples are drawn anew in every run of a developer, but the same ones in every run of the suite.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("suite")


@pytest.fixture
def double() -> Iterator[None]:
    """Everything in float64, so that identities can be exact or nearly so."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def incofl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """The command line."""
    return Shell(monkeypatch, capsys)
