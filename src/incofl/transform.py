"""Update transforms: chained functions of the aggregated update, which they may change in place, with saved state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from incofl.layout import Layout
from incofl.tensors import Tensors

Record = dict[str, dict[str, float]]  # by tensor, numbers that are worth recording
SHARED = -1  # stands for the update that all levels share


@dataclass(frozen=True)
class Context:
    """What a transform may read in addition to the update."""

    layout: Layout
    round: int = 0  # from 0 on
    seed: int = 0  # of the run, for random streams
    # For each tensor of the update, the summed weight of the clients that hold a position; 0: nobody did.
    weight: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict)  # where the update is a level's own, that of all levels
    unit: float = 1.0  # mean weight of a client: a position of weight w has about w / unit holders
    squares: Mapping[str, Tensor] = field(default_factory=dict)  # mean squares of clients' updates, for who needs them

    def where_held(self, name: str, new: Tensor, old: Tensor | float) -> Tensor:
        """``new`` at positions that somebody held, ``old`` elsewhere."""
        weight = self.weight.get(name)
        return new if weight is None else torch.where(weight > 0, new, old)


class UpdateTransform(Protocol):
    """A function of the aggregated update, applied on the server before the update is added.

    With an attribute ``needs_shared_model = True`` it is refused for methods whose levels share no model, with
    ``counts_holders = True`` for those that do not weigh all clients alike.
    """

    @property
    def name(self) -> str:
        """The key of its record in ``metrics.jsonl`` and of its state in the checkpoint."""

    def init(self, layout: Layout) -> Tensors:
        """The state before the first round."""

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        """The new update, which may use the memory of the given one, the new state in new memory, and a record."""


class Stateless:
    """A base for transforms without state."""

    def init(self, layout: Layout) -> Tensors:
        return {}
