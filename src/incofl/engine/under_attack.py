"""Rounds in which some clients are attackers: an executor whose uploads are partly theirs."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from incofl.attacks import COLLUDING, Attack
from incofl.client import Upload
from incofl.engine.executor import Executor, Lost
from incofl.engine.federation import Job
from incofl.engine.files import read_sealed, write_sealed
from incofl.server import Server
from incofl.tensors import clone
from incofl.upload import kept


class UnderAttack(Executor):
    """Passes on the uploads of another executor, of which those of attackers are replaced before anybody sees them.

    What is replayed is kept in a folder. Attackers that collude send when all clients have trained.
    """

    def __init__(self, executor: Executor, attack: Attack, clients: frozenset[int], folder: Path) -> None:
        self._executor, self._attack, self._clients, self._folder = executor, attack, clients, folder

    def _compute(self, server: Server, jobs: Sequence[Any]) -> Iterator[list[tuple[Any, Any]]]:
        return self._executor._compute(server, jobs)

    def train(self, server: Server, jobs: Sequence[Job]) -> Iterator[Sequence[Upload | Lost]]:
        waiting: list[Upload] = []
        for uploads in self._executor.train(server, jobs):
            if not any(upload.client in self._clients for upload in uploads):
                yield uploads
                continue
            sent: list[Upload | Lost] = []
            for upload in uploads:
                if isinstance(upload, Lost) or upload.client not in self._clients:
                    sent.append(upload)
                elif self._attack.kind in COLLUDING:
                    waiting.append(dataclasses.replace(kept(upload), memory=clone(upload.memory)))
                elif self._attack.kind == "replay":
                    sent.append(self._replayed(upload, server.round))
                else:
                    sent.append(self._attack.sent(upload, server))
            if sent:
                yield sent
        if waiting:
            yield self._attack.sent_together(waiting, server.layout, len(jobs))

    def _replayed(self, upload: Upload, round: int) -> Upload:
        """What the client sent in its first turn, which is written down; one that is taken back comes again."""
        earlier = sorted(self._folder.glob(f"client-{upload.client}-round-*.safetensors"))
        first = [path for path in earlier if int(path.stem.rpartition("-")[2]) < round]
        tables = ("update", "buffers")
        if not first:
            tensors = {f"{table}/{n}": v for table in tables for n, v in getattr(upload, table).items()}
            write_sealed(self._folder / f"client-{upload.client}-round-{round}.safetensors", tensors)
            return upload
        found, _ = read_sealed(first[0])
        old: dict[str, Any] = {
            table: {n.removeprefix(f"{table}/"): v for n, v in found.items() if n.startswith(f"{table}/")}
            for table in tables
        }
        return dataclasses.replace(upload, **old)
