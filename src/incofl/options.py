"""Options: frozen dataclasses that check their values, whether these come from Python or from a section of a config."""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

from incofl.errors import ConfigError, nearest

T = TypeVar("T")
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "'none'"}


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def options(section: str) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen dataclass of checked values, which the section of that name in a config can set.

    Types may have bounds, as in ``Annotated[float, Ge(0)]``. A ``__post_init__`` of the class runs after the checks.
    """

    def decorate(cls: Any) -> Any:
        own_check = getattr(cls, "__post_init__", None)  # or that of a base

        def check(self: Any) -> None:
            for name, value in _checked_values(self).items():
                object.__setattr__(self, name, value)
            if own_check is not None:
                own_check(self)

        cls.__post_init__, cls.section = check, section
        return dataclasses.dataclass(frozen=True)(cls)

    return decorate


def has_options(part: object) -> bool:
    """Whether a section of a config can set the values of an object."""
    return bool(getattr(part, "section", ""))


def from_table(base: T, table: Any, section: str) -> T:
    """Options with the values of a config's table instead of some of their own."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{section}: got {table!r}, expected a table such as [{section}]")
    names = [field.name for field in dataclasses.fields(cast(Any, base))]
    for key in table:
        if key not in names:
            raise ConfigError(f"config: unknown key {f'{section}.{key}'!r}{nearest(key, names, f'{section}.')}")
    changed: T = dataclasses.replace(cast(Any, base), **table)
    return changed


def _checked_values(part: Any) -> dict[str, Any]:
    """The values of all fields, lists as tuples; one clear line for the first that its type does not allow."""
    import pydantic  # not needed by commands that only list names

    values = {}
    for name, (hint, adapter) in _adapters(part.__class__).items():
        got = getattr(part, name)
        try:
            values[name] = adapter.validate_python(_as_tuple(got), strict=True)
        except pydantic.ValidationError:
            key = f"{part.section}.{name}" if part.section else name
            raise ConfigError(f"{key}: got {got!r}, expected {expected(hint)}") from None
    return values


@functools.cache
def _adapters(cls: Any) -> dict[str, tuple[Any, Any]]:
    from pydantic import ConfigDict, TypeAdapter

    hints = typing.get_type_hints(cls, include_extras=True)
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)  # dataclasses have one of their own
    return {
        field.name: (hint, TypeAdapter(hint, config=None if dataclasses.is_dataclass(hint) else config))
        for field in dataclasses.fields(cls)
        for hint in [hints[field.name]]
    }


def _as_tuple(value: Any) -> Any:
    """Lists, which TOML has, as tuples, which cannot change."""
    return tuple(_as_tuple(entry) for entry in value) if isinstance(value, list | tuple) else value


def expected(hint: Any) -> str:
    """A type in the user's words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        base, *bounds = arguments
        found = {key: getattr(bound, key) for bound in bounds for key in _SIGNS if hasattr(bound, key)}
        if found.keys() == {"ge", "le"}:
            return f"{expected(base)} from {found['ge']:g} to {found['le']:g}"
        return f"{expected(base)} {' and '.join(f'{_SIGNS[key]} {value:g}' for key, value in found.items())}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(expected, arguments))
    if origin is tuple:
        words = typing.get_args(arguments[0]) if typing.get_origin(arguments[0]) is Literal else ()
        return f"a list of {', '.join(words)}, such as [{words[0]!r}]" if words else "a list"
    return _WORDS.get(hint, str(hint))
