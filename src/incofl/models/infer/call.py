"""A call of an operator in a traced model, as the rules see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from incofl.models.infer.dims import OBVIOUS, Dim, Dims, hold, news


@dataclass(frozen=True)
class Value:
    """The dimensions of a tensor, and whether it is made of parameters only, without the input."""

    dims: Dims
    learned: bool = False

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, dim: int) -> Dim:
        return self.dims[dim]


@dataclass(frozen=True)
class Call:
    """A call of an operator."""

    name: str  # without overload: aten.linear
    where: str  # path of the module that calls it
    arguments: dict[str, Any]  # by the names of the operator's schema; a tensor is a Value
    shapes: tuple[tuple[int, ...], ...]  # of its results

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[0]

    @property
    def values(self) -> list[Value]:
        """All tensors among the arguments."""
        lists = [given if isinstance(given, list | tuple) else [given] for given in self.arguments.values()]
        return [value for given in lists for value in given if isinstance(value, Value)]

    def hold(self, *dims: Dim, what: str = "depends on its positions") -> None:
        """Holds dimensions whole because of this call."""
        hold(*dims, reason=f"{self.name} in {self.where} {what}")


Rule = Callable[[Call], Dims | list[Dims]]


def opaque(call: Call) -> list[Dims]:
    """An operator without a rule: everything that it touches is held whole, which is always safe."""
    call.hold(*(dim for value in call.values for dim in value.dims), what="has no rule")
    return [news(shape, OBVIOUS) for shape in call.shapes]
