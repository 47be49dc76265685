"""Federated learning with clients of unequal size: one server model, slices for clients, InCo Aggregation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from incofl.client import ClientRule, Local, LocalSettings, Upload
    from incofl.config import Config, load_config, make_config
    from incofl.data import Data
    from incofl.engine.load import load_model
    from incofl.engine.round import run_round
    from incofl.engine.run import Result, Run, run
    from incofl.inco import InCo, mix
    from incofl.layout import Axes, Axis, Layout
    from incofl.method import Method, ServerRule
    from incofl.methods import METHODS
    from incofl.methods.server_optimizers import ServerAdam, ServerMomentum, ServerSchedule, ServerYogi
    from incofl.models import make_model
    from incofl.task import TASKS, Metric, Task
    from incofl.transform import Context

# The public names and where they are: imported when they are first used, so that the command line starts at once.
_PLACES = {
    "METHODS": "methods",
    "TASKS": "task",
    "Axes": "layout",
    "Axis": "layout",
    "ClientRule": "client",
    "Config": "config",
    "Context": "transform",
    "Data": "data",
    "InCo": "inco",
    "Layout": "layout",
    "Local": "client",
    "LocalSettings": "client",
    "Method": "method",
    "Metric": "task",
    "Result": "engine.run",
    "Run": "engine.run",
    "ServerAdam": "methods.server_optimizers",
    "ServerMomentum": "methods.server_optimizers",
    "ServerRule": "method",
    "ServerSchedule": "methods.server_optimizers",
    "ServerYogi": "methods.server_optimizers",
    "Task": "task",
    "Upload": "client",
    "load_config": "config",
    "load_model": "engine.load",
    "make_config": "config",
    "make_model": "models",
    "mix": "inco",
    "run": "engine.run",
    "run_round": "engine.round",
}
__all__ = [*_PLACES]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'incofl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"incofl.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*_PLACES, "__version__"]
