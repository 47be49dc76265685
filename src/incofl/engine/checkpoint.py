"""The state of a run after a round, in one file that is either whole or not there, and the one before it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from incofl.engine.files import PRIVATE, SHARED, keep_as, read_header, read_sealed, write_sealed
from incofl.errors import RunError
from incofl.server import Server

Manifest = dict[int, tuple[int, int]]  # by client that remembers something: level and 0-based round of that turn
Identity = Mapping[str, str]  # the digests of what a checkpoint belongs to: ``config`` and ``data``


class Checkpoint(NamedTuple):
    """The server, and which memories of clients belong to it."""

    server: Server
    memories: Manifest


def save_checkpoint(
    path: Path, server: Server, identity: Identity, memories: Manifest | None = None, secret: bool = False
) -> None:
    """Writes the server's state; a crash at any moment leaves the checkpoint before it or this one.

    One with a ``secret`` is for its owner alone.
    """
    tensors = {f"shared/{name}": value for name, value in server.shared.items()}
    for kind, tables in (("private", server.private), ("extra", server.extra), ("states", server.states)):
        for table, values in tables.items():
            tensors |= {f"{kind}/{table}/{name}": value for name, value in values.items()}
    header: dict[str, Any] = {"round": server.round, **identity}
    if memories:
        header["memories"] = sorted((client, *when) for client, when in memories.items())
    write_sealed(path, tensors, header, PRIVATE if secret else SHARED)


def previous(path: Path) -> Path:
    """Where the checkpoint before one is kept."""
    return path.with_name(f"previous{path.suffix}")


def keep_previous(path: Path) -> None:
    """Keeps a checkpoint that is about to be replaced, under another name; it stays under its own, too."""
    if path.exists():
        keep_as(path, previous(path))


def checkpoint_round(path: Path) -> int:
    """How many rounds the checkpoint has; 0 if there is none."""
    return _round(path, read_header(path)) if path.exists() else 0


def checkpoint_memories(path: Path) -> Manifest:
    """Which memories of clients a checkpoint needs; none if it cannot be read."""
    try:
        return _memories(path, read_header(path)) if path.exists() else {}
    except RunError:
        return {}


def load_checkpoint(path: Path, start: Server, identity: Identity | None = None) -> Checkpoint:
    """Reads a server's state back, bit for bit; with an ``identity``, only if it belongs to it.

    ``start`` is the federation's server before the first round.
    """
    tensors, header = read_sealed(path)
    for what, expected in (identity or {}).items():
        if header.get(what) != expected:
            found = f"checkpoint of another {what} ({header.get(what)}, expected {expected})"
            raise RunError(f"{path}: {found}; choose another folder")
    fields: dict[str, Any] = {"shared": {}, "private": {}, "extra": {}, "states": {}}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        of, _, inner = name.partition("/")
        if kind not in fields or (kind == "private" and not of.isdecimal()):
            raise RunError(f"{path}: damaged (it holds {key!r}, which no checkpoint does)")
        table = fields[kind]
        if kind != "shared":
            table, name = table.setdefault(int(of) if kind == "private" else of, {}), inner
        table[name] = value
    if {name: tuple(value.shape) for name, value in fields["shared"].items()} != dict(start.layout.shapes):
        raise RunError(f"{path}: checkpoint of another model; choose another folder")
    server = dataclasses.replace(start, round=_round(path, header), **fields)
    return Checkpoint(server, _memories(path, header))


def _round(path: Path, header: Mapping[str, Any]) -> int:
    if not isinstance(value := header.get("round"), int) or value < 0:
        raise RunError(f"{path}: damaged (its round is {value!r:.20})")
    return value


def _memories(path: Path, header: Mapping[str, Any]) -> Manifest:
    try:
        return {client: (level, round) for client, level, round in header.get("memories", [])}
    except (TypeError, ValueError):
        raise RunError(f"{path}: damaged (it does not say which memories belong to it)") from None
