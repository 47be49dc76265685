"""InclusiveFL: every size has a last block and a head of its own, taught by those of the next larger size.

Liu et al., "No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices", KDD 2022. Sizes share all
blocks but the last one that they hold; the head is not shared either. With g_i the mean update of size i, its last
block b_i, and m_i the mean of the last round's updates of blocks b_i .. b_{i+1} by size i + 1:

    the last block of size i moves by  beta m_i + (1 - beta) g_i

1. A shared tensor is averaged over the clients that hold it in a block that is not their last, by examples.
2. Of blocks of another shape (the first of a stage) only tensors of the same shape count in m_i.
3. If nobody of size i + 1 took part in the last round, there is no m_i, and the block moves by g_i.
4. The largest size has no teacher. Batch-norm statistics and heads are not blended.
5. With InCo, shared updates are mixed as usual, and the last blocks with the shared shallow layer, after blending.

Differences: the original is for text transformers, and takes one AdamW step a round on the server with the clients'
gradients; here clients train for some epochs and the server averages, as in the comparison with InCo. In the released
code the momentum is assigned instead of summed, and then never applied (its condition tests the initial value), while
the gradient is still scaled by 1 - beta: ``inclusive.momentum = false`` is nearest to it. ReeFL's version of the method
leaves b_i itself out of m_i, and weighs by clients (``aggregate.weighting = "uniform"``).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from annotated_types import Ge, Le

from incofl.aggregate import Accumulator, Contribution, CoveredMean
from incofl.client import Setting, Upload
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.methods.heterofl import class_dimensions
from incofl.options import options
from incofl.server import Changes, Server
from incofl.split import Slice
from incofl.tensors import Tensors, clone, only


@options("inclusive")
class InclusiveOptions:
    """The config section ``inclusive``.

    Attributes:
        momentum: whether the last block of a size learns from the next larger one.
        beta: weight of what it learns.
    """

    momentum: bool = True
    beta: Annotated[float, Ge(0), Le(1)] = 0.2


@dataclass(frozen=True)
class InclusiveFL(ServerRule):
    """The server half; clients train as in FedAvg."""

    options: InclusiveOptions = field(default_factory=InclusiveOptions)

    def check(self, setting: Setting) -> None:
        """Every size has a last block and a head."""
        if not setting.layout.stages:
            raise ConfigError(
                "method: inclusivefl needs a model with blocks, the last of which each size has for itself"
            )
        setting.need_classes("inclusivefl", "each size has a head of its own")

    def start(self, server: Server) -> Server:
        """Every size begins with a copy of its own of what it does not share."""
        for level in server.population:
            self._lesson(server, level)  # refuses sizes that cannot teach each other
        private = {
            level: clone({name: server.shared[name] for name in self.private(server.layout, slice_)})
            for level, (slice_, _) in server.population.items()
        }
        return dataclasses.replace(server, private=private)

    def private(self, layout: Layout, slice_: Slice) -> frozenset[str]:
        """The last block that a slice holds, and the head."""
        last = held_blocks(layout, slice_)[-1]
        head = class_dimensions(layout, slice_.index)
        return frozenset(name for name in slice_.index if layout.block_of[name] == last or name in head)

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        """As usual; in addition, the mean updates of the blocks that teach, by size."""
        if not self.options.momentum:
            return super().aggregate(server, arrivals)
        layout = server.layout
        sums: dict[int, Accumulator] = {}
        teaching = {level: self._lesson(server, level) for level in server.population}

        def watched() -> Iterator[Sequence[Upload]]:
            for uploads in arrivals:
                for upload in uploads:
                    taught = only(upload.update, teaching[upload.level])
                    part = Contribution(upload.slice, taught, self.weight(upload), upload.normaliser)
                    sums.setdefault(upload.level, self._sum(layout)).add(part)
                yield uploads

        changes = super().aggregate(server, watched())
        lessons = {level: total.mean() for level, total in sums.items()}
        return dataclasses.replace(
            changes,
            private={level: self._blend(server, level, change) for level, change in changes.private.items()},
            extra=self._momenta(server, lessons),
        )

    def _lesson(self, server: Server, level: int) -> frozenset[str]:
        """The parameters of a size that teach the next smaller one: its blocks from that one's last block on."""
        layout, smaller = server.layout, next_smaller(server, level)
        if smaller is None:
            return frozenset()
        blocks = held_blocks(layout, server.population[level][0])
        last = held_blocks(layout, server.population[smaller][0])[-1]
        if last not in blocks:
            raise ConfigError(f"split.levels: level {level} lacks {last!r}, which level {smaller} should learn from it")
        first = blocks.index(last)
        return frozenset(name for name in layout.parameters if layout.block_of[name] in blocks[first:])

    def _momenta(self, server: Server, lessons: Mapping[int, CoveredMean]) -> dict[str, Tensors]:
        """m_i of each size whose next larger one took part."""
        layout = server.layout
        momenta: dict[str, Tensors] = {}
        for level, lesson in lessons.items():
            smaller = next_smaller(server, level)
            if smaller is None:
                continue
            last = held_blocks(layout, server.population[smaller][0])[-1]
            momenta[table(smaller)] = {}
            for name in layout.parameters:
                if layout.block_of[name] == last:
                    inner = name.removeprefix(last)
                    alike = [
                        value
                        for other, value in lesson.values.items()
                        if other == f"{layout.block_of[other]}{inner}" and value.shape == layout.shapes[name]
                    ]
                    if alike:
                        momenta[table(smaller)][name] = torch.stack(alike).mean(0)
        return momenta

    def _blend(self, server: Server, level: int, change: CoveredMean) -> CoveredMean:
        """Beta m + (1 - beta) g, where there is an m."""
        momentum, beta = server.extra.get(table(level), {}), self.options.beta
        values = {
            name: beta * momentum[name] + (1 - beta) * value if name in momentum else value
            for name, value in change.values.items()
        }
        return CoveredMean(values, change.weight)


def held_blocks(layout: Layout, slice_: Slice) -> list[str]:
    """The blocks of a slice, from the first to the last."""
    held = {layout.block_of[name] for name in slice_.index}
    return [block for block in layout.blocks if block in held]


def next_smaller(server: Server, level: int) -> int | None:
    """The next smaller size that somebody has."""
    return max((other for other in server.population if other < level), default=None)


def table(level: int) -> str:
    """Where a size's momentum is in ``server.extra``."""
    return f"momentum-{level}"


inclusivefl = Method(
    "inclusivefl",
    server=InclusiveFL("samples"),
)
