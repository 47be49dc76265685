"""Replies that were accepted before their turn to be added up: they wait on disk."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from incofl.client import Upload
from incofl.flower.protocol import Report
from incofl.tensors import Tensors, clone

PARTS = ("update", "buffers", "extra")


@dataclass(frozen=True)
class Reply:
    """A reply that was accepted; the ``path`` of its tensors, if they wait on disk."""

    upload: Upload
    report: Report
    bytes_up: int
    path: Path | None = None

    def stored(self, path: Path) -> "Reply":
        """The same with its tensors on disk."""
        tensors = {f"{part}/{name}": t for part in PARTS for name, t in getattr(self.upload, part).items()}
        path.parent.mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        bare = dataclasses.replace(self.upload, update={}, buffers={}, extra={})
        return dataclasses.replace(self, upload=bare, path=path)

    def whole(self) -> Upload:
        """The upload with its tensors in memory, in the order of memory that all tensors of models have."""
        if self.path is None:
            return self.upload
        parts: dict[str, Tensors] = {part: {} for part in PARTS}
        found = clone(load_file(self.path))
        for part, name in itertools.product(PARTS, self.upload.slice.shapes):  # in the order in which they came
            if (key := f"{part}/{name}") in found:
                parts[part][name] = found[key]
        self.path.unlink()
        return dataclasses.replace(self.upload, update=parts["update"], buffers=parts["buffers"], extra=parts["extra"])
