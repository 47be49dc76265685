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
class TensorSpec:
    """Where a tensor lies in a row of bytes, and what it is."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + self.num_bytes


Specs = dict[str, TensorSpec]


class TensorBytes:
    """Tensors in a row of bytes."""

    def __init__(self, data: Tensor) -> None:
        self.bytes = data

    def view(self, spec: TensorSpec) -> Tensor:
        """The tensor of a specification, sharing memory."""
        flat = self.bytes[spec.offset : spec.end].view(spec.dtype)
        if spec.channels_last:
            n, c, h, w = spec.shape
            return flat.view(n, h, w, c).permute(0, 3, 1, 2)
        return flat.view(spec.shape)

    def views(self, specs: Mapping[str, TensorSpec]) -> Tensors:
        """The tensors of several specifications."""
        return {name: self.view(spec) for name, spec in specs.items()}


class SharedTensors(TensorBytes):
    """Shared memory behind a file descriptor that child processes inherit.

    The file has no name: it disappears with the last process that has it open, however that process ends.
    """

    def __init__(self, num_bytes: int = 0, fd: int | None = None) -> None:
        """Makes new memory of ``num_bytes``, or opens that behind an inherited ``fd``."""
        if fd is None:
            memory = Path("/dev/shm")
            fd, name = tempfile.mkstemp(dir=memory if memory.is_dir() else None)
            os.unlink(name)
            os.truncate(fd, max(num_bytes, _ALIGNMENT))
            weakref.finalize(self, os.close, fd)
        self.fd = fd
        super().__init__(torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8))


def arrange(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], start: int = 0) -> tuple[Specs, int]:
    """Specifications of tensors laid out one after the other, and the offset at which the next would start."""
    specs: Specs = {}
    for name, shape, dtype in tensors:
        last = memory_format(len(shape)) == torch.channels_last and dtype.is_floating_point
        specs[name] = TensorSpec(start, tuple(shape), dtype, last)
        start += -(-specs[name].num_bytes // _ALIGNMENT) * _ALIGNMENT
    return specs, start
