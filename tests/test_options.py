"""Options: values are checked wherever they come from, with one line that says what was expected."""

import dataclasses
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from incofl.errors import ConfigError
from incofl.options import expected, from_table, has_options, options


@options("shape")
class Shape:
    """Options of a test."""

    sides: Annotated[int, Ge(3), Le(8)] = 4
    size: Annotated[float, Gt(0)] = 1.0
    colour: Literal["red", "blue"] | None = None
    corners: tuple[int | tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.colour == "red" and self.sides == 3:
            raise ConfigError("shape.colour: no red triangles")


def test_values_are_kept_and_lists_become_tuples() -> None:
    shape = Shape(sides=5, size=2, corners=[1, [2, 3]])  # type: ignore[arg-type]
    assert (shape.sides, shape.size, shape.corners) == (5, 2.0, (1, (2, 3)))
    assert dataclasses.replace(shape, sides=6).sides == 6
    assert has_options(shape)
    assert not has_options(3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sides": 9}, "shape.sides: got 9, expected a whole number from 3 to 8"),
        ({"sides": 3.5}, "shape.sides: got 3.5, expected a whole number from 3 to 8"),
        ({"sides": True}, "shape.sides: got True, expected a whole number from 3 to 8"),
        ({"size": float("nan")}, "shape.size: got nan, expected a number > 0"),
        ({"size": float("inf")}, "shape.size: got inf, expected a number > 0"),
        ({"size": None}, "shape.size: got None, expected a number > 0"),
        ({"colour": "green"}, "shape.colour: got 'green', expected 'red' or 'blue' or 'none'"),
        ({"corners": ["a"]}, "shape.corners: got ['a'], expected a list"),
        ({"colour": "red", "sides": 3}, "shape.colour: no red triangles"),
    ],
)
def test_mistakes(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        Shape(**values)
    assert str(problem.value) == message
    with pytest.raises(ConfigError) as problem:
        dataclasses.replace(Shape(), **values)
    assert str(problem.value) == message


def test_tables() -> None:
    assert from_table(Shape(), {"sides": 6}, "shape") == Shape(sides=6)
    with pytest.raises(ConfigError, match=r"config: unknown key 'shape\.side'; did you mean 'shape\.sides'"):
        from_table(Shape(), {"side": 6}, "shape")
    with pytest.raises(ConfigError, match="shape: got 3, expected a table such as \\[shape\\]"):
        from_table(Shape(), 3, "shape")


def test_types_in_words() -> None:
    assert expected(Annotated[float, Gt(0), Lt(1)]) == "a number > 0 and < 1"
    assert expected(int | None) == "a whole number or 'none'"


def test_a_subclass_keeps_the_checks_of_its_base() -> None:
    @options("solid")
    class Solid(Shape):
        """With one more value."""

        height: Annotated[float, Gt(0)] = 1.0

    assert Solid(height=2).height == 2.0
    with pytest.raises(ConfigError, match="no red triangles"):
        Solid(colour="red", sides=3)
    with pytest.raises(ConfigError, match=r"solid\.height: got 0, expected a number > 0"):
        Solid(height=0)
