"""The same methods for a fleet of real clients, over Flower's messages. Needs ``pip install 'incofl[flower]'``."""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError("incofl.flower needs Flower: pip install 'incofl[flower]'")

from incofl.flower.app import make_client_app, make_server_app, serve
from incofl.flower.settings import Settings

__all__ = ["Settings", "make_client_app", "make_server_app", "serve"]
