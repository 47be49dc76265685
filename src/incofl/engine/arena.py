"""Tensors in memory that several processes share: written by one, read by others, without copies or messages."""

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from incofl.tensors import Tensors, memory_format

_ALIGNMENT = 64  # a cache line


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in an arena."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where its last byte is followed by others."""
        return self.offset + self.num_bytes


class Block:
    """Tensors in a row of bytes."""

    def __init__(self, data: Tensor) -> None:
        """The tensors in ``data``, whose elements are bytes."""
        self.bytes = data

    def view(self, entry: Entry) -> Tensor:
        """The tensor at an entry."""
        flat = self.bytes[entry.offset : entry.end].view(entry.dtype)
        if entry.channels_last:
            n, c, h, w = entry.shape
            return flat.view(n, h, w, c).permute(0, 3, 1, 2)
        return flat.view(entry.shape)

    def views(self, entries: Mapping[str, Entry]) -> Tensors:
        """All tensors of a table of entries."""
        return {name: self.view(entry) for name, entry in entries.items()}


class Arena(Block):
    """A block of shared memory, reached through a file descriptor that child processes inherit.

    The file behind it has no name: it disappears with the last process that has it open, however that one ends.
    """

    def __init__(self, num_bytes: int = 0, fd: int | None = None) -> None:
        """Makes a new block of ``num_bytes``, or opens the one behind an inherited ``fd``."""
        if fd is None:
            memory = Path("/dev/shm")
            fd, name = tempfile.mkstemp(dir=memory if memory.is_dir() else None)
            os.unlink(name)
            os.truncate(fd, max(num_bytes, _ALIGNMENT))
            weakref.finalize(self, os.close, fd)
        self.fd = fd
        super().__init__(torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8))


def place(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], start: int = 0) -> tuple[dict[str, Entry], int]:
    """A table of entries for tensors laid out one after the other, and where the next would start."""
    table: dict[str, Entry] = {}
    for name, shape, dtype in tensors:
        last = memory_format(len(shape)) == torch.channels_last and dtype.is_floating_point
        table[name] = Entry(start, tuple(shape), dtype, last)
        start += -(-table[name].num_bytes // _ALIGNMENT) * _ALIGNMENT
    return table, start
