"""How a config is read: TOML files, presets, ``key=value`` overrides, and one clear line for what is wrong."""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import TypeAdapter

from incofl.config.schema import Config
from incofl.errors import ConfigError, nearest


def make_config(values: Mapping[str, Any] | None = None, overrides: Iterable[str] = ()) -> Config:
    """A checked config from nested values (as read from TOML) and ``key=value`` overrides."""
    tree: dict[str, Any] = _copy(values or {})
    for override in overrides:
        _set(tree, override)
    _check_keys(tree, Config, "")
    try:
        return TypeAdapter(Config).validate_json(json.dumps(_none(tree), default=str), strict=True)
    except pydantic.ValidationError as problem:
        raise ConfigError(_explain(problem)) from None


def load_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a TOML file, or a preset by its name, and applies overrides."""
    if path is None:
        return make_config({}, overrides)
    if not Path(path).exists():
        if str(path) not in presets():
            raise ConfigError(f"{path}: no such file, nor a preset{nearest(str(path), presets())}")
        return make_config(tomllib.loads(presets()[str(path)]), overrides)
    return make_config(read_toml(path), overrides)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file."""
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: not a TOML file ({problem})") from None
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read ({problem.strerror})") from None


def presets() -> dict[str, str]:
    """The configs that come with the package, by name."""
    folder = resources.files("incofl") / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text()
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def _set(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set: got {override!r}, expected key=value such as data.alpha=0.5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: --set method=incoavg
    *tables, last = key.strip().split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set: {key.strip()!r} is not a key: {table!r} is a value, not a table")
    tree[last] = value


def _check_keys(tree: Mapping[str, Any], section: type, prefix: str) -> None:
    hints = typing.get_type_hints(section)
    names = [f.name for f in dataclasses.fields(section)]
    for key, value in tree.items():
        if key not in names:
            elsewhere = [name for name in Config().flat() if name.endswith(f".{key}")]
            hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else nearest(key, names)
            raise ConfigError(f"config: unknown key {prefix + key!r}{hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key}: got {value!r}, expected a table such as [{key}]")
            _check_keys(value, typing.cast(type, hints[key]), f"{prefix}{key}.")


def _explain(problem: pydantic.ValidationError) -> str:
    """The first complaint in one line: key, what it got, what was expected."""
    error = problem.errors(include_url=False)[0]
    keys = [str(part) for part in error["loc"]]
    # Unions add the name of the tried member to the location; the key itself is what the user wrote.
    hint: Any = Config
    path = []
    while keys and dataclasses.is_dataclass(hint):
        path.append(keys.pop(0))
        hint = typing.get_type_hints(hint, include_extras=True)[path[-1]]
    return f"{'.'.join(path)}: got {error['input']!r}, expected {expected(hint)}"


def expected(hint: Any) -> str:
    """A type in the user's words."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *bounds = typing.get_args(hint)
        words = [expected(base)]
        for bound in bounds:
            words += [f"{sign} {getattr(bound, attribute)}" for attribute, sign in _SIGNS if hasattr(bound, attribute)]
        return " ".join(words)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(expected(member) for member in typing.get_args(hint))
    if origin is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "'none'"}.get(
        hint, str(hint)
    )


_SIGNS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _none(entry) for key, entry in value.items()}
    return None if value == "none" else value
