"""Uploads of bounded length: ``NAME+clipping``, and around the last mean, ``NAME+centred``. Both stream.

With u_k what client k sends, n_k its number of values, N that of the whole model, and c a centre (for updates 0, or
with ``centred`` the mean of the last round at each position, Karimireddy et al., ICML 2021):

    u_k  <-  c + (u_k - c) min(1, C sqrt(n_k / N) / |u_k - c|)

then the covered mean. So a client moves positions with h holders by C sqrt(n_k / N) / h at most, even a sole holder: of
rules on values, only this one helps there. A small slice has a proportionally smaller bound, so that one C suits all
levels. It is a constant, or follows the fleet: a quantile of what the last round's uploads would have needed. In the
first round, in which uploads wait for each other, it is a quantile of their own.

Statistics of batch norm are bounded in the same way, by a C of their own, around those that the server has; what a
method sends in addition (Scaffold's variates) by a third, around 0.
"""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Gt, Lt

from incofl.client import Upload
from incofl.mean import Arrivals, Averages, Mean
from incofl.options import options
from incofl.server import Changes, Server
from incofl.split import Slice
from incofl.tensors import Tensors, length, only
from incofl.transform import SHARED
from incofl.upload import kept

PARTS = ("update", "buffers", "extra")  # of an upload, each with a bound of its own


@options("clipping")
class Clipping(Mean):
    """Norm clipping: no upload is longer than a bound."""

    # of the norm of an update of the whole model, smaller for smaller slices; left out, it follows ``quantile``
    bound: Annotated[float, Gt(0)] | None = None
    quantile: Annotated[float, Gt(0), Lt(1)] = 0.5  # of the norms of the last round's uploads

    robust: ClassVar[bool] = True
    state: ClassVar[str] = "clipping"  # the table of the server's extra state with the bounds

    def aggregate(self, rule: Averages, server: Server, arrivals: Arrivals) -> Changes:
        bounds = {part: float(value) for part, value in server.extra.get(self.state, {}).items() if part in PARTS}
        bounds |= {} if self.bound is None else {"update": self.bound}
        measure, lengths = _Measure(server, self), dict[str, list[float]]()
        if self.state not in server.extra:  # the first round: they wait for each other
            arrivals = [[kept(upload) for uploads in arrivals for upload in uploads]]
            first = [cut for uploads in arrivals for upload in uploads for cut in measure(upload)]
            known = {part: [cut.length for cut in first if cut.part == part] for part in PARTS}
            bounds = {part: self._quantile(found) for part, found in known.items() if found} | bounds

        def shortened(upload: Upload) -> Upload:
            new: dict[str, Any] = {}
            for part, field, away, centre, long in measure(upload):
                lengths.setdefault(part, []).append(long)
                if long > bounds[part]:
                    f = bounds[part] / long
                    moved = {n: f * v + centre[n] if n in centre else f * v for n, v in away.items()}
                    new[field] = getattr(upload, field) | moved
            return dataclasses.replace(upload, **new) if new else upload

        changes = rule.aggregate(server, (list(map(shortened, uploads)) for uploads in arrivals))
        record = {
            part: {"bound": bounds[part], "clipped": sum(long > bounds[part] for long in found) / len(found)}
            for part, found in lengths.items()
        }
        bounds |= {part: self._quantile(found) for part, found in lengths.items()}
        state = {part: torch.tensor(value, dtype=torch.float64) for part, value in bounds.items()}
        learned = {self.state: state} if lengths else {}
        extra = {**changes.extra, **learned, **self.centres(server, changes)}
        return dataclasses.replace(changes, extra=extra, records={self.state: record})

    def centre(self, server: Server, level: int) -> Tensors:
        """What updates of a level are compared with, in server coordinates; nothing stands for zeros."""
        return {}

    def centres(self, server: Server, changes: Changes) -> dict[str, Tensors]:
        """The centres of the next round, as tables of the server's extra state."""
        return {}

    def _quantile(self, lengths: list[float]) -> float:
        return float(torch.tensor(lengths, dtype=torch.float64).quantile(self.quantile))


@options("centred")
class Centred(Clipping):
    """Centred clipping: no upload is farther than a bound from the mean of the last round."""

    state: ClassVar[str] = "centred"

    def centre(self, server: Server, level: int) -> Tensors:
        return server.extra.get(f"{self.state}-mean", {}) | server.extra.get(f"{self.state}-mean-{level}", {})

    def centres(self, server: Server, changes: Changes) -> dict[str, Tensors]:
        found = {}
        for group, change in {SHARED: changes.shared, **changes.private}.items():
            table = f"{self.state}-mean" if group == SHARED else f"{self.state}-mean-{group}"
            old = server.extra.get(table, {})
            # In memory of its own, for transforms use that of the update.
            new = {n: v.clone() for n, v in only(change.values, server.layout.parameters).items()}
            zeros = {name: torch.zeros_like(value) for name, value in new.items()}
            mean = dataclasses.replace(change, values=new).over(zeros | old)
            if mean or old:
                found[table] = old | mean
        kept_on = {t: v for t, v in server.extra.items() if t.startswith(f"{self.state}-mean")}
        return kept_on | found


class Cut(NamedTuple):
    """A part of an upload: its distance from a centre, and how long that is in terms of the whole model."""

    part: str  # whose bound it has
    field: str  # of the upload
    away: Tensors
    centre: Tensors
    length: float


class _Measure:
    """Measures uploads of a round."""

    def __init__(self, server: Server, rule: Clipping) -> None:
        self._server, self._rule = server, rule
        layout = server.layout
        statistics = {name for name in layout.buffers if server.shared[name].is_floating_point()}
        self._names = {"update": layout.parameters, "buffers": statistics, "extra": layout.parameters}
        self._sizes = {p: sum(math.prod(layout.shapes[n]) for n in names) for p, names in self._names.items()}
        # By level and slice, the centre of each field; the slice is kept, so that no other gets its id.
        self._centres: dict[tuple[int, int], tuple[Slice, dict[str, Tensors]]] = {}

    def __call__(self, upload: Upload) -> list[Cut]:
        key = upload.level, id(upload.slice)
        if key not in self._centres:
            self._centres[key] = upload.slice, self._centres_of(upload)
        found = []
        for field, centre in self._centres[key][1].items():
            part = "buffers" if field == "smallest" else field
            values = only(getattr(upload, field), self._names[part])
            if count := sum(value.numel() for value in values.values()):
                away = {n: v - centre[n] if n in centre else v for n, v in values.items()}
                found.append(Cut(part, field, away, centre, length(away) * math.sqrt(self._sizes[part] / count)))
        return found

    def _centres_of(self, upload: Upload) -> dict[str, Tensors]:
        server, statistics = self._server, self._names["buffers"]
        look = upload.slice.look
        centres = {
            "update": look(self._rule.centre(server, upload.level)),
            "buffers": look(only(server.state(upload.level), statistics)),
            "extra": {},
        }
        if upload.smallest:
            centres["smallest"] = server.population[0][0].look(only(server.state(0), statistics))
        return centres
