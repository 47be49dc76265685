"""HetLoRA's self-pruning: a client drops its last ranks when they shrink (Cho et al., EMNLP 2024).

The last of a client's r ranks, from gamma r on and at least one, add weight ||B||_F ||A||_F to its loss. If the norm of
their product, over all layers, is smaller after a turn than before, the client drops them: from its next turn on both
factors are 0 there, which the server's mean counts as zeros. What is sent stays that of the client's level.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from incofl.client import ClientRule, Local
from incofl.layout import Layout
from incofl.methods.adapters import A, B, adapters
from incofl.methods.factors import Factors
from incofl.options import options
from incofl.tensors import Tensors

TINY = 1e-12  # below a square root, which has no slope at 0


@options("hetlora")
class SelfPruning:
    """HetLoRA's clients drop ranks that shrink."""

    gamma: Annotated[float, Gt(0), Le(1)] = 1.0  # the share of a client's ranks below its last ones; 1: none is dropped
    weight: Annotated[float, Ge(0)] = 1e-3  # of the last ranks in the loss

    def last(self, ranks: int) -> tuple[int, int]:
        """The first of the last ranks and the number of all: at least one stays."""
        return max(1, min(int(self.gamma * ranks), ranks - 1 if self.gamma < 1 else ranks)), ranks


@dataclass(frozen=True)
class Pruned(ClientRule):
    """Trains the ranks that a client has not dropped; what it remembers is which these are, in the rows of one A."""

    pruning: SelfPruning = field(default_factory=SelfPruning)

    def memory(self, layout: Layout) -> frozenset[str]:
        return frozenset(adapter.a for adapter in adapters(layout)[:1] if self.pruning.gamma < 1)

    def begin(self, local: Local) -> None:
        if self.pruning.gamma < 1:
            pairs = [(n, n.removesuffix(A) + B) for n in local.parameters if n.endswith(A)]
            kept = next(iter(local.given.memory.values()), local.received[pairs[0][0]] * 0 + 1)
            ranks = int(kept.flatten(1)[:, 0].sum())
            for a, b in pairs:  # where both factors are 0, they stay 0, and the server's mean has zeros
                local.parameters[a].data[ranks:] = 0
                local.parameters[b].data[:, ranks:] = 0
            local.scratch.update(pairs=pairs, ranks=ranks, norm=self._norm(local, pairs, ranks))

    def loss(self, local: Local, x: Any, y: Tensor) -> Tensor:
        loss = super().loss(local, x, y)
        if self.pruning.gamma < 1:
            first, last = self.pruning.last(local.scratch["ranks"])
            values = local.parameters
            for a, b in local.scratch["pairs"]:
                sizes = [
                    part.square().sum().add(TINY).sqrt() for part in (values[a][first:last], values[b][:, first:last])
                ]
                loss = loss + self.pruning.weight * sizes[0] * sizes[1]
        return loss

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        if self.pruning.gamma == 1:
            return {}, {}
        pairs, ranks = local.scratch["pairs"], local.scratch["ranks"]
        if self._norm(local, pairs, ranks) < local.scratch["norm"]:
            ranks, _ = self.pruning.last(ranks)
        name, _ = pairs[0]
        kept = torch.zeros_like(local.received[name])
        kept[:ranks] = 1
        return {}, {name: kept}

    def _norm(self, local: Local, pairs: Sequence[tuple[str, str]], ranks: int) -> float:
        """The norms of the products of the last ranks, summed over the layers."""
        values, (first, last) = local.parameters, self.pruning.last(ranks)
        factors = [Factors(values[a].detach().flatten(1), values[b].detach().flatten(1)) for a, b in pairs]
        return sum(each.exact().ranks(first, last, 1.0).norm for each in factors)
