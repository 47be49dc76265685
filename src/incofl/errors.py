"""Errors that a user can fix. Every message is one line: what was looked at, what was found, what was expected."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class IncoflError(Exception):
    """Base of all errors that a user can fix; the command line prints it in one line and exits with 2."""


class ConfigError(IncoflError):
    """A config file, a ``--set`` or an argument of a constructor has a wrong value."""


class DataError(IncoflError):
    """A data set is missing, damaged, or cannot be divided as asked."""


class LayoutError(IncoflError):
    """A layout contradicts its model, or levels do not fit it."""


class UploadError(IncoflError):
    """What a client sent does not fit the slice it was given."""


class RunError(IncoflError):
    """A run folder or checkpoint does not belong to the run that was asked for."""


def nearest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """A hint such as ``; did you mean 'heteroavg'?``, or the list of choices when nothing is close.

    The choice that is near is said with a ``prefix``, so that it can be copied.
    """
    known = sorted(choices)
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"; did you mean {prefix + close[0]!r}?" if close else f"; expected one of: {', '.join(known)}"


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Surrounds imports of optional packages: a missing one is one line with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as problem:
        package = (problem.name or "a package").partition(".")[0]
        raise IncoflError(f"{what}: needs {package}; try: pip install 'incofl[{extra}]'") from None
