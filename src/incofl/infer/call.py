"""One call of an operator in a traced model, as rules see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from incofl.infer.dims import Dim, Dims, hold


@dataclass(frozen=True)
class Value:
    """A tensor of the trace.

    Attributes:
        dims: its dimensions.
        learned: whether it is made of parameters alone, not of the input.
    """

    dims: Dims
    learned: bool = False

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, dim: int) -> Dim:
        return self.dims[dim]


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        name: of the operator, without overload: ``aten.linear``.
        where: the path of the module that calls it.
        arguments: by the names of the operator's schema; tensors are values.
        shapes: of its results; one entry unless it gives several tensors.
    """

    name: str
    where: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its result."""
        return self.shapes[0]

    @property
    def values(self) -> list[Value]:
        """All tensors among its arguments."""
        found: list[Value] = []
        for argument in self.arguments.values():
            found += [v for v in (argument if isinstance(argument, list | tuple) else [argument]) if _is_value(v)]
        return found

    def hold(self, dim: Dim, what: str = "") -> None:
        """Holds a dimension whole because of this call."""
        hold(dim, f"{self.name} in {self.where} {what or 'depends on its positions'}")


Rule = Callable[[Call], Dims | list[Dims]]


def _is_value(argument: object) -> bool:
    return isinstance(argument, Value)
