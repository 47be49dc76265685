"""The same methods for a fleet of real clients, over Flower's messages. Needs ``pip install 'incofl[flower]'``."""

try:
    import flwr  # noqa: F401
except ImportError as problem:
    raise ImportError("incofl.flower needs Flower: pip install 'incofl[flower]'") from problem

from incofl.flower.client import make_client_app
from incofl.flower.server import make_server_app, serve
from incofl.flower.settings import Settings
from incofl.flower.task import Task

__all__ = ["Settings", "Task", "make_client_app", "make_server_app", "serve"]
