"""The state of a run after a round, in one file that is either whole or not there."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from incofl.errors import RunError
from incofl.server import Server
from incofl.tensors import Tensors

FORMAT = 1

Manifest = dict[int, tuple[int, int]]  # by client that remembers something: level and 0-based round of that turn
Identity = Mapping[str, str]  # the digests of what a checkpoint belongs to: ``config`` and ``data``


class Checkpoint(NamedTuple):
    """The server, and which memories of clients belong to it."""

    server: Server
    memories: Manifest


def save_checkpoint(path: Path, server: Server, identity: Identity, memories: Manifest | None = None) -> None:
    """Writes the server's state; a crash at any moment leaves the previous checkpoint or this one."""
    tensors = {f"shared/{name}": value for name, value in server.shared.items()}
    for kind, tables in (("private", server.private), ("extra", server.extra), ("states", server.states)):
        for table, values in tables.items():
            tensors |= {f"{kind}/{table}/{name}": value for name, value in values.items()}
    header: dict[str, Any] = {"format": FORMAT, "round": server.round, **identity}
    if memories:
        header["memories"] = sorted((client, *when) for client, when in memories.items())
    # One entry of metadata: several would be written in random order, and equal runs make equal files.
    metadata = {"incofl": json.dumps(header, sort_keys=True)}
    write_tensors(path, tensors, metadata)


def checkpoint_round(path: Path) -> int:
    """How many rounds the checkpoint has; 0 if there is none."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        return int(json.loads(file.metadata()["incofl"])["round"])


def load_checkpoint(path: Path, start: Server, identity: Identity | None = None) -> Checkpoint:
    """Reads a server's state back, bit for bit; with an ``identity``, only if it belongs to it.

    ``start`` is the federation's server before the first round.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("incofl", "{}"))
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as problem:
        raise RunError(f"{path}: damaged checkpoint ({problem}); delete it to start again") from None
    if header.get("format") != FORMAT:
        raise RunError(f"{path}: checkpoint format {header.get('format')}, expected {FORMAT}")
    for what, expected in (identity or {}).items():
        if header.get(what) != expected:
            found = f"checkpoint of another {what} ({header.get(what)}, expected {expected})"
            raise RunError(f"{path}: {found}; choose another folder")
    fields: dict[str, Any] = {"shared": {}, "private": {}, "extra": {}, "states": {}}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        table = fields[kind]
        if kind != "shared":
            of, _, name = name.partition("/")
            table = table.setdefault(int(of) if kind == "private" else of, {})
        table[name] = value
    if {name: tuple(value.shape) for name, value in fields["shared"].items()} != dict(start.layout.shapes):
        raise RunError(f"{path}: checkpoint of another model; choose another folder")
    server = dataclasses.replace(start, round=header["round"], **fields)
    return Checkpoint(server, {client: (level, round) for client, level, round in header.get("memories", [])})


def atomic_write(path: Path, content: bytes) -> None:
    """Writes a file that appears under its name only when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    """A JSON document, atomically."""
    atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())


def write_tensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, atomically."""
    atomic_write(path, save({name: value.contiguous() for name, value in tensors.items()}, metadata))
