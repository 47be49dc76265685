"""What a node remembers between its turns: it never leaves the node.

Every order says from which turn the memory is that the node starts from, the last one that the server accepted: what it
made of a turn whose reply was late, lost, refused, or forgotten by a server that crashed, is never used.
"""

from collections.abc import Callable
from pathlib import Path

from flwr.app import ArrayRecord, RecordDict

from incofl.data.cache import digest
from incofl.engine.federation import Federation
from incofl.engine.files import PRIVATE, read_sealed, write_sealed
from incofl.engine.store import ClientStore
from incofl.errors import RunError
from incofl.flower.protocol import Order, arrays
from incofl.tensors import Tensors

FROZEN = "frozen"  # the name under which a node keeps the frozen part of a slice


class NodeMemory:
    """In a folder, or in Flower's context, which lives as long as the node's process."""

    def __init__(self, state: RecordDict, order: Order, folder: str | None) -> None:
        self._state, self._order, own = state, order, f"client-{order.client}"
        self._prefix = f"incofl-{order.run}-{own}-"
        self._folder = Path(folder).expanduser() / order.run / own if folder else None

    def recall(self, federation: Federation) -> Tensors | None:
        """The memory that the order names, in the coordinates of its slice; ``None``: it is gone. Drops all others."""
        order, wanted = self._order, self._order.memory
        self._drop_all_but(FROZEN, *([] if wanted is None else [_name(*wanted)]))
        if wanted is None:
            return {}
        if (memory := self._load(_name(*wanted))) is None:
            return None
        store = ClientStore(federation)
        store.put(order.client, *wanted, memory)
        return store.get(order.client, federation.slice_of(order))

    def keep(self, memory: Tensors) -> None:
        """Keeps what the node made of its turn, in addition to what it started from."""
        if memory:
            self._write(_name(self._order.level, self._order.round), memory)

    def frozen(self, sent: Tensors, own: Callable[[], Tensors]) -> Tensors | None:
        """The frozen part of the slice: as it was sent, now or earlier, or the node's own; ``None``: all are wrong."""
        if sent:
            self._write(FROZEN, sent)
        kept = self._load(FROZEN) or {}
        found = kept if digest(kept) == self._order.frozen else own()
        return found if digest(found) == self._order.frozen else None

    def _write(self, name: str, tensors: Tensors) -> None:
        if self._folder is None:
            self._state[self._prefix + name] = arrays(tensors)
            return
        for folder in (self._folder.parent, self._folder):  # what clients remember shows something of their examples
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_sealed(self._folder / f"{name}.safetensors", tensors, mode=PRIVATE)

    def _load(self, name: str) -> Tensors | None:
        if self._folder is None:
            record = self._state.get(self._prefix + name)
            return record.to_torch_state_dict() if isinstance(record, ArrayRecord) else None
        try:
            return read_sealed(self._folder / f"{name}.safetensors")[0]
        except RunError:
            return None

    def _drop_all_but(self, *kept: str) -> None:
        for key in list(self._state):
            if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in kept:
                del self._state[key]
        for path in self._folder.glob("*") if self._folder is not None else ():
            if path.stem not in kept:
                path.unlink(missing_ok=True)


def _name(level: int, round: int) -> str:
    return f"level-{level}-round-{round}"
