"""The configuration of a run."""

from incofl.config.reading import AnyConfig, load_config, make_config, presets, read_toml
from incofl.config.resolve import find_parts
from incofl.config.schema import UNBOUND, Config

__all__ = ["UNBOUND", "AnyConfig", "Config", "find_parts", "load_config", "make_config", "presets", "read_toml"]
