"""Replies that were accepted before their turn to be added up: they wait on disk."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from incofl.flower.messages import Report
from incofl.method import Upload
from incofl.tensors import Tensors, clone

PARTS = ("update", "buffers", "extra")


@dataclass(frozen=True)
class Arrived:
    """A reply that was accepted, and, where its tensors wait on disk, where."""

    upload: Upload
    report: Report
    bytes_up: int
    path: Path | None = None

    def shelved(self, path: Path) -> "Arrived":
        """The same with its tensors on disk."""
        tensors = {f"{part}/{name}": t for part in PARTS for name, t in getattr(self.upload, part).items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        bare = dataclasses.replace(self.upload, update={}, buffers={}, extra={})
        return dataclasses.replace(self, upload=bare, path=path)

    def whole(self) -> Upload:
        """With its tensors in memory, in the order of memory that all tensors of models have."""
        if self.path is None:
            return self.upload
        parts: dict[str, Tensors] = {part: {} for part in PARTS}
        found = clone(load_file(self.path))
        for part, name in itertools.product(PARTS, self.upload.slice.shapes):  # in the order in which they came
            if (key := f"{part}/{name}") in found:
                parts[part][name] = found[key]
        self.path.unlink()
        update, buffers, extra = (parts[part] for part in PARTS)
        return dataclasses.replace(self.upload, update=update, buffers=buffers, extra=extra)
