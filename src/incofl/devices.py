"""Device classes of a fleet, read from a TOML file.

    [[device]]
    name = "phone"
    count = 60
    memory = "64 MB"         # for training
    compute = "30 MMAC"      # multiply-accumulates per example, forward
    bandwidth = "50 MB"      # a round, down and up together

Each limit may be left out; then it does not bind.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from incofl.config import read_toml
from incofl.errors import ConfigError, nearest
from incofl.resources import DeviceClass, parse_quantity

_UNITS = {"memory": ("B",), "compute": ("MAC", "MACs"), "bandwidth": ("B",)}


def load_devices(path: Path) -> list[DeviceClass]:
    """The device classes of a file, checked."""
    tree = read_toml(path)
    entries = tree.get("device")
    if isinstance(entries, dict):
        raise ConfigError(f"{path}: got a table [device], expected an array of tables: write [[device]]")
    if set(tree) != {"device"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected [[device]] tables and nothing else, got {sorted(tree) or 'an empty file'}")
    return [_device(entry, f"{path}: device {number}") for number, entry in enumerate(entries, start=1)]


def _device(entry: Any, where: str) -> DeviceClass:
    keys = ("name", "count", *_UNITS)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: got {entry!r}, expected a [[device]] table")
    for key in entry:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, keys)}")
    name, count = entry.get("name"), entry.get("count")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name: got {name!r}, expected a string")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{where} ({name}): count: got {count!r}, expected a whole number >= 1")
    return DeviceClass(name, count, **read_limits(entry, f"{where} ({name})"))


def read_limits(entry: Mapping[str, Any], where: str) -> dict[str, int]:
    """The limits among some values, as numbers of bytes and multiply-accumulates."""
    return {key: parse_quantity(entry[key], f"{where}: {key}", units) for key, units in _UNITS.items() if key in entry}
