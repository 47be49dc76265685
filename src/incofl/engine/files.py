"""Files that no crash, full disk or flipped bit spoils without a word.

A file appears under its name when it is complete and on disk, and so is its name. Files of tensors are sealed: they
hold a checksum of themselves, in which the checksum counts as zeros.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from incofl.errors import RunError
from incofl.tensors import Tensors

FORMAT = 2  # of sealed files
HEADER = (
    "incofl"  # the one entry of metadata: several would be written in random order, and equal runs make equal files
)
BLANK = "0" * 32  # where the checksum will be
PRIVATE, SHARED = 0o600, 0o666  # modes of files, the latter before the umask


def put(file: int, content: bytes | memoryview) -> None:
    """Writes all of it into an open file. Everything that a run saves passes through here."""
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def atomic_write(path: Path, *pieces: bytes | memoryview, mode: int = SHARED) -> None:
    """Writes a file that appears under its name only when it is complete and on disk."""
    temporary = path.with_name(path.name + ".part")
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o777 if mode == SHARED else 0o700)
        try:
            with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as file:
                for piece in pieces:
                    put(file, piece)
                os.fsync(file)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)  # it takes room that may be needed
            raise
        sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Adds a line to a file; if that is interrupted, what is there of it has no end."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, SHARED) as file:
            put(file, line.encode() + b"\n")
            os.fsync(file)


def keep_as(path: Path, other: Path) -> None:
    """Keeps a file that is about to be replaced under another name; it stays under its own, too."""
    with _explained(other):
        other.unlink(missing_ok=True)
        try:
            os.link(path, other)
        except OSError:  # a file system without links
            atomic_write(other, path.read_bytes(), mode=stat.S_IMODE(path.stat().st_mode))


def sync_folder(path: Path) -> None:
    """Puts the names in a folder on disk, too."""
    with _opened(path, os.O_RDONLY, 0) as folder:
        os.fsync(folder)


def write_json(path: Path, value: object, mode: int = SHARED) -> None:
    """A JSON document, atomically."""
    atomic_write(path, (json.dumps(value, indent=2) + "\n").encode(), mode=mode)


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """A JSON document that is a table."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{path}: damaged ({type(problem).__name__}: {problem}); {hint}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path}: damaged (a {type(found).__name__}, expected a table); {hint}")
    return found


def write_sealed(path: Path, tensors: Tensors, header: Mapping[str, Any] | None = None, mode: int = SHARED) -> None:
    """Tensors and a header, with a checksum of all bytes."""
    entry = json.dumps({"format": FORMAT, **(header or {}), "checksum": BLANK}, sort_keys=True)
    raw = memoryview(save({name: value.contiguous() for name, value in tensors.items()}, {HEADER: entry}))
    before, after = _around_checksum(raw, BLANK)
    atomic_write(path, before, _checksum(before, after).encode(), after, mode=mode)


def read_sealed(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the header of a sealed file that is as it was written; anything else is refused in one line."""
    try:
        raw = memoryview(path.read_bytes())
        header = _header(bytes(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))
        before, after = _around_checksum(raw, str(header["checksum"]))
        if _checksum(before, after) != header["checksum"]:
            raise ValueError("its checksum is wrong: it was altered, or not written to the end")
        return load(bytes(raw)), header
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as problem:
        raise RunError(f"{path}: damaged ({_say(problem)})") from None


def read_header(path: Path) -> dict[str, Any]:
    """The header of a sealed file, whose tensors are not looked at."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("it is not whole")
            return _header(file.read(length))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise RunError(f"{path}: damaged ({_say(problem)})") from None


def _say(problem: Exception) -> str:
    if isinstance(problem, OSError):
        return str(problem.strerror)
    return f"{type(problem).__name__}: {problem}" if isinstance(problem, LookupError | RecursionError) else str(problem)


def _header(found: bytes) -> dict[str, Any]:
    entry = json.loads(json.loads(found)["__metadata__"][HEADER])
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        said = entry.get("format") if isinstance(entry, dict) else None
        raise ValueError(f"format {said!r:.20}, expected {FORMAT}")
    return entry


def _around_checksum(raw: memoryview, checksum: str) -> tuple[memoryview, memoryview]:
    """What is before and after the checksum."""
    length = int.from_bytes(raw[:8], "little")
    at = bytes(raw[: 8 + length]).index(f'checksum\\": \\"{checksum}'.encode()) + len('checksum\\": \\"')
    return raw[:at], raw[at + len(BLANK) :]


def _checksum(before: memoryview, after: memoryview) -> str:
    found = hashlib.blake2b(before, digest_size=len(BLANK) // 2)
    found.update(BLANK.encode())
    found.update(after)
    return found.hexdigest()


@contextmanager
def _opened(path: Path, flags: int, mode: int) -> Iterator[int]:
    file = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), mode)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        hint = "what was saved before is whole: make room, or choose another folder, then resume"
        raise RunError(f"{path}: cannot be written ({problem.strerror}); {hint}") from None
