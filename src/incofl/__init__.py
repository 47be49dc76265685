"""Federated learning with clients of unequal size: one server model, slices for clients, InCo Aggregation."""

from incofl.config import Config, load_config, make_config
from incofl.engine import load_model, run, run_round
from incofl.inco import InCo, mix
from incofl.layout import Axes, Axis, Layout
from incofl.method import Method
from incofl.methods import METHODS
from incofl.models import make_model

__all__ = [
    "METHODS",
    "Axes",
    "Axis",
    "Config",
    "InCo",
    "Layout",
    "Method",
    "load_config",
    "load_model",
    "make_config",
    "make_model",
    "mix",
    "run",
    "run_round",
]
__version__ = "0.1.0"
