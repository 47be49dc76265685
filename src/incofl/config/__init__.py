"""The configuration of a run, from TOML files, presets, ``key=value`` overrides and objects."""

import copy
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from incofl.config.resolve import OBJECTS, changed_options, find, find_parts, name_of, resolve
from incofl.config.schema import KEYS, SECTIONS, UNBOUND, Config
from incofl.errors import ConfigError, nearest
from incofl.methods import METHODS, all_options
from incofl.options import from_table

__all__ = ["UNBOUND", "AnyConfig", "Config", "find_parts", "load_config", "make_config", "presets", "read_toml"]

AnyConfig = Config | Mapping[str, Any] | str | Path | None
MOST_DEPTH = 32  # of values in values; arguments of a model's factory may have some
RENAMED = {"aggregate.server_lr": "server.lr", "heterofl.clip": "local.max_grad_norm"}  # keys of earlier versions


def make_config(
    values: AnyConfig = None, overrides: Iterable[str] = (), also: Iterable[Any] = (), **objects: Any
) -> Config:
    """A checked config from nested values (as read from TOML), ``key=value`` overrides, and objects.

    The values may also be a config, the name of a preset, or the path of a TOML file. Objects replace what the config
    says: ``model``, ``data``, ``method`` and ``task``. Options that are given for a method apply to its object, too.
    Options of the methods ``also`` may be there, and are ignored.
    """
    if unknown := sorted(objects.keys() - OBJECTS.keys()):
        raise TypeError(f"got an unexpected argument {unknown[0]!r}, expected one of {', '.join(OBJECTS)}")
    objects = {kind: value for kind, value in objects.items() if value is not None}
    before = values.unused if isinstance(values, Config) else ()
    if isinstance(values, Config):
        plain, changed = values.to_dict(), changed_options(values)
        said = {key: plain[key] for key in KEYS} | changed if "method" in objects else plain
        objects, values = values.objects | objects, said
    given_tree = _read(values) if isinstance(values, str | Path) else dict(values or {})
    _check_depth(given_tree, "config")
    tree: dict[str, Any] = copy.deepcopy(given_tree)
    for override in overrides:
        _set(tree, override)
    _check_depth(tree, "config")
    # Dates, which TOML has, as they are written; null, which it does not have, is written "none".
    text = json.dumps(tree, default=str)
    tree = json.loads(text, object_hook=lambda table: {k: None if v == "none" else v for k, v in table.items()})
    given = dict(objects)
    for kind, value in objects.items():
        table, key = OBJECTS[kind]
        (tree.setdefault(table, {}) if table else tree)[key] = name = name_of(value)
        if isinstance(value, str) or name in METHODS:
            del given[kind]  # its name says it all
    config = resolve(_checked(tree, given, also))
    # A file may have sections for several methods: then the method is chosen apart from it.
    apart = given_tree if tree.get("method") != given_tree.get("method") else {}
    unused = {*tree, *before} - {*KEYS, *config.methods, *apart}
    return config if also else dataclasses.replace(config, unused=tuple(sorted(unused)))


load_config = make_config  # the usual name where the values are in a file


def _read(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file, or of a preset by its name."""
    if Path(path).exists():
        return read_toml(path)
    if str(path) not in presets():
        raise ConfigError(f"{path}: no such file, nor a preset{nearest(str(path), presets())}")
    return tomllib.loads(presets()[str(path)])


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if any(line.partition("=")[0].count(".") > MOST_DEPTH for line in text.splitlines()):
            raise ValueError(f"a key has more than {MOST_DEPTH} dots")  # the parser would take very long for many
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:  # not TOML, not text, or a number of too many digits
        raise ConfigError(f"{path}: not a TOML file ({problem})") from None
    except OSError as problem:
        raise ConfigError(f"{path}: {str(problem.strerror).lower()}") from None
    _check_depth(tree, str(path))
    return tree


def _check_depth(tree: Any, what: str) -> None:
    """Refuses values that are nested more deeply than any config is, before anything follows them down."""
    layer = [tree]
    for _ in range(MOST_DEPTH):
        layer = [v for x in layer for v in (x.values() if isinstance(x, Mapping) else x if _is_list(x) else ())]
    if layer:
        raise ConfigError(f"{what}: values are nested more than {MOST_DEPTH} deep, expected a config")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def presets() -> dict[str, str]:
    """The configs that come with the package, by name."""
    files = (resources.files("incofl") / "presets").iterdir()
    return {file.name.removesuffix(".toml"): file.read_text() for file in files if file.name.endswith(".toml")}


def _set(tree: dict[str, Any], override: str) -> None:
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not key:
        raise ConfigError(f"config: got {override!r}, expected key=value such as data.alpha=0.5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a bare word is a string: method=incoavg
    *tables, last = key.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"config: {key!r} is not a key: {table!r} is a value, not a table")
    tree[last] = value


def _checked(tree: dict[str, Any], objects: dict[str, Any], also: Iterable[Any]) -> Config:
    """The config of a tree, whose tables are sections of ``Config`` or of methods."""
    method = tree.get("method", Config.method)
    sections = SECTIONS | all_options()
    for other in also:
        sections |= find("method", "", {"method": other}).options
    # Your own method may have sections of its own, and any may have defaults of its own in a section that others have.
    if isinstance(method, str) and (":" in method or method in METHODS):
        sections |= find("method", method, objects).options
    dotted = {f"{key}.{name}" for key, table in tree.items() if isinstance(table, dict) for name in table}
    for old in RENAMED.keys() & dotted:
        raise ConfigError(f"config: unknown key {old!r}; did you mean {RENAMED[old]!r}?")
    for key, table in tree.items():
        if key not in KEYS and key not in sections:
            last = {f.name: f"{name}." for name, own in reversed(sections.items()) for f in dataclasses.fields(own)}
            near = difflib.get_close_matches(key.lower(), [*KEYS, *sections, *last], n=1)
            hint = nearest(key, near or {*KEYS, *sections}, last.get(near[0], "") if near else "")
            if near and near[0] in sections and isinstance(table, dict):  # the whole key, so that it can be copied
                names = [field.name for field in dataclasses.fields(sections[near[0]])]
                pairs = ((inner, found) for inner in table for found in difflib.get_close_matches(inner, names, n=1))
                for inner, found in pairs:
                    raise ConfigError(f"config: unknown key '{key}.{inner}'; did you mean '{near[0]}.{found}'?")
            raise ConfigError(f"config: unknown key {key!r}{hint}")
    known = {key: from_table(sections[key], value, key) if key in sections else value for key, value in tree.items()}
    own = {key: known.pop(key) for key in KEYS if key in known}
    return Config(**own, methods=known, objects=objects)
