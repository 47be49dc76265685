"""The configuration of a run."""

from incofl.config.reading import expected, load_config, make_config, presets, read_toml
from incofl.config.schema import UNBOUND, Config

__all__ = ["UNBOUND", "Config", "expected", "load_config", "make_config", "presets", "read_toml"]
