"""Clients weighed by how well they agree: ``NAME+krum`` and ``NAME+geomedian``.

Uploads of one level have the same shape and can be compared as whole vectors. Krum can also compare those of all levels
(``krum.among = "all"``), by what the smallest level holds, which is part of each: where clients' data differ, a few
honest uploads are far apart, too, and among many the wrong ones stand out more, also the only one of a level. With n
uploads that are compared and f = min(ceil(share n), ceil(n / 2) - 1) of them that may be wrong:

    Krum (Blanchard et al., NeurIPS 2017):  the score of an upload is its mean squared distance from the n - f - 1 that
        are nearest to it; the ``select`` uploads of the smallest scores count (1: Krum; n - f: multi-Krum)
    geometric median (Weiszfeld's algorithm, smoothed):  z <- sum u_k / max(|u_k - z|, s) / sum 1 / max(|u_k - z|, s)

The uploads that count share the weight of all that were compared, so that levels, compared by themselves, weigh in the
covered mean of a position as they do without. With one or two uploads there is no majority: they count as in the mean.
A position all of whose holders count for nothing does not move.

The uploads of a round are kept until the last has come, and what is compared a second time.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from incofl.client import Setting, Upload
from incofl.errors import ConfigError
from incofl.mean import Arrivals, Averages, Mean
from incofl.options import options
from incofl.path import within
from incofl.server import Changes, Server
from incofl.split import Slice
from incofl.tensors import Tensors, one_thread, only
from incofl.upload import kept


@dataclass(frozen=True)
class ByDistance(Mean):
    """What rules share that weigh clients by their distances."""

    robust: ClassVar[bool] = True
    keeps_uploads: ClassVar[bool] = True

    @abstractmethod
    def weights(self, vectors: Tensor) -> Tensor:
        """The weights of some vectors, three at least, which sum to one."""

    def compared(self, uploads: Sequence[Upload]) -> dict[str, list[Upload]]:
        """By name, the uploads that are compared with each other: those of a level."""
        levels = sorted({upload.level for upload in uploads})
        return {f"level {level}": [upload for upload in uploads if upload.level == level] for level in levels}

    def part(self, upload: Upload, server: Server) -> Tensors:
        """By what an upload is compared: all of its update."""
        return upload.update

    def check(self, method: Any, setting: Setting) -> None:
        super().check(method, setting)
        if method.split.window not in ("prefix", "rolling", "rolling-back"):
            raise ConfigError(
                f"method: got {method.name}, expected clients of a level that hold the same channels, to compare them"
            )

    def aggregate(self, rule: Averages, server: Server, arrivals: Arrivals) -> Changes:
        uploads = [kept(upload) for some in arrivals for upload in some]
        record, weights = {}, dict[int, float]()
        for name, some in self.compared(uploads).items():
            found = self._of(some, server)
            record[name] = {"clients": len(found), "least": min(found.values()), "most": max(found.values())}
            weights |= found
        weighed = [dataclasses.replace(u, weight=u.weight * weights[u.client]) for u in uploads]
        changes = rule.aggregate(server, [weighed])
        return dataclasses.replace(changes, records={self._name: record})

    def _of(self, uploads: Sequence[Upload], server: Server) -> dict[int, float]:
        """The weight of each client; they sum to the number of clients."""
        factors = torch.ones(len(uploads), dtype=torch.float64)
        if len(uploads) > 2:
            with one_thread():  # the same bits however many there are
                parts = [self.part(upload, server) for upload in uploads]
                rows = [torch.cat([part[name].flatten() for name in sorted(part)]) for part in parts]
                factors = len(uploads) * self.weights(torch.stack(rows).double())
        return {upload.client: float(factor) for upload, factor in zip(uploads, factors, strict=True)}

    @property
    def _name(self) -> str:
        return str(getattr(self, "section", ""))


@options("krum")
class Krum(ByDistance):
    """Krum, and multi-Krum: the uploads that have most others near them."""

    # whom clients are compared with: those of their level, or all of the round, by what the smallest level holds
    among: Literal["level", "all"] = "level"
    share: Annotated[float, Ge(0), Lt(0.5)] = 0.2  # of the clients that are compared that may be wrong
    select: Annotated[int, Ge(1)] | None = None  # number of uploads that count; left out, all but that share

    def compared(self, uploads: Sequence[Upload]) -> dict[str, list[Upload]]:
        return super().compared(uploads) if self.among == "level" else {"all": [*uploads]}

    def part(self, upload: Upload, server: Server) -> Tensors:
        """Of all that are compared, what the smallest level holds of each."""
        if self.among == "level":
            return upload.update
        shapes, smallest = server.layout.shapes, server.population[min(server.population)][0]
        names, larger = smallest.index.keys() & upload.update.keys(), upload.slice.index
        held = {name: within(smallest.index[name], larger[name], shapes[name]) for name in names}
        return Slice(held, only(smallest.shapes, names)).look(only(upload.update, names))

    def check(self, method: Any, setting: Setting) -> None:
        super().check(method, setting)
        if self.among == "all" and (method.server.separate or method.split.window != "prefix"):
            want = f"expected 'level' with {method.name}: its levels have no part in common"
            raise ConfigError(f"krum.among: got 'all', {want}")

    def weights(self, vectors: Tensor) -> Tensor:
        n = len(vectors)
        wrong = min(math.ceil(self.share * n - 1e-9), (n + 1) // 2 - 1)
        squares = torch.stack([(vectors - one).square_().sum(1) for one in vectors])
        scores = squares.sort(1).values[:, 1 : n - wrong].mean(1)  # the nearest of all is the upload itself
        chosen = scores.sort(stable=True).indices[: min(self.select or n - wrong, n)]
        return torch.zeros(n, dtype=torch.float64).index_fill(0, chosen, 1 / len(chosen))


@options("geomedian")
class GeometricMedian(ByDistance):
    """The point of the smallest sum of distances from the uploads."""

    iterations: Annotated[int, Ge(1)] = 10  # of the algorithm
    smoothing: Annotated[float, Gt(0)] = 1e-6  # the least distance that counts, so that none is divided by zero

    def weights(self, vectors: Tensor) -> Tensor:
        z, shares = torch.zeros_like(vectors[0]), torch.empty(0)
        for _ in range(self.iterations):
            near = 1 / (vectors - z).square_().sum(1).sqrt().clamp(min=self.smoothing)
            shares = near / near.sum()
            z = (vectors * shares[:, None]).sum(0)
        return shares
