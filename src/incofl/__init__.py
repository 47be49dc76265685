"""Federated learning with clients of unequal size: one server model, slices for clients, InCo Aggregation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from incofl.analysis.analyze import analyze
    from incofl.client import ClientRule, Local, LocalSettings, Upload
    from incofl.config import Config, load_config, make_config
    from incofl.data import Data
    from incofl.engine.finished import load_model
    from incofl.engine.result import Result
    from incofl.engine.round import run_round
    from incofl.engine.run import Run, run
    from incofl.errors import IncoflError
    from incofl.export.adapter import export_adapter
    from incofl.export.model import export_model
    from incofl.inco import InCo, mix
    from incofl.layout import Axes, Axis, Layout
    from incofl.method import Method, ServerRule
    from incofl.methods import METHODS
    from incofl.methods.server_optimizers import ServerAdam, ServerMomentum, ServerSchedule, ServerYogi
    from incofl.models import make_model
    from incofl.report.page import write_report
    from incofl.studies.advise import advise
    from incofl.studies.compare import compare
    from incofl.task import TASKS, Metric, Task
    from incofl.transform import Context

__all__ = ["METHODS", "TASKS", "Axes", "Axis", "ClientRule", "Config", "Context", "Data", "InCo", "IncoflError"]
__all__ += ["Layout", "Local", "LocalSettings", "Method", "Metric", "Result", "Run", "ServerAdam"]
__all__ += ["ServerMomentum", "ServerRule", "ServerSchedule", "ServerYogi", "Task", "Upload", "advise"]
__all__ += ["analyze", "compare", "export_adapter", "export_model", "load_config", "load_model"]
__all__ += ["make_config", "make_model", "mix", "run", "run_round", "write_report"]
# Where the public names are: imported when they are first used, so that the command line starts at once.
_PLACES = {
    "methods": "METHODS",
    "task": "TASKS Metric Task",
    "layout": "Axes Axis Layout",
    "client": "ClientRule Local LocalSettings Upload",
    "config": "Config load_config make_config",
    "transform": "Context",
    "data": "Data",
    "inco": "InCo mix",
    "method": "Method ServerRule",
    "engine.run": "Run run",
    "errors": "IncoflError",
    "engine.result": "Result",
    "engine.finished": "load_model",
    "methods.server_optimizers": "ServerAdam ServerMomentum ServerSchedule ServerYogi",
    "models": "make_model",
    "export.adapter": "export_adapter",
    "export.model": "export_model",
    "engine.round": "run_round",
    "studies.advise": "advise",
    "studies.compare": "compare",
    "analysis.analyze": "analyze",
    "report.page": "write_report",
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names.split()}
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'incofl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"incofl.{_PLACE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
