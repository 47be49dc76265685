"""InclusiveFL: every size has a last block and a head of its own, and the last block learns from the next larger size.

Liu et al., "No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices", KDD 2022. With g_i the mean
update of size i, b_i its last block, and m_i the mean of the last round's updates by size i + 1 of b_i .. b_{i+1}:

    the last block of size i moves by  beta m_i + (1 - beta) g_i,        and by g_i where there is no m_i

Differences: the original is for text transformers, with one AdamW step a round on the server. Its released code assigns
the momentum instead of summing it and never applies it, but scales the gradient by 1 - beta; ``inclusive.momentum =
false`` is nearest to it. ReeFL's version leaves b_i out of m_i and weighs by clients (``aggregate.weighting``).
"""

import dataclasses
import itertools
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
    """What the last block of a size learns from the next larger one."""

    momentum: bool = True  # whether it learns anything
    beta: Annotated[float, Ge(0), Le(1)] = 0.2  # weight of what it learns


@dataclass(frozen=True)
class InclusiveFL(ServerRule):
    """The server half; clients train as in FedAvg."""

    options: InclusiveOptions = field(default_factory=InclusiveOptions)

    def check(self, setting: Setting) -> None:
        if not setting.layout.stages:
            raise ConfigError("method: inclusivefl needs a model with blocks: each size has its own last block")
        setting.need_classes("inclusivefl", "each size has a head of its own")

    def start(self, server: Server) -> Server:
        lessons(server)  # refuses sizes that cannot teach each other
        private = {
            level: clone({name: server.shared[name] for name in self.private(server.layout, slice_)})
            for level, (slice_, _) in server.population.items()
        }
        return dataclasses.replace(server, private=private)

    def private(self, layout: Layout, slice_: Slice) -> frozenset[str]:
        last, head = held_blocks(layout, slice_)[-1], class_dimensions(layout, slice_.index)
        return frozenset(name for name in slice_.index if layout.block_of[name] == last or name in head)

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        if not self.options.momentum:
            return super().aggregate(server, arrivals)
        taught, sums = lessons(server), dict[int, Accumulator]()

        def watched() -> Iterator[Sequence[Upload]]:
            for uploads in arrivals:
                for upload in uploads:
                    if upload.level in taught:
                        lesson = only(upload.update, taught[upload.level][-1])
                        part = Contribution(upload.slice, lesson, self.weight(upload), upload.normaliser)
                        sums.setdefault(upload.level, self._sum(server.layout)).add(part)
                yield uploads

        changes = super().aggregate(server, watched())
        private = {level: self._blend(server, level, change) for level, change in changes.private.items()}
        momenta = {}
        for level, total in sums.items():
            smaller, last, _ = taught[level]
            momenta[f"momentum-{smaller}"] = momentum(server.layout, last, total.mean().values)
        return dataclasses.replace(changes, private=private, extra=momenta)

    def _blend(self, server: Server, level: int, change: CoveredMean) -> CoveredMean:
        known, beta = server.extra.get(f"momentum-{level}", {}), self.options.beta
        values = {
            name: beta * known[name] + (1 - beta) * value if name in known else value
            for name, value in change.values.items()
        }
        return CoveredMean(values, change.weight)


def lessons(server: Server) -> dict[int, tuple[int, str, frozenset[str]]]:
    """For each size that teaches a smaller one: that one, its last block, and the parameters from there on."""
    layout, found = server.layout, {}
    held = {level: held_blocks(layout, slice_) for level, (slice_, _) in sorted(server.population.items())}
    for (smaller, (*_, last)), (level, blocks) in itertools.pairwise(held.items()):
        if last not in blocks:
            raise ConfigError(f"split.levels: level {level} lacks {last!r}, which level {smaller} should learn from it")
        teaching = blocks[blocks.index(last) :]
        names = frozenset(name for name in layout.parameters if layout.block_of[name] in teaching)
        found[level] = smaller, last, names
    return found


def momentum(layout: Layout, last: str, updates: Mapping[str, torch.Tensor]) -> Tensors:
    """m_i: for each parameter of a last block, the mean update of those of its name and shape in blocks that teach."""
    found: Tensors = {}
    for name in layout.parameters:
        if layout.block_of[name] == last:
            inner, shape = name.removeprefix(last), layout.shapes[name]
            same = [v for n, v in updates.items() if n == f"{layout.block_of[n]}{inner}" and v.shape == shape]
            if same:
                found[name] = torch.stack(same).mean(0)
    return found


def held_blocks(layout: Layout, slice_: Slice) -> list[str]:
    """The blocks of a slice, from the first to the last."""
    held = {layout.block_of[name] for name in slice_.index}
    return [block for block in layout.blocks if block in held]


inclusivefl = Method("inclusivefl", server=InclusiveFL("samples"))
