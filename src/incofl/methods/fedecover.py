"""FedEcover: random width whose channels come from pools that all clients share, so that soon every channel is trained.

"FedEcover: Fast and Stable Converging Model-Heterogeneous Federated Learning with Efficient-Coverage Submodel
Extraction", ICDE 2025. Each axis has a pool of its channels. The clients of a round draw from it one after the other,
without replacement; who finds fewer than it needs takes them all, the pool is filled again, and it draws the rest from
the others. The server's step falls by a factor of 0.9 every ten rounds until round 200 (``[server]``).

The server counts how often each channel was trained: what is left in a pool are those that were trained the least, so a
draw takes the least trained ones, in a random order among equals. The counts are part of the checkpoint.

Differences: a channel whose client never replied is not counted, and so goes back into its pool. Everything else is as
in ``fedrand``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from incofl.client import Upload
from incofl.layout import Axis, Layout
from incofl.method import Method, ServerRule
from incofl.methods.fedrand import FedRand, RandomRule, RandomWindows
from incofl.methods.server_optimizers import ServerSchedule
from incofl.seeds import Purpose, torch_rng
from incofl.server import Changes, Server
from incofl.split import COUNTS, Drawn, Slice, Splitter, cut


class PooledWindows(RandomWindows):
    """Channels drawn from those that were trained the least."""

    def axes(self, layout: Layout, level: int) -> list[Axis]:
        """The axes of which a level draws some channels."""
        held = Splitter.slice(self, layout, level).index
        own = {axis.name for name in held for axis in layout.axes[name] if axis is not None}
        return [a for a in layout.narrow_axes if a.name in own and self.width(a.size, level) < a.size]

    def draw(
        self, layout: Layout, counts: Mapping[str, Tensor], level: int, round: int, client: int
    ) -> tuple[Drawn, Mapping[str, Tensor]]:
        rng, drawn, after = torch_rng(self.seed, Purpose.WINDOWS, round, client), list[int](), dict(counts)
        narrowed = {axis.name for axis in self.axes(layout, level)}
        for axis in layout.narrow_axes:
            before = after.get(axis.name, torch.zeros(axis.size, dtype=torch.int64))
            order = torch.randperm(axis.size, generator=rng)
            if axis.name in narrowed:
                least = order[torch.argsort(before[order], stable=True)][: self.width(axis.size, level)].sort().values
                drawn += least.tolist()
                after[axis.name] = before.index_add(0, least, torch.ones_like(least))
        return tuple(drawn), after

    def slice(self, layout: Layout, level: int, round: int = 0, client: int | None = None, drawn: Drawn = ()) -> Slice:
        if not drawn:  # the one that is evaluated, which has the same shape
            return super().slice(layout, level)
        left = iter(drawn)
        keep = {a.name: torch.tensor(list(islice(left, self.width(a.size, level)))) for a in self.axes(layout, level)}
        return cut(layout, self.blocks(layout, level), keep)


class PooledRule(RandomRule):
    """Width splitting whose channels come from pools."""

    cutter = PooledWindows


@dataclass(frozen=True)
class PoolServer(ServerRule):
    """The covered mean, and the counts of the pools."""

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        counts = dict(server.extra.get(COUNTS, {}))

        def watched() -> Iterator[Sequence[Upload]]:
            for uploads in arrivals:
                for upload in uploads:
                    for axis, units in drawn_units(server.layout, upload.slice).items():
                        before = counts.get(axis.name, torch.zeros(axis.size, dtype=torch.int64))
                        counts[axis.name] = before.index_add(0, units, torch.ones_like(units))
                yield uploads

        changes = super().aggregate(server, watched())
        return replace(changes, extra={**changes.extra, **({COUNTS: counts} if counts else {})})


def drawn_units(layout: Layout, slice_: Slice) -> dict[Axis, Tensor]:
    """The channels of each axis of which a slice holds some and not all."""
    found: dict[str, tuple[Axis, Tensor]] = {}
    for name, at in slice_.index.items():
        for axis, index in zip(layout.axes[name], at, strict=True):
            if axis is not None and not axis.fixed and axis.name not in found and isinstance(index, Tensor):
                found[axis.name] = axis, torch.tensor(sorted(set((index // axis.unit % axis.size).tolist())))
    return dict(found.values())


decaying = ServerSchedule(schedule="step", decay=0.9, decay_every=10, decay_rounds=200)
fedecover = Method("fedecover", FedRand(), PoolServer(buffers="static"), PooledRule(), transforms=(decaying,))
