"""Where the clients of a run are: on this machine, or at the other end of a network."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from incofl.config import Config
from incofl.engine.executor import Executor, make_store
from incofl.engine.federation import Federation
from incofl.engine.records import Row, RunFolder
from incofl.engine.round import Tally
from incofl.engine.store import Manifest
from incofl.engine.trace import Trace
from incofl.method import Upload


class Memories(Protocol):
    """What clients remember, as far as the server has a part in it; ``ClientStore`` keeps it all."""

    manifest: Manifest

    def keeper(self, round: int) -> Callable[[Upload], None]:
        """For whoever accepts uploads in a round."""
        ...

    def save(self) -> None:
        """Before the checkpoint is written."""
        ...

    def saved(self) -> None:
        """When the checkpoint is on disk."""
        ...

    def restore(self, manifest: Manifest) -> None:
        """Goes back to the memories that a checkpoint names."""
        ...


class Site(Protocol):
    """What a run asks of the place where its clients are."""

    def build(self, config: Config, folder: RunFolder) -> Federation:
        """The federation, before the folder is locked."""
        ...

    def memories(self, config: Config, federation: Federation, folder: Path) -> Memories:
        """What clients remember."""
        ...

    def executor(
        self, config: Config, federation: Federation, rounds: int, trace: Trace, memories: Memories
    ) -> Executor:
        """Whoever has their turns computed; from here on the folder is this run's."""
        ...

    def gather(self, federation: Federation, round: int) -> tuple[Federation, Sequence[int] | None]:
        """Before a round: the federation as its clients are now, and those that can be reached (``None``: all)."""
        ...

    def suffices(self, round: int, tally: Tally) -> bool:
        """Whether a round's uploads are enough; if not, the round is repeated."""
        ...

    def observed(self) -> Row:
        """What the line of the last round says besides."""
        ...


class Simulated:
    """Clients that this process computes, itself or in workers: all are there, always."""

    def __init__(self, build: Callable[[Config, RunFolder], Federation], executor: Callable[..., Executor]) -> None:
        self.build, self.executor = build, executor

    def memories(self, config: Config, federation: Federation, folder: Path) -> Memories:
        """All of it."""
        return make_store(federation, folder, config.engine.client_memory)

    def gather(self, federation: Federation, round: int) -> tuple[Federation, Sequence[int] | None]:
        """Nothing changes."""
        return federation, None

    def suffices(self, round: int, tally: Tally) -> bool:
        """Always: nobody is late."""
        return True

    def observed(self) -> Row:
        """Nothing."""
        return {}
