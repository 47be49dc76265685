"""What a node remembers between its turns, and what the server knows of it.

The memory itself never leaves the node. The server keeps, with its checkpoint, of which turn each node's memory is: the
last one that it accepted. Every order says so, and a node starts from exactly that memory: what it made of a turn whose
reply was late, lost, refused, or forgotten by a server that crashed, is never used. A node keeps the memory that it
started from until an order names another.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from incofl.engine.checkpoint import atomic_write
from incofl.engine.federation import Federation
from incofl.engine.store import ClientStore, Manifest
from incofl.flower.messages import Order, arrays
from incofl.method import Upload
from incofl.tensors import Tensors


class Accepted:
    """The server's part: which turn of each client was accepted last, for methods whose clients remember."""

    def __init__(self, federation: Federation) -> None:
        self._remembers = bool(federation.method.client.memory(federation.model.layout))
        self.manifest: Manifest = {}

    def keeper(self, round: int) -> Callable[[Upload], None]:
        """Notes accepted uploads."""

        def keep(upload: Upload) -> None:
            if self._remembers:
                self.manifest[upload.client] = upload.level, round

        return keep

    def save(self) -> None:
        """It is in the checkpoint."""

    def saved(self) -> None:
        """Nothing to delete."""

    def restore(self, manifest: Manifest) -> None:
        """Goes back to what a checkpoint says."""
        self.manifest = dict(manifest)


class NodeMemory:
    """A node's part: in a folder, or in Flower's context, which lives as long as the node's process."""

    def __init__(self, state: RecordDict, order: Order, folder: Path | None) -> None:
        self._state, self._order = state, order
        self._prefix = f"incofl-{order.run}-client-{order.job.client}-"
        self._folder = folder / order.run / f"client-{order.job.client}" if folder is not None else None

    def recall(self, federation: Federation) -> Tensors | None:
        """The memory that the order names, in the coordinates of its slice; ``None``: it is gone. Drops all others."""
        job, wanted = self._order.job, self._order.memory
        self._drop_all_but(wanted)
        if wanted is None:
            return {}
        memory = self._load(wanted)
        if memory is None:
            return None
        store = ClientStore(federation.model.layout, federation.slice)
        store.put(job.client, *wanted, memory)
        return store.get(job.client, federation.slice(job.level, job.round))

    def keep(self, memory: Tensors) -> None:
        """What the node made of its turn, beside what it started from."""
        if not memory:
            return
        name = _name((self._order.job.level, self._order.job.round))
        if self._folder is None:
            self._state[self._prefix + name] = arrays(memory)
            return
        with atomic_write(self._folder / f"{name}.safetensors") as file:
            file.write(save({name: value.contiguous() for name, value in memory.items()}))

    def _load(self, turn: tuple[int, int]) -> Tensors | None:
        if self._folder is None:
            record: Any = self._state.get(self._prefix + _name(turn))
            return None if record is None else dict(record.to_torch_state_dict())
        try:
            return load_file(self._folder / f"{_name(turn)}.safetensors")
        except (OSError, SafetensorError):
            return None

    def _drop_all_but(self, turn: tuple[int, int] | None) -> None:
        kept = "" if turn is None else _name(turn)
        for key in [key for key in self._state if key.startswith(self._prefix) and key != self._prefix + kept]:
            del self._state[key]
        if self._folder is not None and self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.stem != kept:
                    path.unlink(missing_ok=True)


def _name(turn: tuple[int, int]) -> str:
    return f"level-{turn[0]}-round-{turn[1]}"
