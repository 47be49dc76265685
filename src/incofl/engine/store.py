"""What clients remember between their turns: all of it on disk, the most recent in memory too.

Crash-safe together with the checkpoint: a memory is written under the number of the round that made it, before the
checkpoint of that round, and the one it replaces is deleted when no checkpoint that is kept needs it. Whenever a run is
interrupted, the memories that the last two checkpoints name are there; any others are leftovers.
"""

from collections import OrderedDict
from pathlib import Path

import torch

from incofl.client import Upload
from incofl.engine.checkpoint import Manifest
from incofl.engine.federation import Federation
from incofl.engine.files import read_sealed, write_sealed
from incofl.errors import RunError
from incofl.split import Slice
from incofl.tensors import Tensors, clone, num_bytes


class ClientStore:
    """Client memory by client; its size follows the clients seen, not the population."""

    def __init__(self, federation: Federation, folder: Path | None = None, limit: int = 2**30) -> None:
        """A store in a ``folder`` that keeps ``limit`` bytes in memory; without a folder, all in memory."""
        self._federation, self._folder, self._limit = federation, folder, limit
        self._recent: OrderedDict[int, Tensors] = OrderedDict()
        self._bytes = 0
        self._replaced: list[Path] = []  # since the last checkpoint, which needs them
        self._spare: list[Path] = []  # needed by the checkpoint before it
        self.manifest: Manifest = {}

    def get(self, client: int, slice_: Slice) -> Tensors:
        """What a client remembers, in the coordinates of a slice; empty if it has not had a turn yet.

        Where it held other channels of a tensor than now, or none of a block, it remembers 0.
        """
        if client not in self.manifest:
            return {}
        memory, held = self._load(client), self._federation.slice(*self.manifest[client], client)
        if held is slice_:
            return memory
        shapes = self._federation.model.layout.shapes
        remembered = self._federation.method.client.memory(self._federation.model.layout) & slice_.index.keys()
        dtypes = dict.fromkeys(remembered, torch.get_default_dtype()) | {n: value.dtype for n, value in memory.items()}
        full = {name: torch.zeros(shapes[name], dtype=dtype) for name, dtype in dtypes.items()}
        held.write(memory, full)
        return slice_.take(full)

    def put(self, client: int, level: int, round: int, memory: Tensors) -> None:
        """Replaces what a client remembers, by what it made of a turn."""
        before, self.manifest[client] = self.manifest.get(client), (level, round)
        if self._folder is not None:
            write_sealed(self._path(client, round), memory)
            if before is not None and before[1] != round:
                self._replaced.append(self._path(client, before[1]))
        self._remember(client, clone(memory))

    def keep(self, round: int, upload: Upload) -> None:
        """Keeps what the client of an accepted upload remembers."""
        if upload.memory:
            self.put(upload.client, upload.level, round, upload.memory)

    def saved(self) -> None:
        """Deletes what is replaced for good: call it when the checkpoint is on disk."""
        for path in self._spare:
            path.unlink(missing_ok=True)
        self._spare, self._replaced = self._replaced, []

    def restore(self, manifest: Manifest, spare: Manifest | None = None) -> None:
        """Goes back to the memories that a checkpoint names; refuses at once if one is missing.

        ``spare`` are those of the checkpoint before it, which are kept, too; ``None``: as before.
        """
        assert self._folder is not None
        self.manifest, self._replaced = dict(manifest), []
        self._recent.clear()
        self._bytes = 0
        expected = self._paths(manifest)
        if spare is not None:
            self._spare = sorted(self._paths(spare) - expected)
        if missing := sorted(path for path in expected if not path.exists()):
            hint = "the run cannot be continued without it: restore the file, or start again in another folder"
            raise RunError(f"{missing[0]}: the memory of a client is missing ({len(missing)} in all); {hint}")
        for path in sorted(expected - self._paths(spare)) if spare else ():  # without them the one before goes on
            read_sealed(path)
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path not in expected and path not in self._spare:
                path.unlink()

    def _load(self, client: int) -> Tensors:
        if client not in self._recent:
            path = self._path(client, self.manifest[client][1])
            try:
                memory, _ = read_sealed(path)
            except RunError as problem:
                hint = "restore the file from a copy, or start again in another folder"
                raise RunError(f"{problem}: the memory of client {client} cannot be read; {hint}") from None
            self._remember(client, memory)
        self._recent.move_to_end(client)
        return self._recent[client]

    def _remember(self, client: int, memory: Tensors) -> None:
        self._bytes += num_bytes(memory) - num_bytes(self._recent.pop(client, {}))
        self._recent[client] = memory
        while self._folder is not None and self._bytes > self._limit and len(self._recent) > 1:
            self._bytes -= num_bytes(self._recent.popitem(last=False)[1])

    def _paths(self, manifest: Manifest) -> set[Path]:
        return {self._path(client, round) for client, (_, round) in manifest.items()}

    def _path(self, client: int, round: int) -> Path:
        assert self._folder is not None
        return self._folder / f"client-{client}-round-{round}.safetensors"
