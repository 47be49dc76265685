"""Objects in a row of bytes that several processes see: their tensors are written by one and read by all, uncopied."""

import io
import math
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

_ALIGNMENT = 64  # a cache line

# Where the pickled object lies, without its tensors: the whole of a message that says where to find an object.
Parcel = tuple[int, int]


class Place(NamedTuple):
    """Where a tensor lies in a row of bytes, and what it is."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class TensorBytes:
    """A row of bytes for one object at a time."""

    def __init__(self, data: Tensor | None = None) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8) if data is None else data

    def put(self, value: object) -> Parcel:
        """Takes in an object; the tensors of the one before it are overwritten."""
        pickler = _Pickler()
        pickler.dump(value)
        pickled, start = pickler.file.getbuffer(), pickler.end
        self._provide(start + len(pickled))
        for tensor, place in pickler.placed.values():
            self._view(place).copy_(tensor)
        self.bytes[start : start + len(pickled)] = torch.frombuffer(pickled, dtype=torch.uint8)
        return start, start + len(pickled)

    def get(self, parcel: Parcel) -> Any:
        """The object; its tensors share the memory, and are valid until the next one is put there."""
        self._provide(parcel[1])
        return _Unpickler(self.bytes[slice(*parcel)].numpy().tobytes(), self._view).load()

    def _provide(self, size: int) -> None:
        if size > len(self.bytes):
            self.bytes = torch.empty(size, dtype=torch.uint8)

    def _view(self, place: Place) -> Tensor:
        return self.bytes[place.start : place.end].view(place.dtype).as_strided(place.shape, place.stride)


class SharedBytes(TensorBytes):
    """Such a row behind a file descriptor that child processes inherit; it grows as needed.

    The file has no name: it disappears with the last process that has it open, however that process ends.
    """

    def __init__(self, fd: int | None = None) -> None:
        """New memory, or that behind an inherited ``fd``."""
        super().__init__()
        if fd is None:
            memory = Path("/dev/shm")
            fd, name = tempfile.mkstemp(dir=memory if memory.is_dir() else None)
            os.unlink(name)
            weakref.finalize(self, os.close, fd)
        self.fd = fd

    def _provide(self, size: int) -> None:
        if size > len(self.bytes):
            os.truncate(self.fd, max(size, os.fstat(self.fd).st_size))
            self.bytes = torch.frombuffer(mmap.mmap(self.fd, 0), dtype=torch.uint8)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no types
    """Pickles an object with places instead of its tensors."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.placed: dict[int, tuple[Tensor, Place]] = {}
        self.end = 0

    def persistent_id(self, value: object) -> Place | None:
        if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad:
            return None
        if id(value) not in self.placed:
            stride = torch.empty_like(value, device="meta").stride()  # its own, unless it has holes
            place = Place(self.end, tuple(value.shape), stride, value.dtype)
            self.placed[id(value)] = value, place
            self.end = -(-place.end // _ALIGNMENT) * _ALIGNMENT
        return self.placed[id(value)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, view: Callable[[Place], Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._view = view

    def persistent_load(self, place: Place) -> Tensor:
        return self._view(place)
