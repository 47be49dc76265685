"""Clients of a level weighed by how well they agree: ``NAME+krum`` and ``NAME+geomedian``.

Uploads of one level have the same shape and can be compared as whole vectors. With n uploads of a level and
f = min(ceil(share n), ceil(n / 2) - 1) of them that may be wrong:

    Krum (Blanchard et al., NeurIPS 2017):  the score of an upload is its mean squared distance from the n - f - 1 that
        are nearest to it; the ``select`` uploads of the smallest scores count (1: Krum; n - f: multi-Krum)
    geometric median (Weiszfeld's algorithm, smoothed):  z <- sum u_k / max(|u_k - z|, s) / sum 1 / max(|u_k - z|, s)

The uploads that count share the weight of all of their level, so that levels weigh in the covered mean of a position as
they do without. With one or two uploads of a level there is no majority: they count as in the mean.

The uploads of a round are kept until the last has come, those of one level twice while they are compared.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from incofl.client import Setting, Upload
from incofl.errors import ConfigError
from incofl.mean import Arrivals, Averages, Mean
from incofl.options import options
from incofl.server import Changes, Server
from incofl.tensors import one_thread
from incofl.upload import kept


@dataclass(frozen=True)
class WithinLevels(Mean):
    """What rules share that weigh the clients of a level by their distances."""

    robust: ClassVar[bool] = True
    keeps_uploads: ClassVar[bool] = True

    @abstractmethod
    def weights(self, vectors: Tensor) -> Tensor:
        """The weights of some vectors, three at least, which sum to one."""

    def check(self, method: Any, setting: Setting) -> None:
        super().check(method, setting)
        if method.split.window not in ("prefix", "rolling", "rolling-back"):
            raise ConfigError(
                f"method: got {method.name}, expected clients of a level that hold the same channels, to compare them"
            )

    def aggregate(self, rule: Averages, server: Server, arrivals: Arrivals) -> Changes:
        uploads = [kept(upload) for some in arrivals for upload in some]
        levels = sorted({upload.level for upload in uploads})
        weights = {level: self._of_level([u for u in uploads if u.level == level]) for level in levels}
        record = {
            f"level {level}": {"clients": len(found), "least": min(found.values()), "most": max(found.values())}
            for level, found in weights.items()
        }
        weighed = [dataclasses.replace(u, weight=u.weight * weights[u.level][u.client]) for u in uploads]
        changes = rule.aggregate(server, [weighed])
        return dataclasses.replace(changes, records={self._name: record})

    def _of_level(self, uploads: Sequence[Upload]) -> dict[int, float]:
        """The weight of each client of a level; they sum to the number of clients."""
        factors = torch.ones(len(uploads), dtype=torch.float64)
        if len(uploads) > 2:
            with one_thread():  # the same bits however many there are
                rows = [torch.cat([u.update[name].flatten() for name in sorted(u.update)]) for u in uploads]
                factors = len(uploads) * self.weights(torch.stack(rows).double())
        return {upload.client: float(factor) for upload, factor in zip(uploads, factors, strict=True)}

    @property
    def _name(self) -> str:
        return str(getattr(self, "section", ""))


@options("krum")
class Krum(WithinLevels):
    """Krum, and multi-Krum: of each level, the uploads that have most others near them."""

    share: Annotated[float, Ge(0), Lt(0.5)] = 0.2  # of the clients of a level that may be wrong
    select: Annotated[int, Ge(1)] | None = None  # number of uploads that count; left out, all but that share

    def weights(self, vectors: Tensor) -> Tensor:
        n = len(vectors)
        wrong = min(math.ceil(self.share * n - 1e-9), (n + 1) // 2 - 1)
        squares = torch.stack([(vectors - one).square_().sum(1) for one in vectors])
        scores = squares.sort(1).values[:, 1 : n - wrong].mean(1)  # the nearest of all is the upload itself
        chosen = scores.sort(stable=True).indices[: min(self.select or n - wrong, n)]
        return torch.zeros(n, dtype=torch.float64).index_fill(0, chosen, 1 / len(chosen))


@options("geomedian")
class GeometricMedian(WithinLevels):
    """The point of the smallest sum of distances from the uploads of a level."""

    iterations: Annotated[int, Ge(1)] = 10  # of the algorithm
    smoothing: Annotated[float, Gt(0)] = 1e-6  # the least distance that counts, so that none is divided by zero

    def weights(self, vectors: Tensor) -> Tensor:
        z, shares = torch.zeros_like(vectors[0]), torch.empty(0)
        for _ in range(self.iterations):
            near = 1 / (vectors - z).square_().sum(1).sqrt().clamp(min=self.smoothing)
            shares = near / near.sum()
            z = (vectors * shares[:, None]).sum(0)
        return shares
