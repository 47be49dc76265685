"""How a config is read: TOML files, presets, ``key=value`` overrides, objects, and one clear line for what is wrong."""

import copy
import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from incofl.config.objects import GIVEN, OBJECTS, load_data, name_of
from incofl.config.resolve import find_method_of, resolve
from incofl.config.schema import Config
from incofl.errors import ConfigError, nearest
from incofl.methods import all_options
from incofl.options import from_table

_SECTIONS: dict[str, Any] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if dataclasses.is_dataclass(hint)
}
_KEYS = [f.name for f in dataclasses.fields(Config) if f.name not in ("methods", "objects")]


def make_config(values: Mapping[str, Any] | None = None, overrides: Iterable[str] = (), **objects: Any) -> Config:
    """A checked config from nested values (as read from TOML), ``key=value`` overrides, and objects.

    Objects replace what the config says: ``model``, ``data``, ``method`` and ``task``.
    """
    tree: dict[str, Any] = copy.deepcopy(dict(values or {}))
    for override in overrides:
        _set(tree, override)
    tree = json.loads(json.dumps(tree, default=str))  # dates, which TOML has, as they are written
    objects = {kind: value for kind, value in objects.items() if value is not None}
    for kind, value in objects.items():
        _set_name(tree, kind, name_of(value, kind))
    tree = _without_none(tree)
    name = tree["data"].get("name", "") if isinstance(tree.get("data"), dict) else ""
    if "data" not in objects and ":" in str(name) and not name.startswith(GIVEN):
        objects["data"] = load_data(name)
    return resolve(_checked(tree, objects))


def load_config(path: str | Path | None = None, overrides: Iterable[str] = (), **objects: Any) -> Config:
    """Reads a TOML file, or a preset by its name, and applies overrides and objects."""
    return make_config(read_values(path), overrides, **objects)


def read_values(path: str | Path | None) -> dict[str, Any]:
    """The values of a TOML file, or of a preset by its name."""
    if path is None:
        return {}
    if not Path(path).exists():
        if str(path) not in presets():
            raise ConfigError(f"{path}: no such file, nor a preset{nearest(str(path), presets())}")
        return tomllib.loads(presets()[str(path)])
    return read_toml(path)


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


def _set_name(tree: dict[str, Any], kind: str, name: str) -> None:
    table, key = OBJECTS[kind]
    (tree.setdefault(table, {}) if table else tree)[key] = name


def _checked(tree: dict[str, Any], objects: dict[str, Any]) -> Config:
    """The config of a tree, whose tables are sections of ``Config`` or of methods."""
    method = tree.get("method", Config.method)
    own = find_method_of(method, objects).options if isinstance(method, str) and (":" in method or objects) else {}
    sections = {**all_options(), **own}
    for key in tree:
        if key not in _KEYS and key not in sections:
            known = [*_KEYS, *sections]
            elsewhere = [name for name in _all_keys(sections) if name.endswith(f".{key}")]
            hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else nearest(key, known)
            raise ConfigError(f"config: unknown key {key!r}{hint}")
    tables: dict[str, Any] = {key: from_table(_SECTIONS[key], tree[key], key) for key in tree if key in _SECTIONS}
    methods = {key: from_table(type(sections[key]), tree[key], key) for key in tree if key in sections}
    plain = {key: tree[key] for key in tree if key in _KEYS and key not in _SECTIONS}
    return Config(**plain, **tables, methods=methods, objects=objects)


def _all_keys(sections: Mapping[str, Any]) -> list[str]:
    types = {**_SECTIONS, **{name: type(value) for name, value in sections.items()}}
    return [f"{section}.{field.name}" for section, cls in types.items() for field in dataclasses.fields(cls)]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items()}
    return None if value == "none" else value
