"""The state of a run after a round, in one file that is either whole or not there."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from incofl.errors import RunError
from incofl.server import Server
from incofl.tensors import Tensors

FORMAT = 1

Memories = dict[int, tuple[int, int]]  # by client: level and round of the turn that it remembers


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: it is refused under another config or other data."""

    config: str
    data: str


def save_checkpoint(path: Path, server: Server, identity: Identity, memories: Memories | None = None) -> None:
    """Writes the server's state; a crash at any moment leaves the previous checkpoint or this one.

    ``memories`` are those of the clients that belong to it, as ``ClientStore.manifest`` names them.
    """
    tensors = {f"shared/{name}": value for name, value in server.shared.items()}
    for kind, tables in (("private", server.private), ("extra", server.extra), ("states", server.states)):
        for table, values in tables.items():
            tensors |= {f"{kind}/{table}/{name}": value for name, value in values.items()}
    header = {"format": FORMAT, "round": server.round, "config": identity.config, "data": identity.data}
    if memories:
        header["memories"] = sorted((client, *when) for client, when in memories.items())
    # One entry of metadata: several would be written in random order, and equal runs make equal files.
    metadata = {"incofl": json.dumps(header, sort_keys=True)}
    with atomic_write(path) as file:
        file.write(save({name: value.contiguous() for name, value in tensors.items()}, metadata))


def checkpoint_round(path: Path) -> int:
    """How many rounds the checkpoint has; 0 if there is none."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        return int(json.loads(file.metadata()["incofl"])["round"])


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: the server, and which memories of clients belong to it."""

    server: Server
    memories: Memories


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
    for what, expected in dataclasses.asdict(identity).items() if identity is not None else ():
        if header.get(what) != expected:
            raise RunError(
                f"{path}: checkpoint of another {what} ({header.get(what)}, expected {expected}); choose another folder"
            )
    shared: Tensors = {}
    tables: dict[str, dict[Any, Tensors]] = {"private": {}, "extra": {}, "states": {}}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "shared":
            shared[name] = value
        else:
            table, _, name = name.partition("/")
            tables[kind].setdefault(int(table) if kind == "private" else table, {})[name] = value
    if {name: tuple(value.shape) for name, value in shared.items()} != dict(start.layout.shapes):
        raise RunError(f"{path}: checkpoint of another model; choose another folder")
    private, extra, states = tables.values()
    server = dataclasses.replace(
        start, shared=shared, private=private, round=header["round"], extra=extra, states=states
    )
    return Checkpoint(server, {client: (level, round) for client, level, round in header.get("memories", [])})


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    """A JSON document, atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())
